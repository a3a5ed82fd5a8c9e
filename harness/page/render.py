"""A document as text for a terminal, as GitHub's Markdown, and as report.html.

Case files, traces and patches come from strangers: all their texts are escaped.
"""

import base64
import hashlib
import html
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from eagletwin.harness.core.errors import unwritable
from eagletwin.harness.core.terminal import count, fold, width

from .document import Document, DocumentSection, Item, Table, TableCell

if TYPE_CHECKING:
    from rich.text import Text  # imported where a table is drawn: a page needs none

# Text and tables: as wide as they need be, never wider than the terminal unless a word is.

_STYLES = {"right": "green", "wrong": "red", "doubt": "yellow"}


def text_of(document: Document, columns: int, *, verbose: bool = False) -> str:
    """The whole text, in lines of so many columns; a command and a drawn table may be longer."""
    lines = [f"{document.status.upper()}  {document.title}"]
    lines += fold(f"NOT SEEN  {document.reason}", columns, "", " " * 10) if document.reason else []
    lines += ["", *(line for text in (document.headline, *document.lines) for line in fold(text, columns))]
    for section in document.without_empty.sections:
        if verbose or section.brief is None:
            lines += ["", *_section_text(section, columns)]
        else:
            lines += fold(section.brief, columns)
    names = {"again:": document.again, "folder:": (document.folder,) * bool(document.folder)}
    names["page:"] = (f"{document.folder}/{NAME}",) if document.folder else ()
    ends = [f"  {name:7} {text}" for name, texts in names.items() for text in texts]
    lines += ["", *fold(document.end, columns), *ends] if document.end or ends else []
    return "\n".join(lines)


def _section_text(section: DocumentSection, columns: int) -> Iterator[str]:
    yield f"  {section.heading}:"
    for text in section.lines:
        yield from fold(text, columns, "    ", "      ")
    yield from section.text.splitlines()
    for item in section.items:
        yield from _item(item, columns, found=section.found)
    tables = [table.short for table in section.tables if not table.detail]
    for table in tables:
        yield from [f"  {table.caption}:"] * (len(tables) > 1)
        yield from _table_text(table, columns)


def _item(item: Item, columns: int, *, found: bool) -> Iterator[str]:
    """A finding has a line for each of its sentences, and what else there is one paragraph."""
    if found:
        yield from fold(item.title, columns, "    ", "      ")
        for text in item.lines:
            yield from fold(text, columns, "      ", "        ")
    else:
        yield from fold(f"{item.title}: {' '.join(item.lines)}", columns, "    ", "      ")
    for name, text in (("again: ", item.again), ("folder:", item.folder)):
        if text:
            yield f"      {name} {text}"


