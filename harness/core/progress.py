"""Progress of long work, for a person who waits: one line on stderr with a bar, a rate, the time, and what is being looked at.

This is the one place that decides whether there is such a line. It is there on a terminal alone: a pipe, a file and a CI job
are sent nothing, and so no control character. $NO_COLOR takes its colours away. rich draws it, which the tables need anyway.
"""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from rich.progress import Progress


def wanted() -> bool:
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
    if not wanted():
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
