"""A search on several cores: blocks of cases are run here and in processes of their own (worker.py).

What is seen comes in the order of the blocks, whoever ran them and whenever, so that a search with the same seed comes to the
same on any number of cores; on as many, where a change directs it (steering.py). On a CPU SGLang is imported once, and all of
them have their engines from that.
"""

import os
import queue
import subprocess
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from eagletwin.harness.check.known import Mends
from eagletwin.harness.core.environment import RUN_MODULE
from eagletwin.harness.core.errors import HarnessError
from eagletwin.harness.core.terminal import how_it_ended

from ..options import tell
from .looking import CaseSeen, Looking, Unstarted
from .messages import TRIES, Answer, BlockFailed, BlockOver, Wanted, read_answer, written
from .options import SearchOptions
from .steering import Order, count_cases

_AHEAD = 4  # blocks for each process that may be run before their turn
_PATIENCE = 5.0  # seconds for a process that closed its pipe to end, so that its exit code is known
_PROCESS_BYTES = 1_500_000_000  # of memory that one process takes with its engines


def cores() -> int:
    """How many processes a search has by default: one a core, as far as the memory goes."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, StopIteration, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        return max(1, min(cpus, free // _PROCESS_BYTES))
    return cpus


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process, if it has not ended, and close its pipes."""
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        with suppress(OSError):  # nobody reads what was not written
            assert pipe is not None
            pipe.close()


@dataclass(slots=True)
class _Ours:
    """The block at a place, run here before its turn. seen: what came of its first cases."""

    place: int
    _rest: Iterator[CaseSeen | Unstarted]
    _seen: list[CaseSeen | Unstarted] = field(default_factory=list)

    def run_one(self) -> bool:
        """Run its next case; whether there was one."""
        seen = next(self._rest, None)
        if seen is not None:
            self._seen.append(seen)
        return seen is not None

    def all(self) -> Iterator[CaseSeen | Unstarted]:
        """What comes of all of it, now that its turn has come."""
        yield from self._seen
        yield from self._rest


