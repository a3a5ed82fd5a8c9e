"""Watches the processes in which cases run, for the module that started them: forking.py, or for several ranks or a GPU
what starts those.

Of several ranks each is a process that runs the case in lock-step with the others: they wait for each other in collectives.
So one that ends, and not because the case is over, ends all: the others would wait for it for ever.
"""

import contextlib
import ctypes
import os
import select
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from msgspec.structs import replace

from eagletwin.harness.core.records import Ending
from eagletwin.harness.core.trace import rank_folder
from eagletwin.harness.engines import protocol
from eagletwin.harness.engines.machine import LOOK_SECONDS, CompileTime

# How far a case got, for the process that watches it: a few bytes at the head of a file in its folder, new at each stage.
#
# A message would do, and wake the watcher some thirty times a case; this is read when a limit has passed, or a process has
# ended.

_NAME = ".progress"
_HEAD = struct.Struct("=dH")  # when, on the clock that all processes of a machine share; bytes of text after it
_SIZE = 256


class Progress:
    """Open it in both processes, that which writes and that which reads; the latter takes the file away at the end."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / _NAME
        self._descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o644)

    def note(self, where: str) -> None:
        """In one piece, so that a process that dies leaves this or what was there before."""
        text = where.encode()[: _SIZE - _HEAD.size]
        os.pwrite(self._descriptor, _HEAD.pack(time.monotonic(), len(text)) + text, 0)

    def read(self) -> tuple[float, str] | None:
        """When something was reached last, and what; None: nothing yet."""
        data = os.pread(self._descriptor, _SIZE, 0)
        if len(data) < _HEAD.size:
            return None
        when, length = _HEAD.unpack_from(data)
        return when, data[_HEAD.size : _HEAD.size + length].decode(errors="replace")

    def close(self) -> None:
        os.close(self._descriptor)

    def remove(self) -> None:
        self.close()
        with contextlib.suppress(OSError):
            self._file.unlink()


# The last message of a stuck process: the trace of its case so far. Called by runner.py, asked for by supervise.py.
#
# A worker that waits for another rank or for a GPU does so in C++, where no handler of Python's runs. But a thread does: the
# signal's number comes through a pipe, the thread has the trace written, and ends the process.

ASK = signal.SIGUSR1
STUCK = 71  # exit status of a process that was asked, and wrote its trace


class LastWord:
    """Make one in the main thread, once in a process. `write` writes the trace of the case that runs; None between cases."""

    def __init__(self) -> None:
        self.write: Callable[[], None] | None = None
        self._asked, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.signal(ASK, lambda *_: None)  # a signal that Python does not know is not written to the pipe
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while os.read(self._asked, 1) != bytes([ASK]):
            pass
        if self.write is not None:
            with torch.inference_mode():
                self.write()
            os._exit(STUCK)


HARNESS_FAILED = 70  # exit status of a runner that failed outside the worker
UNWRITABLE = 72  # and of one that could not write a file
_PR_SET_PDEATHSIG = 1
# How long the other ranks may go on when one has ended early: those that see it write what they have.
_GRACE_SECONDS = 10.0
# How long a rank that is to be ended may take to write what it has.
_LAST_WORD_SECONDS = 5.0
# How long a process that died may write its core; one of a gigabyte takes some seconds.
_CORE_SECONDS = 120.0


def reap() -> dict[int, int]:
    """Collect children that have ended. Returns the status of each, by its number."""
    ended = dict[int, int]()
    with contextlib.suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG))[0]:
            ended.update((child,))
    return ended


def is_dying(pid: int) -> bool:
    """Whether a process of this number has died, and its core is still written, or its memory given back."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    return "CoreDumping:\t1" in status or "VmSize" not in status


def wait_for_all() -> None:
    """Return when no child is left, each collected."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass(slots=True)
class Runner:
    """The processes that run cases, one a rank; `ran` counts the cases that they finished since they were fresh."""

    pids: list[int]
    connections: list[socket.socket]
    ran: int = 0

    def is_gone(self) -> bool:
        """Whether a waiting process was killed: it sends nothing while it waits, so a readable socket means that it ended."""
        return bool(select.select(self.connections, [], [], 0)[0])

    def hang_up(self) -> None:
        """They end by themselves."""
        for connection in self.connections:
            connection.close()

    def kill(self) -> None:
        """End them, and collect what they leave."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in self.pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        self.hang_up()


