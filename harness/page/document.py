"""A command's report as plain data: built once from its typed result, and rendered as text, Markdown and HTML.

Texts are anybody's: each renderer escapes them.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

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
    """A table. filters: (label, (tag, …)) each; a table with filters, or `searched`, can be narrowed down. detail: it is on the
    page alone; more: so many of its last columns are."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[TableRow, ...]
    note: str = ""
    filters: tuple[tuple[str, tuple[str, ...]], ...] = ()
    searched: bool = False
    narrow: bool = False  # a matrix, of cells of one sign
    detail: bool = False
    more: int = 0

    @property
    def short(self) -> "Table":
        """The same without the columns that the page alone has."""
        kept = len(self.header) - self.more
        return replace(self, header=self.header[:kept], rows=tuple(replace(one, cells=one.cells[:kept]) for one in self.rows))


class Item(Struct, frozen=True, kw_only=True):
    """A finding, or a case with what came of it.

    lines   sentences
    again   the command that shows it; portable: the same without a path of this machine, for a comment
    case    the case as its file has it, which a comment holds
    folder  its run folder; href: of the page there
    """

    title: str
    lines: tuple[str, ...] = ()
    again: str = ""
    portable: str = ""
    case: str = ""
    folder: str = ""
    href: str = ""


class DocumentSection(Struct, frozen=True, kw_only=True):
    """A part of a document. lines: sentences; text: as it is, in a fixed width.

    found   whether its items come first in a comment, each with a heading of its own; else they are a table
    brief   one line of the text in place of all of it, which --verbose and the page have; a comment lacks such a section
    folded  the title under which a comment folds it
    """

    heading: str
    lines: tuple[str, ...] = ()
    text: str = ""
    items: tuple[Item, ...] = ()
    tables: tuple[Table, ...] = ()
    found: bool = False
    brief: str | None = None
    folded: str = ""

    @property
    def filled(self) -> bool:
        return bool(self.lines or self.text or self.items or any(table.rows for table in self.tables))


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


class Document(Struct, frozen=True, kw_only=True):
    """A report.

    status    equal, diverged, unknown, or another word; kind: right, wrong, doubt or "": how it looks
    headline  what it says in one line
    lines     what else there is to say, in sentences; end: the last of them, in the text
    facts     what ran
    sentence  what must hold; fields: the divergence; why: why it must hold here; reason: why it is unknown, or what did not run
    trees     expected and actual, side by side; tables: around the first wrong number
    argument  as the terminal has it; files: names beside the page
    again     commands; portable: one without a path of this machine; folder: the run folder
    """

    title: str
    status: str
    headline: str
    kind: str = ""
    lines: tuple[str, ...] = ()
    facts: Fields = ()
    fields: Fields = ()
    sentence: str = ""
    why: str = ""
    reason: str = ""
    timeline: Timeline | None = None
    trees: tuple[TreePicture, ...] = ()
    tree_note: str = ""
    tables: tuple[Table, ...] = ()
    sections: tuple[DocumentSection, ...] = ()
    argument: str = ""
    again: tuple[str, ...] = ()
    portable: str = ""
    files: tuple[str, ...] = ()
    folder: str = ""
    end: str = ""

    @property
    def look(self) -> str:
        return self.kind or {"equal": "right", "diverged": "wrong"}.get(self.status, "doubt")

    @property
    def without_empty(self) -> "Document":
        """The same without empty tables and empty sections."""
        sections = (
            replace(section, tables=tuple(table for table in section.tables if table.rows))
            for section in self.sections
            if section.filled
        )
        return replace(self, sections=tuple(sections))


def row(*cells: str | TableCell, kind: str = "", tags: tuple[str, ...] = ()) -> TableRow:
    """A row of a table; a text is a plain cell."""
    return TableRow(tuple(TableCell(one) if isinstance(one, str) else one for one in cells), kind, tags)


def table(caption: str, header: Sequence[str], rows: Iterable[TableRow | Sequence[str | TableCell]], **more: Any) -> Table:
    """A table; a filter that no row has is left out."""
    made = tuple(one if isinstance(one, TableRow) else row(*one) for one in rows)
    there = {tag for one in made for tag in one.tags}
    filters = tuple((label, tuple(tag for tag in tags if tag in there)) for label, tags in more.pop("filters", ()))
    return Table(caption=caption, header=tuple(header), rows=made, filters=filters, **more)