def _table_text(table: Table, columns: int) -> Iterator[str]:
    from rich.text import Text

    cells = [[Text(cell.text, _STYLES.get(cell.kind, "")) for cell in one.cells] for one in table.rows]
    yield from draw_table(table.header, cells, columns - 2).splitlines()
    yield from fold(table.note, columns, "    ")


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout. Cells are rich markup."""
    from rich.text import Text

    print(draw_table(header, [[Text.from_markup(cell) for cell in one] for one in rows], width()), end="", flush=True)


def draw_table(header: Sequence[str], rows: "Sequence[Sequence[Text]]", most: int) -> str:
    """A table of the natural width, or where that is more than the terminal's, narrowed by breaking cells between words. A word
    is never broken: if even that is too wide, so is the table. Coloured on a terminal alone."""
    from rich import box
    from rich.console import Console
    from rich.table import Column
    from rich.table import Table as Drawn
    from rich.text import Text

    columns = list(zip(*([Text(name) for name in header], *rows), strict=True))
    widths = [max(cell.cell_len for cell in column) for column in columns]
    least = [max((len(word) for cell in column for word in cell.plain.split()), default=1) for column in columns]
    frame = 3 * len(columns) + 1
    while sum(widths) + frame > most:
        wide = max(range(len(columns)), key=lambda number: widths[number] - least[number])
        if widths[wide] <= least[wide]:
            break
        widths[wide] -= 1
    frames = box.HEAVY_HEAD if (sys.stdout.encoding or "").lower().startswith("utf") else box.ASCII
    table = Drawn(*(Column(name, width=columns) for name, columns in zip(header, widths, strict=True)), box=frames)
    for row in rows:
        table.add_row(*row)
    file = io.StringIO()
    Console(file=file, width=max(most, sum(widths) + frame), force_terminal=sys.stdout.isatty()).print(table)
    return file.getvalue()


# A comment of a pull request, or the summary of a job, in GitHub's Markdown.
#
# Names of cases come from eagletwin, and all else from trees, paths and messages of exceptions that others wrote: whatever it
# is, it is shown as it is, ends no table cell and no code span, and is no tag, no link and no mention of a person.

MOST_ROWS = 40  # GitHub takes 65,536 letters
# Markup of GitHub's, with its mentions (@), references (#), mathematics ($), emoji and addresses (a colon within a word, www.).
# An underscore within a word is none.
_WORD = "[A-Za-z0-9]"
_SPECIAL = re.compile(rf"[\\`*\[\]#|~@$]|(?<!{_WORD})_|_(?!{_WORD})|:(?=\S)|(?<=www)\.", re.IGNORECASE)
_UNSAFE_IN_CODE = re.compile(r"[`|\\]")


def plain(text: str) -> str:
    """Text that is nothing but text, on one line."""
    line = " ".join(text.split())
    return _SPECIAL.sub(lambda found: f"&#{ord(found[0])};", html.escape(line, quote=False))


def code(text: str) -> str:
    """Text in the letters of code, on one line, in a table cell too."""
    line = " ".join(text.split())
    if not line:
        return ""
    # no backslash hides a backtick in a code span, and where a pipe is escaped depends on who reads the table
    return f"<code>{plain(line)}</code>" if _UNSAFE_IN_CODE.search(line) else f"`{line}`"


def markdown_of(document: Document) -> str:
    """The whole comment: what was found, with its case; what else came out; what ran. No path of this machine is in it,
    unless a sentence names one."""
    sections = document.without_empty.sections
    lines = [f"## eagletwin: {plain(document.status.lower())}", "", f"**{plain(document.headline)}**", ""]
    lines += [f"**Not seen**: {plain(document.reason)}.", ""] if document.reason else []
    for item in (item for section in sections if section.found for item in section.items):
        lines += _finding(item)
    lines += _rows([(section, item) for section in sections if not section.found for item in section.items])
    lines += [*map(plain, document.lines), ""] if document.lines else []
    for section in sections:
        lines += _section_markdown(section)
    lines += [*(f"* {plain(name)}: {plain(value)}" for name, value in document.facts), ""] if document.facts else []
    return "\n".join([*lines, f"Again: {code(document.portable)}"])


def _finding(item: Item) -> list[str]:
    """Rule and place, and the smallest case as a file that anybody can run."""
    lines = [f"### {plain(item.title)}", "", *map(plain, item.lines), ""]
    if not item.case:
        return [*lines, *[f"Again: {code(item.portable)}", ""] * bool(item.portable)]
    # no string of a case has a backtick
    return [*lines, "```json", item.case.strip(), "```", "", f"As {code('case.json')}: {code(item.portable)}", ""]


def _rows(items: list[tuple[DocumentSection, Item]]) -> list[str]:
    if not items:
        return []
    lines = ["| | what | | again |", "|---|---|---|---|"]
    for section, item in items[:MOST_ROWS]:
        said = "<br>".join(map(plain, item.lines))
        lines.append(f"| {plain(section.heading.lower())} | {code(item.title)} | {said} | {code(item.portable)} |")
    return [*lines, *[f"\n{count(len(items) - MOST_ROWS, 'more row')} on the page."] * (len(items) > MOST_ROWS), ""]


def _section_markdown(section: DocumentSection) -> Iterator[str]:
    shown = [table.short for table in section.tables if not table.detail]
    if section.folded and section.lines:
        yield from ("<details>", f"<summary>{plain(section.folded)}</summary>", "")
        yield from (f"* {plain(text)}" for text in section.lines)
        yield from ("", "</details>", "")
    elif section.lines and not section.items:
        yield from (*map(plain, section.lines), "")
    for table in shown:
        yield from _table_markdown(table)


def _table_markdown(table: Table) -> Iterator[str]:
    yield from (f"{plain(table.caption)}:", "")
    yield f"| {' | '.join(map(plain, table.header))} |"
    yield "|---" * len(table.header) + "|"
    for one in table.rows[:MOST_ROWS]:
        yield f"| {' | '.join(map(_cell, one.cells))} |"
    yield ""


def _cell(cell: TableCell) -> str:
    return f"**{plain(cell.text)}**" if cell.kind == "wrong" else plain(cell.text)


# HTML: one file that holds its style and its program, and asks no network for anything. The page's own policy lets no other
# program run than ours, by its digest, and loads nothing.

NAME = "report.html"
_TEMPLATES = Path(__file__).parent / "templates"
# What a string of JSON must not hold inside a <script>, as JSON writes it otherwise.
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def html_of(page: Document) -> str:
    """The whole page, without what is empty on it."""
    program = (_TEMPLATES / "page.js").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(program.encode()).digest()).decode()
    return str(
        _environment()
        .get_template("page.html")
        .render(
            page=page.without_empty,
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


def write_page(folder: Path, page: Callable[[], Document]) -> Path | None:
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
