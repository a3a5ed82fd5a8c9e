"""What a command of the laboratory says while it works."""

from collections.abc import Callable

from eagletwin.harness.commands.options import log_progress
from eagletwin.harness.core.terminal import Line


def telling(line: Line) -> Callable[[str], None]:
    """Print to stderr, as it comes; on a terminal the line of progress counts it and repeats the last."""

    def say(text: str) -> None:
        log_progress(text)
        line.done(text)

    return say
