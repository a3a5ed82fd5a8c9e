"""Tables on the terminal: as wide as they need be, never wider than the terminal unless a word is."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from eagletwin.harness.core.terminal import width


class _Console(Console):
    """rich ends the process with 1, a verdict's code, where stdout was closed: here its end is the caller's to tell."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table of the natural width, or where that is more than the terminal's, narrowed by breaking cells between words. A word
    is never broken: if even that is too wide, so is the table. Cells are rich markup."""
    cells = [[Text.from_markup(cell) for cell in row] for row in (header, *rows)]
    columns = list(zip(*cells, strict=True))
    widths = [max(cell.cell_len for cell in column) for column in columns]
    least = [max((len(word) for cell in column for word in cell.plain.split()), default=1) for column in columns]
    frame = 3 * len(columns) + 1
    while sum(widths) + frame > width():
        wide = max(range(len(columns)), key=lambda number: widths[number] - least[number])
        if widths[wide] <= least[wide]:
            break
        widths[wide] -= 1
    table = Table(*(Column(name, width=columns) for name, columns in zip(header, widths, strict=True)))
    for row in cells[1:]:
        table.add_row(*row)
    _Console(width=max(width(), sum(widths) + frame)).print(table)
