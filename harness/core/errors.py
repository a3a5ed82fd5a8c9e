"""Errors that a user sees: cause, consequence and remedy, and the exit code they end in (DESIGN §7).

0 equal, 1 diverged and 125 cannot tell are verdicts; everything here is 128 or more, so that `git bisect run` stops
instead of taking a broken harness for a bad commit.
"""

import errno
import sys

EXIT_EQUAL = 0
EXIT_DIVERGED = 1
EXIT_UNKNOWN = 125
EXIT_USAGE = 128
EXIT_HARNESS = 129
EXIT_INTERRUPTED = 130
EXIT_PIPE = 141  # as a shell sees a program that SIGPIPE ended


def exit_code_of(status: str) -> int:
    """The exit code of a verdict's status."""
    return {"equal": EXIT_EQUAL, "diverged": EXIT_DIVERGED}.get(status, EXIT_UNKNOWN)


def status_of(code: int) -> str:
    """The status that an exit code says: of a comparison that came to an end."""
    return {EXIT_EQUAL: "equal", EXIT_DIVERGED: "diverged"}.get(code, "unknown")


class EagletwinError(Exception):
    """Something that is neither equal nor diverged: the message says what is wrong, what follows and what to do."""

    exit_code = EXIT_HARNESS

    def __init__(self, cause: str, *, consequence: str, remedy: str) -> None:
        super().__init__(f"{cause}\n  so:  {consequence}\n  try: {remedy}")
        self.cause, self.consequence, self.remedy = cause, consequence, remedy


class AlreadyReported(Exception):
    """Ends a command with this exit code: what there is to say has been said."""

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code


class InputError(EagletwinError):
    """A case, trace, name or option that cannot be used."""

    exit_code = EXIT_USAGE


class HarnessError(EagletwinError):
    """The harness itself cannot go on: no engine, a patch that does not apply, a process that vanished."""


UNWRITABLE = {
    errno.ENOSPC: "no space is left on the disk",
    errno.EDQUOT: "a disk quota is used up",
    errno.EFBIG: "a file would be larger than `ulimit -f` allows",
}


def unwritable(error: BaseException | None) -> str:
    """Why a file could not be written, if that is behind an exception: the machine's doing. "": it is not."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, OSError) and error.errno in UNWRITABLE:
            return UNWRITABLE[error.errno] + (f" ({error.filename})" if error.filename else "")
        if isinstance(error, EOFError) and "marshal" in str(error):  # Python 3.11 keeps bytecode of which it wrote a part
            return f"bytecode is cut short, as a full disk leaves it: remove {sys.pycache_prefix or 'the __pycache__'}"
        error = error.__cause__ or error.__context__
    return ""


class Unwritable(HarnessError):
    """A process of the engine cannot write its files."""

    def __init__(self, why: str) -> None:
        super().__init__(
            f"a process of the engine cannot write its files: {why}",
            consequence="nothing is known of SGLang",
            remedy="free some space, or give --out, $EAGLETWIN_CACHE and $TMPDIR folders of another disk; see `ulimit -f`",
        )


def not_seen(what: str) -> HarnessError:
    """What to raise where a tap finds that SGLang went another way than the taps know: nothing is known of the numbers."""
    return HarnessError(
        what,
        consequence="the taps did not see what this release does, so the case has no verdict",
        remedy="run a release of `eagletwin info releases list`; docs/explanation/eras.md says what differs between them",
    )
