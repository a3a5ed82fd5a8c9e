"""What stdout is: how wide a line may be, and whether a status may be coloured. Files and pipes never hold colour."""

import os
import re
import shutil
import sys
import textwrap

NOT_A_TERMINAL = 80  # columns, where neither a terminal nor $COLUMNS says how many there are
_LEAST, _MOST = 40, 1000  # columns
# The word that a report begins with, also behind another one ("INTERRUPTED, 1 FOUND"), and its colour.
_COLOURS = {
    "EQUAL": "bold green",
    "DIVERGED": "bold red",
    "UNKNOWN": "bold yellow",
    "NOTHING NEW": "bold green",
    r"\d+ FOUND": "bold red",
    "NOTHING NEWLY BROKEN": "bold green",
    r"\d+ NEWLY BROKEN": "bold red",
    "NOTHING LOOKED AT": "bold yellow",
    "CANNOT TELL": "bold yellow",
}


def width() -> int:
    """Columns of a line on stdout: $COLUMNS, else the terminal's, else 80."""
    if sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit():
        return max(_LEAST, shutil.get_terminal_size((NOT_A_TERMINAL, 24)).columns)
    return NOT_A_TERMINAL


def bound_columns() -> None:
    """Take a $COLUMNS that no terminal has out of the environment of this process: help is padded to it, line by line."""
    columns = os.environ.get("COLUMNS", "")
    if columns and not (len(columns) <= len(str(_MOST)) and columns.isdecimal() and int(columns) <= _MOST):
        del os.environ["COLUMNS"]


def fold(text: str, columns: int, indent: str = "  ", hanging: str | None = None) -> list[str]:
    """Lines of at most so many columns, broken only between words or after a hyphen. hanging: the indent of the others."""
    return textwrap.wrap(
        text,
        columns,
        initial_indent=indent,
        subsequent_indent=indent if hanging is None else hanging,
        break_long_words=False,
    )


def show(text: str) -> None:
    """Print a report; on a terminal, its status in colour. $NO_COLOR is honoured."""
    if not sys.stdout.isatty():
        print(text)
        return
    from rich.console import Console
    from rich.text import Text

    line, newline, rest = text.partition("\n")
    styled = Text(line)
    for word, style in _COLOURS.items():
        found = re.match(rf"(?:INTERRUPTED, )?({word})\b", line)
        if found:
            styled.stylize(style, *found.span(1))
            break
    console = Console(highlight=False)
    console.print(Text.assemble(styled, newline, rest), soft_wrap=True)
