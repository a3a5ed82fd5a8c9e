"""A document as text for a terminal, and tables: as wide as they need be, never wider than the terminal unless a word is."""

import io
import sys
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Column
from rich.table import Table as Drawn
from rich.text import Text

from eagletwin.harness.core.terminal import fold, width

from .document import Document, DocumentSection, Item, Table
from .render import NAME

_STYLES = {"right": "green", "wrong": "red", "doubt": "yellow"}


def text_of(document: Document, columns: int, *, verbose: bool = False) -> str:
    """The whole text, in lines of so many columns; a command and a drawn table may be longer."""
    lines = [f"{document.status.upper()}  {document.title}"]
    lines += fold(f"NOT SEEN  {document.reason}", columns, "", " " * 10) if document.reason else []
    lines += ["", *(line for text in (document.headline, *document.lines) for line in fold(text, columns))]
    for section in document.filled.sections:
        if verbose or section.brief is None:
            lines += ["", *_section(section, columns)]
        else:
            lines += fold(section.brief, columns)
    names = {"again:": document.again, "folder:": (document.folder,) * bool(document.folder)}
    names["page:"] = (f"{document.folder}/{NAME}",) if document.folder else ()
    ends = [f"  {name:7} {text}" for name, texts in names.items() for text in texts]
    lines += ["", *fold(document.end, columns), *ends] if document.end or ends else []
    return "\n".join(lines)


def _section(section: DocumentSection, columns: int) -> Iterator[str]:
    yield f"  {section.heading}:"
    for text in section.lines:
        yield from fold(text, columns, "    ", "      ")
    yield from section.text.splitlines()
    for item in section.items:
        yield from _item(item, columns, found=section.found)
    tables = [table.short for table in section.tables if not table.detail]
    for table in tables:
        yield from [f"  {table.caption}:"] * (len(tables) > 1)
        yield from _table(table, columns)


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


def _table(table: Table, columns: int) -> Iterator[str]:
    cells = [[Text(cell.text, _STYLES.get(cell.kind, "")) for cell in one.cells] for one in table.rows]
    yield from drawn(table.header, cells, columns - 2).splitlines()
    yield from fold(table.note, columns, "    ")


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout. Cells are rich markup."""
    print(drawn(header, [[Text.from_markup(cell) for cell in one] for one in rows], width()), end="", flush=True)


def drawn(header: Sequence[str], rows: Sequence[Sequence[Text]], most: int) -> str:
    """A table of the natural width, or where that is more than the terminal's, narrowed by breaking cells between words. A word
    is never broken: if even that is too wide, so is the table. Coloured on a terminal alone."""
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
