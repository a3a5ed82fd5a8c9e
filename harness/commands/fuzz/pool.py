"""Who runs the blocks of a search: this process, and workers beside it (worker.py), which are processes of this machine or
actors of Ray.

Results come in the order of the blocks, whoever ran them and whenever, so that a search with the same seed comes to the same
with any number of workers; with as many, where a change directs it (steering.py). On a CPU the engine is imported once, and all
processes of this machine have their engines from that.
"""

import os
import re
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from eagletwin.harness.check.known import KnownBugMatcher
from eagletwin.harness.core.errors import HarnessError
from eagletwin.harness.core.files import RUN_MODULE
from eagletwin.harness.core.terminal import describe_exit
from eagletwin.harness.engines.host import Host

from ..options import log_progress, nothing_run
from .coverage import UNMEASURED, Measured
from .journal import Died, Journal, Over, Past
from .looking import NO_BLOCK, BlockRunner, CaseSeen
from .options import Plan, SearchOptions
from .steering import Order, count_cases
from .tally import Tally
from .worker import BlockFailed, BlockJob, BlockOver, Seen, Terms, Worker, encode_line, read_answer

AHEAD = 4  # blocks for each worker that may be run before their turn
_TRIES = 3  # workers that may end over one block before it is given up; or one after the other before one is up
_PATIENCE = 5.0  # seconds for a worker that answers no more to end, so that it is known how
WORKER_BYTES = 1_500_000_000  # of memory that one worker takes with its engines


