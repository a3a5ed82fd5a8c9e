"""Errors that a user sees: cause, consequence and remedy, and the exit code they end in (DESIGN §7).

0 equal, 1 diverged and 125 cannot tell are verdicts; everything here is 128 or more, so that `git bisect run` stops
instead of taking a broken harness for a bad commit.
"""

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


class EagletwinError(Exception):
    """Something that is neither equal nor diverged: the message says what is wrong, what follows and what to do."""

    exit_code = EXIT_HARNESS

    def __init__(self, cause: str, *, consequence: str, remedy: str) -> None:
        super().__init__(f"{cause}\n  so:  {consequence}\n  try: {remedy}")
        self.cause = cause


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


def not_seen(what: str) -> HarnessError:
    """What to raise where a tap finds that SGLang went another way than the taps know: nothing is known of the numbers."""
    return HarnessError(
        what,
        consequence="the taps did not see what this release does, so the case has no verdict",
        remedy="run a release of `eagletwin releases list`; docs/explanation/eras.md says what differs between them",
    )