@dataclass(slots=True)
class _Rank:
    """One of the processes while a case runs: how far it got, and what it answered."""

    number: int
    pid: int
    connection: socket.socket
    progress: Progress
    stepped: float
    where: str = "start"
    waits: protocol.Stepped | None = None
    answer: protocol.Ran | protocol.Failed | None = None
    gone: bool = False  # it was waited for
    wrote: bool = False  # a trace as its last word

    @property
    def silent(self) -> bool:
        """Whether it ended without a trace."""
        return not self.wrote and (not isinstance(self.answer, protocol.Ran) or bool(self.answer.silent))

    @property
    def clean(self) -> bool:
        return isinstance(self.answer, protocol.Ran) and self.answer.ending.kind == "finished"

    def hear(self, ran: int) -> None:
        """Take what it says, or its end."""
        try:
            message, _ = protocol.receive(self.connection)
        except (EOFError, ConnectionError):
            self.answer = self.end(ran)
            return
        self.stepped = time.monotonic()
        if isinstance(message, protocol.Stepped):
            self.waits = message
        else:
            if not isinstance(message, protocol.Ran):
                raise protocol.unexpected_message(message)
            self.answer = message

    def look(self) -> None:
        """See how far it got."""
        seen = self.progress.read()
        if seen is not None:
            self.stepped, self.where = max(self.stepped, seen[0]), seen[1]

    def wait(self) -> int:
        """Its exit status, when it has ended."""
        self.gone = True
        return os.waitpid(self.pid, 0)[1]

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def reap(self) -> bool:
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        self.gone = pid != 0
        self.wrote = self.gone and os.waitstatus_to_exitcode(status) == STUCK
        return self.gone

    def has_died(self) -> bool:
        """Whether it ended, though that was not heard: one that writes its core is connected until it has."""
        until = time.monotonic() + _CORE_SECONDS
        while os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if not is_dying(self.pid) or time.monotonic() > until:
                return False
            time.sleep(0.01)
        return True

    def end(self, ran: int) -> protocol.Ran | protocol.Failed:
        """Of one that ended by itself, and said nothing."""
        status = self.wait()
        self.look()
        if os.waitstatus_to_exitcode(status) in (UNWRITABLE, -signal.SIGXFSZ):
            why = "a file could not be written, since the disk or a quota is full, or `ulimit -f` allows none so large"
            return protocol.Failed(f"{why}; last seen: {self.where}")
        if os.WIFSIGNALED(status):
            detail = f"killed by {signal.Signals(os.WTERMSIG(status)).name}"
        elif os.WEXITSTATUS(status) == HARNESS_FAILED:
            return protocol.Failed(f"last seen: {self.where}")
        elif code := os.WEXITSTATUS(status):
            detail = f"exited with status {code}"
        else:  # something called exit() in the middle
            detail = "exited without a trace"
        return protocol.Ran(Ending(kind="crashed", detail=detail, where=self.where), (self.number,), ran)