def cores() -> int:
    """How many processes a search has by default: one a core, as far as the memory goes."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, StopIteration, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
        return max(1, min(cpus, free // WORKER_BYTES))
    return cpus


class Link(Protocol):
    """A worker, as the pool reaches it."""

    def wait(self) -> None:
        """Return when the worker is up. Raises if it does not get up."""
        ...

    def run(self, job: bytes) -> Iterator[bytes]:
        """The answers to a job, as they come. Raises, or ends, where the worker does."""
        ...

    def kill(self) -> None:
        """End it, so that the thread that waits for it waits no longer."""
        ...

    def close(self) -> None:
        """The same, by that thread."""
        ...

    def describe_exit(self, error: Exception) -> str: ...


class Workers(Protocol):
    """Where workers are started. ahead: how many blocks may be run before their turn."""

    ahead: int

    def number(self) -> int:
        """How many there are to be at this time."""
        ...

    def start(self) -> Link: ...


class Process:
    """A worker in a process of this machine."""

    def __init__(self, command: list[str], terms: bytes, pass_fds: tuple[int, ...] = ()) -> None:
        self._process = subprocess.Popen(command, pass_fds=pass_fds, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._terms = terms

    def wait(self) -> None:
        self._send(self._terms)

    def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()

    def run(self, job: bytes) -> Iterator[bytes]:
        assert self._process.stdout is not None
        self._send(job)
        while line := self._process.stdout.readline():
            yield line

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # nobody reads what was not written
                assert pipe is not None
                pipe.close()

    def describe_exit(self, error: Exception) -> str:
        with suppress(subprocess.TimeoutExpired):
            return describe_exit(self._process.wait(_PATIENCE))
        return f"gave an answer that cannot be read ({error})"


class LocalWorkers:
    """Workers on this machine, beside the process that drives the search."""

    def __init__(self, host: Host, options: SearchOptions, number: int, wanted: Callable[[], bool] = lambda: True) -> None:
        """wanted: whether they are to be there yet."""
        self._host, self._terms, self._number, self._wanted = host, encode_line(Terms(options)), number, wanted
        self.ahead = AHEAD * (number + 1)

    def number(self) -> int:
        return self._number if self._wanted() else 0

    def start(self) -> Process:
        command = [*RUN_MODULE, "eagletwin.harness.commands.fuzz.worker"]
        joins = self._host.shared()
        with joins or nullcontext():
            number = () if joins is None else (joins.fileno(),)
            return Process([*command, *map(str, number)], self._terms, number)


class BlockPool:
    """Runs the blocks of a search here and by workers. Use as a context manager if there are workers.

    past   results of earlier drivers, which are not run again
    tally  has the workers that ended, and the blocks that were given up
    measured  which cases run what is changed
    """

    def __init__(
        self,
        matcher: KnownBugMatcher,
        plan: Plan,
        workers: Workers | None = None,
        journal: Journal | None = None,
        past: Past | None = None,
        tally: Tally | None = None,
        measured: Measured = UNMEASURED,
    ) -> None:
        self._looking, self._workers, self._journal = BlockRunner(matcher, plan), workers, journal
        self._tally = tally or Tally()
        self.ahead = workers.ahead if workers is not None else 0
        if past is not None and (matcher.run.patches or matcher.host.source.difference is not None):
            self.ahead = past.begun.ahead  # where a change directs the search the order follows from it
        self._order = Order(plan.seed, plan.asked, self.ahead, measured)
        # By the place of the block: results that were not taken yet; blocks that are over; that are run; that somebody left.
        self._seen: dict[int, list[Seen]] = {} if past is None else dict(past.seen)
        self._over: set[int] = set() if past is None else set(past.over)
        self._running, self._left = set[int](), set[int]()
        self._turn, self._next = 0, max([*self._over, *self._seen], default=-1) + 1
        self._left |= set(range(self._next)) - self._over
        self._past = frozenset(self._over)
        self._before = {place: len(seen) for place, seen in self._seen.items()}  # results that an earlier driver left
        self._taken = 0  # results of the block whose turn it is
        self._tries = Counter[int]()
        self._failed: dict[int, HarnessError] = {}  # by the place of the block; -1: whatever the block
        self._here: tuple[int, Iterator[Seen]] | None = None  # the block that is run here
        self._resting = self._closed = False
        self._unborn = self._done = 0  # workers that ended before they were up, since one was; blocks that workers ran
        self._changed = threading.Condition()
        self._links: dict[int, Link] = {}
        self._threads: list[threading.Thread] = []

    def __enter__(self) -> "BlockPool":
        self._begin_here()  # before a worker does, which takes seconds to get up
        self._grow()
        return self

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for link in list(self._links.values()):
            link.kill()
        for thread in self._threads:
            thread.join(_PATIENCE)

    @property
    def replays(self) -> bool:
        """Whether the block whose turn it is has results of an earlier driver that were not taken, or was run to its end."""
        return self._turn in self._past or self._taken < self._before.get(self._turn, 0)

    def _grow(self) -> None:
        """Have as many workers as there are to be: a cluster may grow."""
        while self._workers is not None and len(self._threads) < self._workers.number():
            number = len(self._threads)
            link = self._links[number] = self._workers.start()
            thread = threading.Thread(target=self._feed, args=(number, link), daemon=True)
            self._threads.append(thread)
            thread.start()

    def blocks(self) -> Iterator[Iterator[Seen]]:
        """One block after the other. While one is run elsewhere, those that nobody runs are run here."""
        for place in count():
            with self._changed:
                self._turn, self._taken, self._resting = place, 0, False
                self._changed.notify_all()
            self._grow()
            yield count_cases(self._order, place, self._block(place))

    def early(self) -> list[Seen]:
        """The results so far that come after those which were taken: of blocks that ran before their turn."""
        with self._changed:
            places = sorted(place for place in self._seen if place >= self._turn)
            return [seen for place in places for seen in self._seen[place][self._taken if place == self._turn else 0 :]]

    def rest(self) -> None:
        """Begin no further block until the next one is asked for."""
        with self._changed:
            self._resting = True

    def _block(self, place: int) -> Iterator[Seen]:
        """The results of the block whose turn it is, as they come."""
        taken = 0
        while True:
            with self._changed:
                seen = self._seen.setdefault(place, [])
                if len(seen) <= taken and (error := self._failed.get(place) or self._failed.get(-1)):
                    raise error
                if len(seen) <= taken and place in self._over:
                    del self._seen[place]
                    return
            if len(seen) > taken:
                taken = self._taken = taken + 1
                yield seen[taken - 1]
            elif not self._run_here():
                with self._changed:
                    while len(seen) <= taken and place not in self._over and not self._may_go_on(place):
                        self._changed.wait()

    def _may_go_on(self, place: int) -> bool:
        """Whether no worker has the block at this place, nor is to have it; or that is of no use any more."""
        mine = place not in self._running and not self._tries[place]
        return mine or place in self._failed or -1 in self._failed

    def _run_here(self) -> bool:
        """Run one case here, of a block that nobody else runs, also before its turn: some blocks take ten times as long as
        others. False: there is none that may be run yet."""
        while True:
            if self._here is None and not self._begin_here():
                return False
            assert self._here is not None
            place, rest = self._here
            seen = next(rest, None)
            if seen is not None:
                self._note(place, seen)
                return True
            self._here = None
            self._end(place)
            if place == self._turn:
                return True

    def _begin_here(self) -> bool:
        """Take the block that is run here next; False: there is none that may be run yet."""
        place = self._take(here=True)
        if place >= 0:
            self._here = place, self._run_cases(place)
        return place >= 0

    def _run_cases(self, place: int) -> Iterator[Seen]:
        """The cases of the block at this place. The first block is chosen after the cases that the search begins with: to draw
        those among which it is takes a second."""
        if not place:
            yield from self._looking.first([one for one in self._seen.get(0, ()) if isinstance(one, CaseSeen)])
        yield from self._looking.block(self._order.number(place), self._earlier(place))

    def _earlier(self, place: int) -> tuple[CaseSeen, ...]:
        """Results of a block that somebody left, and of cases of none before it: they are not run again."""
        number = self._order.number(place)
        return tuple(one for one in self._seen.get(place, ()) if isinstance(one, CaseSeen) and one.block in (number, NO_BLOCK))

    def _note(self, place: int, seen: Seen) -> None:
        """Enter a result. Cases of the ledger, which everybody runs, and engines that would not start may come again."""
        with self._changed:
            known = self._seen.setdefault(place, [])
            if seen in known:
                return
            if self._journal is not None:
                self._journal.saw(place, seen)
            known.append(seen)
            self._changed.notify_all()

    def _end(self, place: int, lost: str = "") -> None:
        """A block is over."""
        with self._changed:
            self._running.discard(place)
            self._over.add(place)
            self._tally.lost += [lost] if lost else []
            if self._journal is not None:
                self._journal.add(Over(place, lost))
            self._changed.notify_all()

    def _take(self, *, here: bool = False) -> int:
        """A block that somebody left, or the next one, to be run now; -1: it is too far ahead. here: not one over which a
        worker ended, since this process might end as well."""
        with self._changed:
            may = (place for place in self._left if not (here and self._tries[place]))
            place = min(may, default=self._next)
            if place > self._turn + self.ahead:
                return -1
            self._left.discard(place)
            self._next = max(self._next, place + 1)
            self._running.add(place)
            return place

    def _feed(self, number: int, first: Link) -> None:
        """Hand one worker block after block. One that ends is replaced."""
        link: Link | None = first
        while link is not None:
            place, how = -1, ""
            try:
                link.wait()
                self._unborn = 0
                while (place := self._hand_out()) >= 0:
                    self._run_block(link, place)
            except Exception as error:
                how = link.describe_exit(error)
            link.close()
            link = self._replacement(number, place, how) if how else None

    def _fail(self, cause: str) -> None:
        with self._changed:
            self._failed[-1] = HarnessError(
                cause,
                consequence="the search ended there; its results are kept",
                remedy="look at what they printed above; free some memory or give -n 1, then continue with --resume",
            )
            self._changed.notify_all()

    def _hand_out(self) -> int:
        """The next block for a worker; -1: the search is over."""
        with self._changed:
            while not self._closed:
                place = -1 if self._resting else self._take()
                if place >= 0:
                    return place
                self._changed.wait()
            return -1

    def _run_block(self, link: Link, place: int) -> None:
        """Have a worker run a block. Raises if the worker ends before the block is over."""
        for line in link.run(encode_line(BlockJob(self._order.number(place), self._earlier(place), first=not place))):
            answer = read_answer(line)
            if isinstance(answer, BlockOver):
                self._done += 1
                self._end(place)
                return
            if isinstance(answer, BlockFailed):
                with self._changed:
                    self._failed[place] = HarnessError(answer.cause, consequence=answer.consequence, remedy=answer.remedy)
                    self._changed.notify_all()
                return
            self._note(place, answer)
        raise EOFError("it answered no more")

    def _replacement(self, number: int, place: int, how: str) -> Link | None:
        """A worker in place of one that ended, over the block at this place, or before it was up (-1); None: the search is
        over, or none gets up any more."""
        with self._changed:
            if self._closed:
                return None
            if place >= 0:
                self._leave(place, how)
            else:
                self._unborn += 1
                log_progress(f"note: a worker {how} before it was up; another one takes its place")
            if self._unborn >= _TRIES:
                self._fail(f"{self._unborn} workers, one after the other, ended before they were up: the last one {how}")
                return None
            try:
                assert self._workers is not None
                link = self._links[number] = self._workers.start()
            except OSError as error:
                self._fail(f"a worker {how}, and no other one starts: {error}")
                return None
            return link

    def _leave(self, place: int, how: str) -> None:
        """A worker ended over a block: another one runs the rest of it, unless too many did."""
        block = f"block {self._order.number(place)}"
        self._tries[place] += 1
        self._tally.deaths += 1
        if self._journal is not None:
            self._journal.add(Died(place))
        if self._tries[place] < _TRIES:
            log_progress(f"note: a worker {how} in {block}; another one takes its place")
            self._running.discard(place)
            self._left.add(place)
            self._changed.notify_all()
            return
        lost = f"{block}, over which {_TRIES} workers ended: the last one {how}"
        log_progress(f"note: not searched: {lost}")
        self._end(place, lost)
        if len(self._tally.lost) >= _TRIES and not self._done:
            self._fail(f"workers end in each block: the last one {how}")


# Workers on Ray: one actor each, which may die at any time. The only file that knows Ray.
#
# An actor that dies is replaced by another one, on whatever machine has room. Its answers come as a stream, one after each
# case, so that no more than the case that it was running is lost. It waits where nobody reads them.

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_UNREAD = 2  # answers that an actor may have given and nobody read; then it waits
_MANY = 16  # workers for which blocks may be run ahead, since a cluster may grow


class Actor:
    """A worker that is an actor."""

    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor

    def wait(self) -> None:
        self._ray.get(self._actor.up.remote())

    def run(self, job: bytes) -> Iterator[bytes]:
        streaming = {"num_returns": "streaming", "_generator_backpressure_num_objects": _UNREAD}
        for answer in self._actor.run.options(**streaming).remote(job):
            yield self._ray.get(answer)

    def kill(self) -> None:
        with suppress(Exception):  # it is gone, or out of reach
            self._ray.kill(self._actor)

    close = kill

    def describe_exit(self, error: Exception) -> str:
        return f"ended ({' '.join(_COLOURS.sub('', str(error)).split())})"


class Actors:
    """Workers on a cluster. Use as a context manager.

    processes of the options: how many workers; 0: as many as the cluster has room for, at any time
    """

    def __init__(self, options: SearchOptions, kind: type = Worker) -> None:
        self._ray, self._kind = _load_ray(), kind
        self._address, self._number, self._terms = options.address, options.processes, encode_line(Terms(options))
        mode = options.run.mode
        self._gpus = mode.tp if mode.device == "cuda" else 0
        self.ahead = AHEAD * max(self._number, _MANY)

    def __enter__(self) -> "Actors":
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._ray.init(address=self._address, log_to_driver=False, logging_level="ERROR")
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            raise nothing_run(
                f"there is no Ray cluster at {self._address}: {error}",
                "`ray start --head` on one machine and `ray start --address …` on the others, or leave --address out",
            ) from error
        finally:
            for number, handler in handlers.items():  # Ray sets its own, which end the process without a word
                signal.signal(number, handler)
        self._remote = self._ray.remote(self._kind)
        return self

    def __exit__(self, *_: object) -> None:
        self._ray.shutdown()

    def number(self) -> int:
        """A worker takes a core, and memory, and its GPUs."""
        if self._number:
            return self._number
        has = self._ray.cluster_resources()
        room = min(has.get("CPU", 0), has.get("memory", 0) // WORKER_BYTES)
        return max(1, int(min(room, has.get("GPU", 0) // self._gpus) if self._gpus else room))

    def start(self) -> Actor:
        options = {"num_cpus": 1, "num_gpus": self._gpus, "max_restarts": 0, "max_task_retries": 0}
        return Actor(self._ray, self._remote.options(**options).remote(self._terms))


def _load_ray() -> Any:
    """The module. Raises HarnessError where it is not installed."""
    try:
        import ray
    except ImportError as error:
        raise HarnessError(
            "Ray is not installed",
            consequence="nothing was run: --address is of a Ray cluster",
            remedy="`pip install 'eagletwin[ray]'`, or leave --address out to use the cores of this machine",
        ) from error
    return ray
