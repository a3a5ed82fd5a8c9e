"""Doubles of a campaign's workers, which run no engine: what a block comes to is fixed, so that what was done twice, or was
lost, can be counted."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from eagletwin import __version__
from eagletwin.cases.blocks import BLOCK, Asked, block_of
from eagletwin.harness.commands.campaign.command import begun
from eagletwin.harness.commands.campaign.drive import Heard
from eagletwin.harness.commands.campaign.messages import (
    Answer,
    BlockJob,
    BugBehind,
    InquiryJob,
    Packed,
    Terms,
    Up,
    packed,
    read_job,
)
from eagletwin.harness.commands.fuzz.looking import CaseSeen
from eagletwin.harness.commands.fuzz.options import SearchOptions
from eagletwin.harness.core.signature import Signature
from eagletwin.harness.core.verdict import Verdict

PROBE = block_of(0, 0, Asked()).probe
LEAK, CRASH, KNOWN = Signature(rule="draft.kv"), Signature(cause="IndexError"), Signature(rule="draft.positions")
# Which case of which block shows what; the third turns out to be a known bug's.
SHOWS = {(1, 2): LEAK, (2, 0): LEAK, (2, 3): CRASH, (3, 1): KNOWN, (5, 3): LEAK, (6, 3): KNOWN, (8, 0): CRASH}


def terms(cases: int, **more: object) -> Terms:
    """Of a campaign of so many cases. With this seed each of its first blocks has as many as `answers` gives."""
    return begun(SearchOptions(max_cases=cases, minutes=60.0, seed=4, **more), [""], None)  # type: ignore[arg-type]


def case_of(block: int, number: int) -> CaseSeen:
    """What comes of a case."""
    shown = SHOWS.get((block, number))
    return CaseSeen(
        block=block,
        case=msgspec.structs.replace(PROBE, name=f"{block}-{number}"),
        verdict=Verdict(status="equal") if shown is None else Verdict(status="diverged" if shown.rule else "unknown"),
        signature=shown,
    )


def answers(job: BlockJob | InquiryJob, log: Counter[str]) -> Iterator[Answer]:
    """What a worker answers; log: how often it ran each case, and looked into each finding."""
    if isinstance(job, BlockJob):
        for number in range(len(job.earlier), BLOCK):
            log[f"{job.block}-{number}"] += 1
            yield case_of(job.block, number)
        return
    shown = job.seen.signature
    assert shown is not None
    log[str(shown)] += 1
    if shown == KNOWN:
        yield BugBehind("26329")
        return
    facts = {"signature": msgspec.to_builtins(shown), "status": job.seen.verdict.status, "folder": f"{job.folder}/minimal"}
    facts |= {"cases": job.cases, "seconds": 1.0, "shrink_looks": 1, "shrink_seconds": 1.0}
    yield Packed(shown, job.seen.verdict.status, Path(job.folder).name, f"FOUND {shown}", facts, {"minimal/case.json": b"{}"})


class Killed(BaseException):
    """The driver is gone, and writes nothing more."""


@dataclass
class Doubles:
    """A crew of so many workers, each of which gives one answer in its turn.

    deaths  of workers: after so many answers of all of them; killed: the driver
    log     what was run, over all drivers
    """

    workers: int = 3
    deaths: tuple[int, ...] = ()
    killed: int = -1
    log: Counter[str] = field(default_factory=Counter)
    given: int = 0
    _jobs: dict[int, Iterator[Answer] | None] = field(default_factory=dict)
    _new: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._new = list(range(self.workers))

    def idle(self) -> list[int]:
        return [worker for worker, job in self._jobs.items() if job is None]

    def start(self, worker: int, job: bytes) -> None:
        self._jobs[worker] = answers(read_job(job), self.log)

    def heard(self) -> Iterator[Heard]:
        for worker in self._new:
            self._jobs[worker] = None
            yield worker, packed(Up(__version__, "here", worker))
        self._new = []
        for worker, job in list(self._jobs.items()):
            if job is None:
                continue
            answer = next(job, None)
            self.given += 1
            if self.given == self.killed:
                raise Killed
            if self.given in self.deaths:  # what it had to say last is lost
                del self._jobs[worker]
                self._new.append(worker + self.workers)
                yield worker, "killed"
            elif answer is None:
                self._jobs[worker] = None
                yield worker, None
            else:
                yield worker, packed(answer)