@dataclass(slots=True)
class _Watch:
    """All ranks while a case runs. first: the one that ended early and so ends the others, and when it did."""

    ranks: list[_Rank]
    run: protocol.Run
    begun: float
    first: _Rank | None = None
    at: float = 0.0
    overdue: str = ""
    killed: list[_Rank] = field(default_factory=list)
    compiled: CompileTime = field(default_factory=CompileTime)

    @property
    def running(self) -> list[_Rank]:
        return [rank for rank in self.ranks if rank.answer is None]

    def seconds_left(self) -> float:
        """Seconds until the others are ended: by a limit, or because one of them is gone."""
        seconds = self._seconds_to_limit()
        if seconds <= 0:  # not if they have come farther since the last look
            for rank in self.running:
                rank.look()
            seconds = self._seconds_to_limit()
        return seconds

    def look_for_compilers(self) -> None:
        """What was compiled since the last look counts neither for the step nor for the case."""
        seconds = self.compiled.since_last_look()
        self.begun += seconds
        for rank in self.running:
            rank.stepped = min(rank.stepped + seconds, time.monotonic())

    def _seconds_to_limit(self) -> float:
        now = time.monotonic()
        if self.first is not None:
            return self.at + _GRACE_SECONDS - now
        stepped = min(rank.stepped for rank in self.running)
        return min(stepped + self.run.step_seconds, self.begun + self.run.case_seconds) - now

    def end(self) -> None:
        """End those that still run: by asking, then by force."""
        now = time.monotonic()
        if self.first is None:
            limit = "case" if now - self.begun >= self.run.case_seconds else "step"
            seconds = self.run.case_seconds if limit == "case" else self.run.step_seconds
            self.overdue = f"no end of the {limit} within {seconds:g} s"
        self.killed = self.running
        for rank in self.killed:
            os.kill(rank.pid, signal.SIGUSR2)  # write all stacks to engine.log
            os.kill(rank.pid, ASK)
        left = list(self.killed)
        while left and time.monotonic() < now + _LAST_WORD_SECONDS:
            time.sleep(0.01)
            left = [rank for rank in left if not rank.reap()]
        for rank in left:
            rank.kill()

    def answer(self, ran: int) -> protocol.Ran | protocol.Failed:
        """The answer for the case, from those of all ranks."""
        silent = tuple(rank.number for rank in self.ranks if rank.silent)
        if self.overdue:
            return protocol.Ran(Ending(kind="hung", detail=self.overdue, where=self._where(self.killed)), silent, ran)
        answer = (self.first or self.ranks[0]).answer
        assert answer is not None
        alone = len(self.ranks) == 1
        if isinstance(answer, protocol.Failed):
            return answer if alone else protocol.Failed(f"rank {self._number}: {answer.error}")
        endings = {rank.answer.ending.detail for rank in self.ranks if isinstance(rank.answer, protocol.Ran)}
        ending = answer.ending
        if not alone and self.first is not None and (len(endings) > 1 or silent):
            ending = replace(ending, detail=f"rank {self._number}: {ending.detail}")
        return protocol.Ran(ending, silent, answer.before)

    @property
    def _number(self) -> int:
        return 0 if self.first is None else self.first.number

    def _where(self, ranks: list[_Rank]) -> str:
        if len(self.ranks) == 1:
            return ranks[0].where
        return "; ".join(f"rank {rank.number}: {rank.where}" for rank in ranks)


def supervise(standing: Runner, caller: socket.socket, run: protocol.Run) -> protocol.Ran | protocol.Failed:
    """Hand the ranks a case; watch their progress; say how it ended. Unless it finished, none of them is left."""
    now = time.monotonic()
    ranks = []
    for number, (pid, connection) in enumerate(zip(standing.pids, standing.connections, strict=True)):
        folder = rank_folder(run.folder, number)
        try:
            folder.mkdir(exist_ok=True)
            progress = Progress(folder)
        except OSError as error:
            standing.kill()
            return protocol.Failed(f"{error.filename}: {error.strerror}")
        ranks.append(_Rank(number, pid, connection, progress, now))
        with contextlib.suppress(OSError):  # it is gone: what it says shows that
            protocol.send(connection, replace(run, folder=str(folder)))
    watch = _Watch(ranks, run, now)
    while watch.running:
        left = watch.seconds_left()
        ready = select.select([rank.connection for rank in watch.running], [], [], max(0.0, min(left, LOOK_SECONDS)))[0]
        if left <= 0 and not ready:  # where this process was held up, an answer may have come meanwhile
            heard = [rank for rank in watch.running if rank.has_died()]
            if not heard:
                watch.end()
                break
            for rank in heard:
                rank.answer = rank.end(standing.ran)
        else:
            watch.look_for_compilers()
            heard = [rank for rank in watch.running if rank.connection in ready]
            for rank in heard:
                rank.hear(standing.ran)
        # of two in one moment, one that wrote a trace saw the other go
        early = sorted((rank for rank in heard if rank.answer is not None and not rank.clean), key=lambda rank: not rank.silent)
        if early and watch.first is None:
            watch.first, watch.at = early[0], time.monotonic()
        if watch.running and all(rank.waits is not None for rank in watch.running):
            _ask(caller, watch)
    if watch.first is not None or watch.overdue:
        for rank in ranks:
            if not rank.gone:
                rank.kill()
        standing.hang_up()
    for rank in ranks:
        rank.progress.remove()
    return watch.answer(standing.ran)


def _ask(caller: socket.socket, watch: _Watch) -> None:
    """All stand before the same iteration: ask the caller what comes next, and tell them."""
    waited = time.monotonic()
    first = watch.running[0].waits
    assert first is not None
    try:
        protocol.send(caller, first)
        step, _ = protocol.receive(caller)
    except (EOFError, OSError):
        os._exit(0)
    stepped = time.monotonic()
    watch.begun += stepped - waited  # the caller's own time does not count
    for rank in watch.running:
        rank.waits, rank.stepped = None, stepped
        with contextlib.suppress(OSError):
            protocol.send(rank.connection, step)