class Several:
    """Runs the blocks here and in `processes` - 1 others. Use as a context manager."""

    def __init__(self, mends: Mends, options: SearchOptions, processes: int) -> None:
        self._looking = Looking(mends, options.plan)
        self._host = mends.host
        self._options = options
        self._size = processes
        self._answers: dict[int, queue.SimpleQueue[Answer]] = {}  # blocks that another process runs, or has run
        self._order = Order(options.plan.seed, options.plan.asked, _AHEAD * processes)
        self._turn, self._next, self._resting, self._closed = 0, 0, False, False
        self._changed = threading.Condition()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> "Several":
        for place in range(self._size - 1):
            self._processes.append(self._worker())
            self._threads.append(threading.Thread(target=self._feed, args=(place,), daemon=True))
            self._threads[-1].start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for process in self._processes:
            process.terminate()
        for process, thread in zip(self._processes, self._threads, strict=True):
            process.wait()
            thread.join()  # it has read to the end
            _end(process)

    def _worker(self) -> "subprocess.Popen[bytes]":
        command = [*RUN_MODULE, "eagletwin.harness.commands.fuzz.worker"]
        joins = self._host.shared()
        with joins or nullcontext():
            number = () if joins is None else (joins.fileno(),)
            return subprocess.Popen(
                [*command, *map(str, number)], pass_fds=number, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )

    def blocks(self) -> Iterator[Iterator[CaseSeen | Unstarted]]:
        """One block after the other. While one is run elsewhere, those that nobody runs are run here."""
        ours: deque[_Ours] = deque()  # begun here before their turn; the last one alone may be unfinished
        for place in count():
            with self._changed:
                self._turn, self._resting = place, False
                self._changed.notify_all()
            if ours and ours[0].place == place:
                block = ours.popleft().all()
            elif place in self._answers:
                block = self._theirs(place, ours)
            else:
                mine = self._take()
                assert mine == place
                block = self._looking.block(self._order.number(place))
            yield count_cases(self._order, place, block)

    def rest(self) -> None:
        """Begin no further block until the next one is asked for."""
        with self._changed:
            self._resting = True

    def _take(self) -> int:
        """The next block that nobody runs, to be run here; -1: it is too far ahead."""
        with self._changed:
            if self._next > self._turn + _AHEAD * self._size:
                return -1
            self._next += 1
            return self._next - 1

    def _theirs(self, place: int, ours: "deque[_Ours]") -> Iterator[CaseSeen | Unstarted]:
        answers = self._answers[place]
        while True:
            try:
                answer = answers.get_nowait()
            except queue.Empty:
                if self._run_ahead(ours):  # use the time
                    continue
                answer = answers.get()
            if isinstance(answer, BlockOver):
                del self._answers[place]
                return
            if isinstance(answer, BlockFailed):
                raise HarnessError(answer.cause, consequence=answer.consequence, remedy=answer.remedy)
            yield answer

    def _run_ahead(self, ours: "deque[_Ours]") -> bool:
        """Run one case of a block whose turn has not come. False: there is none that may be run yet.

        Some blocks take ten times as long as others, and one block alone would not fill that time."""
        while not ours or not ours[-1].run_one():
            mine = self._take()
            if mine < 0:
                return False
            ours.append(_Ours(mine, self._looking.block(self._order.number(mine))))
        return True

    def _feed(self, process: int) -> None:
        """Hand one process block after block, and keep its answers. One that ends is replaced, TRIES - 1 times in one block."""
        options: SearchOptions | None = self._options  # what the process was not sent yet
        while (place := self._hand_out()) >= 0:
            heard = list[CaseSeen | Unstarted]()
            for tries in count(1):
                try:
                    self._run_block(self._processes[process], options, place, heard)
                    options = None
                    break
                except Exception:
                    if not self._replaced(process, place, tries):
                        return
                    options = self._options

    def _run_block(
        self, process: "subprocess.Popen[bytes]", options: SearchOptions | None, place: int, heard: list[CaseSeen | Unstarted]
    ) -> None:
        """Have a process run a block. heard: what came of it from processes that ended over it, and from now on of this one."""
        assert process.stdin is not None
        assert process.stdout is not None
        if options is not None:
            process.stdin.write(written(options))
        number = self._order.number(place)
        earlier = tuple(one for one in heard if isinstance(one, CaseSeen) and one.block == number)
        repeated = tuple(one for one in heard if one not in earlier)  # cases of the ledger, and an engine that would not start
        process.stdin.write(written(Wanted(number, earlier)))
        process.stdin.flush()
        while True:
            answer = read_answer(process.stdout.readline())
            if answer not in repeated:
                self._answers[place].put(answer)
            if isinstance(answer, BlockOver | BlockFailed):
                return
            heard.append(answer)

    def _replaced(self, process: int, place: int, tries: int) -> bool:
        """Start a process in place of one that ended over a block; False: the search is over, or that block ends it."""
        ended, number = self._processes[process], self._order.number(place)
        with suppress(subprocess.TimeoutExpired):
            ended.wait(_PATIENCE)
        with self._changed:
            if self._closed:
                return False
            code = ended.poll()
            how = "gave an answer that cannot be read" if code is None else how_it_ended(code)
            try:
                if tries < TRIES:
                    _end(ended)
                    self._processes[process] = self._worker()
                    tell(f"note: a process of the search {how} in block {number}; another one takes its place")
                    return True
            except OSError as error:
                how = f"{how}, and no other one starts: {error}"
            ended_over = f"{tries} {'process' if tries == 1 else 'processes'} of the search ended over block {number}"
            self._answers[place].put(
                BlockFailed(
                    f"{ended_over}: the last one {how}",
                    "the search ended there, since that block was not searched to its end",
                    "look at what they printed above; free some memory, or give -n 1",
                )
            )
            return False

    def _hand_out(self) -> int:
        """The next block that nobody runs; -1: the search is over."""
        with self._changed:
            while not self._closed and (self._resting or self._next > self._turn + _AHEAD * self._size):
                self._changed.wait()
            if self._closed:
                return -1
            self._answers[self._next] = queue.SimpleQueue()
            self._next += 1
            return self._next - 1
