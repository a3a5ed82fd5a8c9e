"""What a thread looks at beside a search: saved files, after which `eagletwin fuzz --watch` begins again, and compilers.

Each search has a folder and a process of the engine of its own. What the engine imports of other packages is imported once
(engines/start.py): the processes are forked from that.
"""

import ctypes
import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from eagletwin.harness.core.case import Case
from eagletwin.harness.core.differs import join_names
from eagletwin.harness.core.errors import EXIT_INTERRUPTED, AlreadyReported, EagletwinError, exit_code_of, status_of
from eagletwin.harness.core.terminal import count, show

from ..options import log_progress
from .search import Fuzz

_EVERY = 0.05  # seconds between two questions whether a file was saved
_ANYWAY = 2.0  # seconds after which all files are looked at, which takes 0.04: the kernel is not told what another host saves
_SOON = 4.0  # seconds after a save until what is equal so far is printed
_AGAIN = 2.0  # seconds until a search that did not end is interrupted again: Python drops what is raised in a callback


class Saved(BaseException):
    """A file was saved while a search ran."""


class _Events:
    """What the kernel tells of folders (inotify). Where it tells of no more of them, something may always have happened."""

    _TOLD = 0x8 | 0x40 | 0x80 | 0x100 | 0x200  # a file that was written is closed; one that was moved, made or removed

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = self._libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._blind = self._descriptor < 0

    def tell_of(self, folder: str) -> None:
        failed = self._libc.inotify_add_watch(self._descriptor, os.fsencode(folder), self._TOLD) < 0
        self._blind |= failed and ctypes.get_errno() != errno.ENOENT

    def any(self) -> bool:
        """Whether something happened since this was asked before."""
        try:
            return self._blind or bool(os.read(self._descriptor, 1 << 16))
        except BlockingIOError:
            return False


