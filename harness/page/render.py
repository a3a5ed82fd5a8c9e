"""A page as HTML, and report.html: one file that holds its style and its program, and asks no network for anything.

Case files, traces and patches come from strangers. All their texts are escaped; the page's own policy lets no other program run
than ours, by its digest, and loads nothing.
"""

import base64
import hashlib
import os
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from eagletwin.harness.core.errors import unwritable

# What is on a page, as plain data. Texts are anybody's: all are escaped.

Fields = tuple[tuple[str, str], ...]  # name and value


class Mark(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What happened to a request in one iteration.

    at        column of the time line
    kind      chunk, round, end, abort, event or other
    text      for the cell; more: sentences for who asks
    accepted, rejected  tokens that were drafted; bonus: the token behind them
    wrong     divergences that it holds; first: the first of all is among them
    """

    at: int
    kind: str
    text: str
    more: tuple[str, ...] = ()
    accepted: tuple[int, ...] = ()
    rejected: tuple[int, ...] = ()
    bonus: int | None = None
    wrong: int = 0
    first: bool = False


class Lane(Struct, frozen=True, kw_only=True):
    """A request, or the scheduler. note: what was asked for."""

    name: str
    note: str
    marks: tuple[Mark, ...]


class Timeline(Struct, frozen=True, kw_only=True):
    """Requests down, iterations across. columns: the iterations in which something happened. first: the column of the first
    divergence; -1: there is none. brief: rounds without their tokens, since there are too many"""

    columns: tuple[int, ...]
    lanes: tuple[Lane, ...]
    first: int = -1
    brief: int = 0


class TableCell(Struct, frozen=True):
    """A cell of a table. kind: wrong, right, doubt or "": shown by a sign as well as by a colour. href: of a link"""

    text: str
    kind: str = ""
    href: str = ""


class TableRow(Struct, frozen=True):
    """A row of a table. tags: by which a filter finds it."""

    cells: tuple[TableCell, ...]
    kind: str = ""
    tags: tuple[str, ...] = ()


class Table(Struct, frozen=True, kw_only=True):
    """A table. filters: (label, (tag, …)) each; a table with filters, or `searched`, can be narrowed down."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[TableRow, ...]
    note: str = ""
    filters: tuple[tuple[str, tuple[str, ...]], ...] = ()
    searched: bool = False
    narrow: bool = False  # a matrix, of cells of one sign


class PageSection(Struct, frozen=True, kw_only=True):
    """A part of a page. lines: sentences; text: as it is, in a fixed width."""

    heading: str
    lines: tuple[str, ...] = ()
    text: str = ""
    tables: tuple[Table, ...] = ()


class Node(Struct, frozen=True, kw_only=True):
    """A node of a drawn tree, centred at x, y. selected: for the tree; wrong: the two sides differ in it."""

    x: int
    y: int
    label: str
    token: str
    note: str = ""
    accepted: bool = False
    selected: bool = True
    wrong: bool = False


class TreePicture(Struct, frozen=True, kw_only=True):
    """A drawn tree. edges: x1, y1, x2, y2"""

    title: str
    width: int
    height: int
    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int, int, int], ...]
    words: str  # for who does not see it


class Page(Struct, frozen=True, kw_only=True):
    """A page.

    status    equal, diverged, unknown, or another word; headline: what it says in one line
    facts     what ran
    sentence  what must hold; fields: the divergence; why: why it must hold here; reason: why it is unknown
    trees     expected and actual, side by side; tables: around the first wrong number
    argument  as the terminal has it; again: commands; files: names beside the page
    """

    title: str
    status: str
    headline: str
    facts: Fields = ()
    fields: Fields = ()
    sentence: str = ""
    why: str = ""
    reason: str = ""
    timeline: Timeline | None = None
    trees: tuple[TreePicture, ...] = ()
    tree_note: str = ""
    tables: tuple[Table, ...] = ()
    sections: tuple[PageSection, ...] = ()
    argument: str = ""
    again: tuple[str, ...] = ()
    files: tuple[str, ...] = ()


NAME = "report.html"
_TEMPLATES = Path(__file__).parent / "templates"
# What a string of JSON must not hold inside a <script>, as JSON writes it otherwise.
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def html_of(page: Page) -> str:
    """The whole page."""
    program = (_TEMPLATES / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(program.encode()).digest()).decode()
    return str(
        _environment()
        .get_template("page.html")
        .render(
            page=page,
            style=(_TEMPLATES / "page.css").read_text(encoding="utf-8"),
            program=program,
            program_digest=digest,
            timeline=_json(page.timeline),
        )
    )


@cache
def _environment() -> Any:
    import jinja2

    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _json(data: object) -> str:
    """JSON that may stand inside a <script>: it holds no character that could end it."""
    text = msgspec.json.encode(data).decode()
    for character, escape in _ESCAPES.items():
        text = text.replace(character, escape)
    return text


def write_page(folder: Path, page: Callable[[], Page]) -> Path | None:
    """Write report.html into a folder; None if it could not be made or written, which changes no verdict: stderr says why."""
    file = folder / NAME
    partial = folder / f".{NAME}.{os.getpid()}"
    try:
        partial.write_text(html_of(page()), encoding="utf-8")
        partial.replace(file)
    except OSError as error:
        why = unwritable(error) or error.strerror or str(error)
        print(f"note: {file} cannot be written ({why}); the verdict stands without it", file=sys.stderr)
        return None
    except Exception as error:
        print(
            f"note: {file} could not be made ({type(error).__name__}: {error}); the verdict stands without it\n"
            "  try: report this with the run folder: it is a bug of eagletwin",
            file=sys.stderr,
        )
        return None
    return file
