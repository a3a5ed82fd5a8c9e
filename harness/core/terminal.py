"""Text on the terminal: counts in words, the width of a line, colour, and progress."""

import difflib
import os
import re
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from .verdict import RequestShare

if TYPE_CHECKING:
    from rich.progress import Progress

# Numbers in what is printed: 1 case, 2 cases; once, 3 times.

_FEW = 12


def nearest(name: object, known: Iterable[object], listed: str = "") -> str:
    """The remedy for a name that is not known: the names most like it; all of them where they are few, or none is like it.

    listed: the command or page that lists all"""
    names = [str(one) for one in known]
    near = difflib.get_close_matches(str(name), names, 3, 0.5)
    if near and len(names) > _FEW:
        return f"did you mean {' or '.join(near)}?" + (f" {listed} lists all" if listed else "")
    return f"{listed} lists them" if listed and len(names) > _FEW else f"use one of {', '.join(names)}"


def count(number: int, word: str) -> str:
    """So many of a thing whose plural ends in s."""
    return f"{number} {word}{'' if number == 1 else 's'}"


def times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def describe_exit(code: int) -> str:
    """A process, by its exit code: negative, if a signal did it."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"


def asked_the_impossible(tokens: Mapping[str, int]) -> str:
    """From where on requests are not judged that ask for what cannot be. tokens: see Verdict.impossible."""
    return " and ".join(f"request {name} from its output token {token} on" for name, token in tokens.items())


def compared_in_part(shares: Mapping[str, RequestShare]) -> str:
    """Of each request of which not everything was compared, how much was; empty: of all, everything."""
    return "; ".join(f"request {name}, {share}" for name, share in shares.items() if str(share))


def others_in_plain_decode(tokens: int) -> str:
    """What is said of tokens that differ from those of plain decode as the engine declares."""
    ours = "1 token is not the one" if tokens == 1 else f"{tokens} tokens are not those"
    return f"{ours} that plain decode sends: in verify penalties do not count the tokens of the same round."


# What stdout is: how wide a line may be, and whether a status may be coloured. Files and pipes never hold colour.

NOT_A_TERMINAL = 80  # columns, where neither a terminal nor $COLUMNS says how many there are
_LEAST, _MOST = 40, 1000  # columns
# The word that a report begins with, also behind another one ("INTERRUPTED, 1 FOUND"), and its colour.
_COLOURS = {
    r"EQUAL|HOLDS|NOTHING NEW|NOTHING FOUND|NONE NEWLY WRONG": "bold green",
    r"DIVERGED|FAILS|WRONG NUMBERS|\d+ FOUND|\d+ NEWLY BROKEN": "bold red",
    r"UNKNOWN|NOTHING LOOKED AT|CANNOT TELL": "bold yellow",
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
    """Lines of at most so many columns, broken between words: an id or path stays whole. hanging: the indent of the others."""
    return textwrap.wrap(
        text,
        columns,
        initial_indent=indent,
        subsequent_indent=indent if hanging is None else hanging,
        break_long_words=False,
        break_on_hyphens=False,
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


# Progress of long work, for a person who waits: one line on stderr with a bar, a rate, the time, and what is being looked at.
#
# This is the one place that decides whether there is such a line. It is there on a terminal alone: a pipe, a file and a CI job
# are sent nothing, and so no control character. $NO_COLOR takes its colours away. rich draws it, which the tables need anyway.


def is_interactive() -> bool:
    """Whether somebody looks at stderr as it is written. CI services set $CI; a dumb terminal cannot go back in a line."""
    return sys.stderr.isatty() and not os.environ.get("CI") and os.environ.get("TERM") != "dumb"


class Line:
    """The line, as a command sees it; without a terminal nothing comes of it."""

    def __init__(self, drawn: "Progress | None" = None) -> None:
        self._drawn = drawn

    def look(self, what: str) -> None:
        """What is being looked at."""
        if self._drawn is not None:
            self._drawn.update(self._drawn.task_ids[0], what=what)

    def done(self, what: str = "") -> None:
        """One more is done; what: the one that comes next, or what is to be said of it."""
        if self._drawn is not None:
            self._drawn.update(self._drawn.task_ids[0], advance=1, what=what)


@contextmanager
def progress(unit: str, total: int | None = None) -> Iterator[Line]:
    """A line for as long as the block runs; what is printed meanwhile stands above it. unit: what is counted; total: how many
    there are, if that is known."""
    if not is_interactive():
        yield Line()
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
    from rich.table import Column
    from rich.text import Text

    class Rate(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(_rate(task.completed, task.elapsed or 0.0))

    of = " of {task.total:.0f}" if total is not None else ""
    columns = (
        BarColumn(bar_width=16),
        TextColumn(f"{{task.completed:.0f}}{of} {{task.description}}"),
        Rate(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[what]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
    )

    class Unbroken(Console):
        """Prints text above the line as it is: a command that is broken in two cannot be typed again."""

        def print(self, *objects: Any, **how: Any) -> None:
            super().print(*objects, **{"soft_wrap": bool(objects) and isinstance(objects[0], Text), **how})

    console = Unbroken(stderr=True, highlight=False)
    same = sys.stdout.isatty()  # else what is printed goes where it was sent, and not onto the terminal
    drawn = Progress(*columns, console=console, transient=True, expand=True, refresh_per_second=4, redirect_stdout=same)
    with drawn:
        drawn.add_task(unit, total=total, what="")
        yield Line(drawn)


T = TypeVar("T")


def each(things: Sequence[T], unit: str, named: Callable[[T], str] = lambda thing: "") -> Iterator[T]:
    """The things, with a line that says which of them is worked on."""
    with progress(unit, len(things)) as line:
        for thing in things:
            line.look(named(thing))
            yield thing
            line.done()


def _rate(done: float, seconds: float) -> str:
    """A second, or a minute where that is less than one."""
    if not done or not seconds:
        return ""
    return f"{done / seconds:.1f}/s" if done >= seconds else f"{60 * done / seconds:.1f}/min"