class Files:
    """The Python files below a folder, and when each was saved."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._events = folder, _Events()
        self.forget()

    def saved(self) -> list[str]:
        """The names of the files that were saved, made or removed since `forget`."""
        if self._events.any() or time.monotonic() > self._read_at + _ANYWAY:
            self._saved = sorted({Path(file).name for file, _ in self._seen.items() ^ self._read().items()})
        return self._saved

    def forget(self) -> None:
        """What was saved until now is known."""
        self._seen, self._saved = self._read(), list[str]()

    def _read(self) -> dict[str, tuple[int, int]]:
        found, folders = dict[str, tuple[int, int]](), [str(self._folder)]
        self._read_at = time.monotonic()
        while folders:
            self._events.tell_of(folder := folders.pop())
            with suppress(OSError), os.scandir(folder) as entries:  # it is gone
                for entry in entries:
                    if entry.name.endswith(".py"):
                        with suppress(OSError):
                            found[entry.path] = (entry.stat().st_mtime_ns, entry.stat().st_size)
                    elif entry.is_dir() and not entry.name.startswith((".", "__pycache__")):
                        folders.append(entry.path)
        return found


@dataclass(slots=True)
class WatchedSearch:
    """The search after a save. saved: names of files, none of the first one; recent: cases of the one before that ran its
    change; code: the exit code of its verdict, None as long as there is none; verdicts: the code of each content of the tree.
    """

    saved: list[str]
    recent: tuple[Case, ...]
    verdicts: dict[str, int] = field(default_factory=dict)
    code: int | None = None
    _early: bool = False
    _looking: Fuzz | None = None
    _begun: float = field(default_factory=time.monotonic)

    def follow(self, looking: Fuzz) -> None:
        """Print the verdict of this search; of what was searched before, as after a change that is undone, at once."""
        self._looking = looking
        looking.answer = lambda status: self.answer(exit_code_of(status))
        if (code := self.verdicts.get(self._content)) is not None:
            self._say(code, "as before")

    @property
    def _content(self) -> str:
        return self._looking.trials.host.source.called if self._looking is not None else ""

    def answer(self, code: int) -> None:
        """Print a line with the verdict, unless it is the one that was printed."""
        if code != self.code and self._looking is not None:
            self._say(code, self._ran)

    def answer_early(self) -> None:
        """Print a line, once, where no verdict comes soon and all is equal so far."""
        tally = self._looking.tally if self._looking is not None and self.code is None and not self._early else None
        if tally is not None and tally.reached and time.monotonic() > self._begun + _SOON:
            self._early = True
            wrong = tally.statuses["diverged"] + tally.undecided
            if not wrong and tally.statuses["equal"] + tally.statuses["known"] >= tally.reached:
                self._print("equal so far", self._ran)

    @property
    def _ran(self) -> str:
        assert self._looking is not None
        tally, differs = self._looking.tally, self._looking.tally.changes.differs
        functions = [] if differs is None else [name.rpartition(".")[2] for name in differs.functions]
        ran = f"{tally.reached} of {count(tally.cases, 'case')} ran it" if functions else count(tally.cases, "case")
        if differs is not None and differs.places:
            ran += f" ({len(differs.places) - len(differs.unexecuted)} of {count(len(differs.places), 'statement')})"
        return f"{join_names(functions) or 'no change'}: {ran}"

    def _say(self, code: int, text: str) -> None:
        self.code = self.verdicts[self._content] = code
        self._print(status_of(code), text)

    def _print(self, verdict: str, text: str) -> None:
        after = f"after {join_names(self.saved)} was saved" if self.saved else "after the start"
        show(f"{verdict.upper()}  {text}; {time.monotonic() - self._begun:.1f} s {after}")
        sys.stdout.flush()

    @property
    def next_recent(self) -> tuple[Case, ...]:
        """`recent` of the round after this one."""
        corpus = self._looking.corpus if self._looking is not None else None
        return (corpus.recent if corpus is not None else ()) or self.recent


def search_again(tree: Path, search: Callable[[WatchedSearch], object]) -> int:
    """Search, and again after each save, until Ctrl-C; the exit code of the last verdict."""
    files, one, code = Files(tree), WatchedSearch([], ()), EXIT_INTERRUPTED
    with suppress(KeyboardInterrupt):
        while True:
            try:
                with interrupted_by(files, one.answer_early):
                    search(one)
            except Saved:
                pass
            except AlreadyReported:  # Ctrl-C
                break
            except EagletwinError as error:
                log_progress(f"error: {error}")
                one.code = error.exit_code
            code = code if one.code is None else one.code
            while not (saved := files.saved()):
                time.sleep(_EVERY)
            one = WatchedSearch(saved, one.next_recent, one.verdicts)
            files.forget()
    return code if one.code is None else one.code


@contextmanager
def interrupted_by(files: Files, look_too: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Raise Saved in the block, in this thread, when a file is saved. Until then the thread that looks calls `look_too`."""
    over, here = threading.Event(), threading.get_ident()

    def raise_saved(*_: object) -> None:
        if not over.is_set():
            raise Saved

    def look() -> None:
        if files.saved():
            signal.pthread_kill(here, signal.SIGUSR1)
            over.wait(_AGAIN)
        else:
            look_too()

    before = signal.signal(signal.SIGUSR1, raise_saved)
    try:
        with _looking_every(_EVERY, look, over):
            yield
    finally:
        signal.signal(signal.SIGUSR1, before)


@contextmanager
def saying_that_kernels_compile(looking: Fuzz, every: float = 10.0) -> Iterator[None]:
    """Why no case ends for minutes: the engine's kernels are compiled where they are first used. every: seconds without a
    case"""
    before = -1

    def look() -> None:
        nonlocal before
        if (cases := looking.tally.cases) == before:
            so_far = f"{count(cases, 'case')} in {looking.seconds:.0f} s"
            log_progress(f"{so_far}: kernels are compiled when they are first used")
        before = cases

    with _looking_every(every, look, threading.Event()):
        yield


@contextmanager
def _looking_every(seconds: float, look: Callable[[], None], over: threading.Event) -> Iterator[None]:
    """A thread calls `look` again and again while the block runs; `over` is set at its end."""

    def look_again() -> None:
        while not over.wait(seconds):
            look()

    thread = threading.Thread(target=look_again, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
