"""The driver's loop: hand out jobs, write down what is answered, and keep what was found."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from eagletwin import __version__
from eagletwin.harness.core.case import pretty_case
from eagletwin.harness.core.errors import HarnessError

from ..fuzz.looking import CaseSeen, Unstarted
from ..fuzz.messages import BlockFailed
from .books import Books
from .journal import BlockDone, Died, InquiryOver, Joined, Journal, LegClosed, Record, Saw
from .messages import Answer, BlockJob, BugBehind, InquiryJob, Packed, Refusal, SetAside, Up, packed, read_answer

# Of a job: bytes are an answer, None is its end; a text: the worker ended, and why.
Heard = tuple[int, bytes | str | None]


class Crew(Protocol):
    """The workers of a campaign, wherever they are."""

    def idle(self) -> list[int]:
        """Workers that are up, and have no job."""
        ...

    def start(self, worker: int, job: bytes) -> None: ...

    def heard(self) -> Iterator[Heard]:
        """What came since; waits for a while if nothing did."""
        ...


class Driver:
    """Drives a campaign until it is over."""

    def __init__(self, books: Books, journal: Journal, crew: Crew, told: Callable[[Packed], None]) -> None:
        self._books, self._journal, self._crew, self._told = books, journal, crew, told
        self._legs: dict[int, int] = {}  # the leg whose SGLang a worker has
        self._failed: dict[int, str] = {}
        self._asides: dict[int, list[SetAside]] = {}

    def drive(self) -> None:
        """Until there is nothing more to wait for."""
        books = self._books
        while not books.all_done:
            for worker in self._crew.idle():
                self._hand_out(worker)
            for worker, heard in self._crew.heard():
                self._hear(worker, heard)
            books.fuzz.tell()

    def _hand_out(self, worker: int) -> None:
        job = self._books.job_for(worker, self._legs.get(worker, -1))
        if job is None:
            return
        self._legs[worker] = job.leg
        if isinstance(job, InquiryJob):
            seen = job.seen
            self._asides[worker] = []
            _keep_found(Path(job.folder), job)
            self._books.fuzz.progress(
                f"case {job.cases}, {job.seconds:.1f} s: {seen.verdict.status} {seen.signature}; shrinking"
            )
        self._crew.start(worker, packed(job))

    def _hear(self, worker: int, heard: bytes | str | None) -> None:
        if isinstance(heard, bytes):
            self._answer(worker, read_answer(heard))
        elif self._books.running(worker) is None:
            if isinstance(heard, str):
                self._note(Died(why=heard))
        else:
            self._end(worker, heard)

    def _answer(self, worker: int, answer: Answer) -> None:
        if isinstance(answer, Up):
            self._welcome(answer)
            return
        job = self._books.running(worker)
        assert job is not None
        if isinstance(answer, CaseSeen | Unstarted):
            assert isinstance(job, BlockJob)
            self._case(job, answer)
        elif isinstance(answer, SetAside):
            self._asides[worker].append(answer)
        elif isinstance(answer, BlockFailed):
            self._failed[worker] = f"{answer.cause}; {answer.consequence}"
        elif isinstance(answer, Refusal):
            self._failed[worker] = answer.why
            self._note(LegClosed(job.leg, answer.why))
        else:
            assert isinstance(job, InquiryJob)
            self._conclude(worker, job, answer)

    def _case(self, job: BlockJob, seen: CaseSeen | Unstarted) -> None:
        books = self._books
        record = Saw(job.leg, job.block, round(books.fuzz.seconds, 3), seen)
        if books.fuzz.tally.cases >= books.fuzz.plan.max_cases or not books.is_new(record):
            return
        self._note(record)

    def _conclude(self, worker: int, job: InquiryJob, told: BugBehind | Packed) -> None:
        if isinstance(told, BugBehind):
            shutil.rmtree(job.folder, ignore_errors=True)
        elif self._books.found(told):
            shutil.rmtree(job.folder, ignore_errors=True)
            told = replace(told, files={})
        else:
            _unpack(Path(job.folder), told.files)
            told = replace(told, files={})
            self._told(told)
        self._note(InquiryOver(job.number, told, tuple(self._asides.pop(worker))))

    def _end(self, worker: int, heard: str | None) -> None:
        """A job is over, or the worker."""
        job = self._books.ended(worker)
        failed = self._failed.pop(worker, "") or heard
        if heard is not None:
            self._legs.pop(worker, None)
        if isinstance(job, InquiryJob):
            if job.number in self._books.inquiries:
                self._note(Died(job.leg, inquiry=job.number, why=failed or "it came to no end"))
        elif failed:
            self._note(Died(job.leg, block=job.block, why=failed))
        else:
            self._note(BlockDone(job.leg, job.block))

    def _welcome(self, answer: Up) -> None:
        if answer.version != __version__:
            raise HarnessError(
                f"{answer.node} has eagletwin {answer.version}, and this is {__version__}",
                consequence="the campaign ended there: two versions may draw other cases from one seed",
                remedy=f"install eagletwin {__version__} on each machine, then go on with --resume",
            )
        self._note(Joined(answer.node, answer.process))

    def _note(self, record: Record) -> None:
        self._journal.add(record)
        self._books.note(record)


def _keep_found(folder: Path, job: InquiryJob) -> None:
    """The case as it was found, until there is a smaller one."""
    minimal = folder / "minimal"
    minimal.mkdir(parents=True, exist_ok=True)
    for file in (folder / "found.json", minimal / "case.json"):
        file.write_text(pretty_case(job.seen.case), encoding="utf-8")


def _unpack(folder: Path, files: dict[str, bytes]) -> None:
    """Write the files of a finding, in place of what was kept until then."""
    partial = folder.with_name(f".{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    for name, data in files.items():
        file = partial / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
