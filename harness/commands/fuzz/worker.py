"""A worker of a search, which runs blocks of cases: a process of this machine or an actor of Ray (pool.py).

`python -m eagletwin.harness.commands.fuzz.worker [FD]`; FD: where it joins the process that has imported the engine.

It gets the search's terms once, then one block after the other, and answers a line of JSON for each case: no machine runs what
another one sent.
"""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from eagletwin import __version__
from eagletwin.cases.sample_cases import draw_from_seeds_alone
from eagletwin.harness.check.known import KnownBugMatcher
from eagletwin.harness.core.errors import EagletwinError, HarnessError
from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.start import Zygote

from .looking import BlockRunner, CaseSeen, Unstarted
from .options import SearchOptions


class Terms(Struct, frozen=True):
    """The search that a worker is of. version: of the eagletwin that drives it."""

    options: SearchOptions
    version: str = __version__


class BlockJob(Struct, frozen=True):
    """A block to run. earlier: results of its first cases, where another worker ended over it; first: whether those that the
    search begins with come before."""

    block: int
    earlier: tuple[CaseSeen, ...] = ()
    first: bool = False


class BlockOver(Struct, frozen=True, tag=True):
    """The block is over."""


class BlockFailed(Struct, frozen=True, tag=True):
    """The harness's own code failed: nothing is known of the block."""

    cause: str
    consequence: str
    remedy: str


Seen = CaseSeen | Unstarted
Answer = Seen | BlockOver | BlockFailed


def encode_line(message: Answer | BlockJob | Terms) -> bytes:
    """The message as a line."""
    return msgspec.json.encode(message, enc_hook=str) + b"\n"


def read_answer(line: bytes) -> Answer:
    answer: Answer = msgspec.json.decode(line, type=Answer)
    return answer


def as_path(wanted: type, value: Any) -> Any:
    """Reads what msgspec does not read by itself."""
    return Path(value) if wanted is Path else value


class Worker:
    """Runs blocks, one at a time. terms, jobs, answers: messages of this file, written.

    joins  where it joins a process that has imported the engine; -1: it has its own
    """

    def __init__(self, terms: bytes, joins: int = -1) -> None:
        draw_from_seeds_alone()
        read = msgspec.json.decode(terms, type=Terms, dec_hook=as_path)
        self._version, self._options = read.version, read.options
        source, mode = read.options.source, read.options.run.mode
        self._host = Host(Zygote.joined(joins, source, mode) if joins >= 0 else None, source, mode)
        self._looking: BlockRunner | None = None

    def up(self) -> int:
        """Returns as soon as the worker is there: its process."""
        return os.getpid()

    def run(self, job: bytes) -> Iterator[bytes]:
        """The answers to a job, as they come."""
        wanted = msgspec.json.decode(job, type=BlockJob)
        try:
            looking = self._blocks()
            first = looking.first(wanted.earlier) if wanted.first else ()
            for seen in chain(first, looking.block(wanted.block, wanted.earlier)):
                yield encode_line(seen)
            yield encode_line(BlockOver())
        except EagletwinError as error:
            yield encode_line(BlockFailed(error.cause, error.consequence, error.remedy))

    def close(self) -> None:
        self._host.close()

    def _blocks(self) -> BlockRunner:
        if self._looking is None:
            if self._version != __version__:
                raise HarnessError(
                    f"a worker has eagletwin {__version__}, and the search is of {self._version}",
                    consequence="the search ended there: two versions may draw other cases from one seed",
                    remedy=f"install eagletwin {self._version} on each machine, then continue with --resume",
                )
            self._looking = BlockRunner(
                KnownBugMatcher(self._host, self._options.run, self._options.unknown), self._options.plan
            )
            gc.freeze()  # as in the process that drives the search
        return self._looking


def main() -> None:
    """Serve until there is nothing more on stdin."""
    for number in (signal.SIGINT, signal.SIGHUP):  # they are for the process that drives the search: it hangs up
        signal.signal(number, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else is printed
    worker = Worker(sys.stdin.buffer.readline(), *map(int, sys.argv[1:]))
    try:
        for line in sys.stdin.buffer:
            for answer in worker.run(line):
                answers.write(answer)
                answers.flush()
    except BrokenPipeError:  # nobody waits for an answer any more
        os._exit(0)
    finally:
        worker.close()


if __name__ == "__main__":
    main()
