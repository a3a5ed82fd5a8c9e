"""Errors that a user sees, the exit codes they end in, and the guard through which every program leaves (DESIGN §7).

0 equal, 1 diverged and 125 cannot tell are verdicts; everything here is 128 or more, so that `git bisect run` stops
instead of taking a broken harness for a bad commit.
"""

import errno
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from eagletwin.door import remedy

EXIT_EQUAL = 0
EXIT_DIVERGED = 1
EXIT_UNKNOWN = 125
EXIT_USAGE = 128
EXIT_HARNESS = 129
EXIT_INTERRUPTED = 130
EXIT_PIPE = 141  # as a shell sees a program that SIGPIPE ended


def exit_code_of(status: str) -> int:
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
            consequence="nothing is known of the engine",
            remedy="free some space, or give --out, $EAGLETWIN_CACHE and $TMPDIR folders of another disk; see `ulimit -f`",
        )


def not_seen(what: str) -> HarnessError:
    """What to raise where a tap finds that the engine went another way than the taps know: nothing is known of the numbers."""
    return HarnessError(
        what,
        consequence="the taps did not see what this release does, so the case has no verdict",
        remedy="run a release of `eagletwin info releases list`; docs/explanation/eras.md says what differs between them",
    )


# The guard.

INTERRUPTED = "interrupted: nothing more was judged; a run folder that holds no verdict.json is of an interrupted run"

_AGAIN_SECONDS = 0.01
# What permissions and free space can cure; any other error of the operating system has another cause, which it names itself.
_STORAGE = {*UNWRITABLE, errno.EACCES, errno.EPERM, errno.EROFS}


def run_guarded(run: Callable[[], object]) -> int:
    """The exit code that `run` returns, or that of errors.py for what it raises: Python's own, 1, would read as `diverged`.

    A run that returns no exit code has no result to report: that is a harness error, never a success. A signal that asks the
    process to end interrupts the run.
    """
    with interrupt_on_sigterm():
        return _code_of(run)


def _code_of(run: Callable[[], object]) -> int:
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the shell closed it, as by `>&-`: that changes no verdict
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    try:
        code = run()
        sys.stdout.flush()  # if that fails as the interpreter ends, the exit code is Python's own
    except SystemExit as stop:  # raised by a library, with an exit code of its own; typer does so for a broken pipe
        if reader_is_gone() or _missed_by_rich(stop):
            return _unread()
        print(f"error: a library ended the process (SystemExit {stop.code}); the command did not finish", file=sys.stderr)
        code = EXIT_HARNESS
    except AlreadyReported as end:
        return end.exit_code
    except EagletwinError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except ImportError as error:
        traceback.print_exc()
        print(f"error: {type(error).__name__}: {error}\n{remedy(error)}", file=sys.stderr)
        code = EXIT_HARNESS
    except OSError as error:
        if reader_is_gone():
            return _unread()
        print(f"error: {error}\n  so:  the command stopped there\n  try: {_advice(error)}", file=sys.stderr)
        code = EXIT_HARNESS
    except BaseException:
        traceback.print_exc()
        print("error: eagletwin itself failed; this is a bug in it, and says nothing about the engine", file=sys.stderr)
        code = EXIT_HARNESS
    if code == EXIT_INTERRUPTED:  # also what typer returns when it sees Ctrl-C first
        print(INTERRUPTED, file=sys.stderr)
    if type(code) is int:
        return code
    print("error: the command ended without an exit code; this is a bug in eagletwin", file=sys.stderr)
    return EXIT_HARNESS


def reader_is_gone() -> bool:
    """Whether stdout is a pipe that nothing reads any more, as behind `| head -1`. Other pipes break for other reasons."""
    try:
        pipe = select.poll()
        pipe.register(sys.__stdout__.fileno(), 0)  # type: ignore[union-attr]
        return any(event & select.POLLERR for _, event in pipe.poll(0))
    except (AttributeError, OSError, ValueError):  # there is no stdout
        return False


def _missed_by_rich(stop: SystemExit) -> bool:
    """Whether rich, which prints the help, found that nothing reads it. It has put /dev/null in the place of the pipe then."""
    raised_in = [frame.f_code.co_name for frame, _ in traceback.walk_tb(stop.__traceback__)]
    return raised_in[-1:] == ["on_broken_pipe"]


def _unread() -> int:
    """The reader had what it wanted, and the rest of the command was not done: no error, and no verdict."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  for the interpreter to flush into as it ends
    return EXIT_PIPE


def _advice(error: OSError) -> str:
    """What can be done about an error of the operating system."""
    if error.errno in _STORAGE:
        return "look at the permissions and the free space of the folder, and at `ulimit -f`"
    if isinstance(error, FileNotFoundError) and error.filename:
        return f"see that {error.filename} exists: a file, or a program that must be on the PATH"
    return "look at what the message names; `eagletwin info doctor` says what this machine lacks"


@contextmanager
def interrupt_on_sigterm() -> Iterator[None]:
    """A polite request to end is one to clean up, as Ctrl-C is: processes, scratch folders, what a command has found so far.

    The first one raises KeyboardInterrupt, and those after it do nothing: they would end the cleaning up. Python drops what is
    raised in a callback, as while it imports modules, and in the hook that it calls then: KeyboardInterrupt is raised a moment
    later in both.
    """
    asked = False
    hook, alarm = sys.unraisablehook, signal.getsignal(signal.SIGALRM)

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            with suppress(OSError):
                os.write(2, b"it is ending already: what was found is being kept\n")
            return
        asked = True
        raise_here(number, frame)

    def raise_here(_: int, frame: FrameType | None) -> None:
        while frame is not None:
            if frame.f_code is handle_unraisable.__code__:
                raise_later()
                return
            frame = frame.f_back
        raise KeyboardInterrupt

    def raise_later() -> None:
        signal.signal(signal.SIGALRM, raise_here)
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)

    def handle_unraisable(what: "sys.UnraisableHookArgs") -> None:
        if asked and issubclass(what.exc_type, KeyboardInterrupt):
            raise_later()
            return
        hook(what)

    # SIGHUP: the terminal was closed; an ignored signal, as under nohup, stays ignored
    asking = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, interrupt) for number in asking if signal.getsignal(number) != signal.SIG_IGN}
    sys.unraisablehook = handle_unraisable
    try:
        yield
    finally:
        sys.unraisablehook = hook
        if signal.getsignal(signal.SIGALRM) is raise_here:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, alarm)
        for number, handler in before.items():
            signal.signal(number, handler)
