"""The books of a campaign: what was seen, what is being done, and what is to be done next.

They change by records alone (journal.py): a driver that reads the journal again has the books of the one that was killed. What
a case comes to is counted by the search that `eagletwin fuzz` is; the books add who runs what.
"""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from eagletwin.cases.blocks import BLOCK, block_of
from eagletwin.harness.check.trials import Trials
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.signature import Signature
from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.source import resolve

from ..fuzz.looking import NO_BLOCK, CaseSeen
from ..fuzz.messages import TRIES
from ..fuzz.search import Fuzz
from .corpus import blocks_of
from .journal import BlockDone, Died, Drove, InquiryOver, Joined, LegClosed, Record, Saw
from .messages import BlockJob, BugBehind, InquiryJob, Job, Packed, Terms

UNREAD = 2  # answers that a worker may have given and the driver not read; then the worker waits
_STAY = 4  # blocks by which one leg may be ahead of another before a worker changes to that one: it imports another SGLang


@dataclass(slots=True)
class LegBooks:
    """What was done of one leg. blocks: how many it has, -1: without end; begun: those that are not done, with what was seen
    of them; next: the first that nobody began."""

    blocks: int = -1
    next: int = 0
    done: set[int] = field(default_factory=set)
    cases: int = 0
    statuses: Counter[str] = field(default_factory=Counter)
    begun: dict[int, list[CaseSeen]] = field(default_factory=dict)
    closed: str = ""


@dataclass(frozen=True, slots=True)
class Lost:
    """What was given up, and why."""

    what: str
    why: str


class Books:
    """The state of a campaign. `note` is the one way to change it, but for what runs where."""

    def __init__(self, terms: Terms, folder: Path, progress: Callable[[str], None], columns: int) -> None:
        self.terms, self.folder = terms, folder
        run = terms.options.run
        host = Host(source=resolve(run.sglang), mode=run.mode)  # is never started: it says what is searched
        self.fuzz = Fuzz(Trials(host, run), folder, terms.plan_of(0), progress)
        self.legs = [LegBooks(len(blocks_of(leg.corpus)) or -1) for leg in terms.legs]
        self.findings: list[Packed] = []
        self.inquiries: dict[int, InquiryJob] = {}  # that are not concluded
        self.lost: list[Lost] = []
        self.deaths, self.again, self.drivers, self.up = 0, 0, 0, 0
        self.nodes: Counter[str] = Counter()  # workers that were up, by their machine
        self.last_at = 0.0
        self._columns = columns
        self._waiting: dict[Signature, list[tuple[int, CaseSeen]]] = {}  # cases that show what an inquiry is about
        self._others: set[tuple[int, Case]] = set()  # of the ledger: each worker runs them
        self._tries: Counter[str] = Counter()
        self._running: dict[int, Job] = {}

    # What happened

    def note(self, record: Record) -> None:
        """Enter a record."""
        if isinstance(record, Saw):
            self._saw(record)
        elif isinstance(record, BlockDone):
            leg = self.legs[record.leg]
            leg.begun.pop(record.block, None)
            leg.done.add(record.block)
            leg.next = max(leg.next, record.block + 1)
        elif isinstance(record, InquiryOver):
            self._concluded(record)
        elif isinstance(record, Died):
            self._died(record)
        elif isinstance(record, LegClosed):
            self.legs[record.leg].closed = record.why
        elif isinstance(record, Joined):
            self.up += 1
            self.nodes[record.node] += 1
        elif isinstance(record, Drove):
            self._goes_on(record.at)
        self._tell_search()

    def is_new(self, record: Saw) -> bool:
        """Whether such a record says anything: a case of the ledger, which each worker runs, is seen once."""
        told = record.told
        return not isinstance(told, CaseSeen) or told.block != NO_BLOCK or (record.leg, told.case) not in self._others

    def found(self, told: Packed) -> bool:
        """Whether this was found before."""
        return any(one.signature == told.signature for one in self.findings)

    def _goes_on(self, at: float) -> None:
        """A driver begins. What the one before it had handed out, and heard nothing of, is handed out again."""
        self.fuzz.begun = time.monotonic() - at
        self.again, self.up = self.again + UNREAD * self.up, 0
        self.drivers += 1
        for leg in self.legs:
            for block in range(leg.next):
                if block not in leg.done:
                    leg.begun.setdefault(block, [])

    def _saw(self, record: Saw) -> None:
        leg, told = self.legs[record.leg], record.told
        self.last_at = record.at
        leg.next = max(leg.next, record.block + 1)
        seen = leg.begun.setdefault(record.block, [])
        if not isinstance(told, CaseSeen):
            self.fuzz.tally.refuse(told)
            return
        if told.block == NO_BLOCK:
            self._others.add((record.leg, told.case))
        else:
            seen.append(told)
        leg.cases += 1
        leg.statuses["known" if told.known else told.verdict.status] += 1
        if self.fuzz.count(told):
            self._ask(record.leg, told)

    def _ask(self, leg: int, seen: CaseSeen) -> None:
        """Have a case looked into, unless another one that shows the same is."""
        assert seen.signature is not None
        if seen.signature in self._waiting:
            self._waiting[seen.signature].append((leg, seen))
            return
        self._waiting[seen.signature] = []
        taken = {*self.inquiries, *(int(one.name.rpartition("-")[2]) for one in self.findings)}
        number = next(number for number in range(1, len(taken) + 2) if number not in taken)
        self.inquiries[number] = InquiryJob(
            leg=leg,
            number=number,
            seen=seen,
            folder=str(self.folder / f"finding-{number}"),
            cases=self.fuzz.tally.cases,
            seconds=self.last_at,
            columns=self._columns,
        )

    def _concluded(self, record: InquiryOver) -> None:
        inquiry, told = self.inquiries.pop(record.number), record.told
        signature = inquiry.seen.signature
        assert signature is not None
        waiting = self._waiting.pop(signature)
        for aside in record.asides:
            self.fuzz.set_aside(aside.case, aside.signature, aside.undecided)
        if isinstance(told, BugBehind):
            self.fuzz.tally.explain(inquiry.seen, told.bug)
            for leg, seen in waiting:
                self._ask(leg, seen)
            return
        if self.found(told):  # another case shrank to what was found already
            self.fuzz.set_aside(inquiry.seen.case, told.signature, False)
        else:
            self.findings.append(told)
        self.fuzz.known |= {signature, told.signature}
        for _, seen in waiting:
            self.fuzz.set_aside(seen.case, signature, False)

    def _died(self, record: Died) -> None:
        self.deaths, self.up = self.deaths + 1, self.up - 1
        if record.leg < 0:
            return
        if record.inquiry >= 0:
            inquiry = self.inquiries[record.inquiry]
            self._tries[inquiry.called] += 1
            if self._tries[inquiry.called] >= TRIES:
                self.lost.append(Lost(f"{inquiry.called}, of {inquiry.folder}", record.why))
            return
        self.again += 1
        leg = self.legs[record.leg]
        leg.next = max(leg.next, record.block + 1)
        leg.begun.setdefault(record.block, [])
        name = f"leg {record.leg}, block {record.block}, after {len(leg.begun[record.block])} cases"
        self._tries[name] += 1
        if self._tries[name] >= TRIES:
            del leg.begun[record.block]
            leg.done.add(record.block)
            self.lost.append(Lost(f"{name} of {self.terms.legs[record.leg].called}", record.why))

    def _tell_search(self) -> None:
        """The search counts as found what was found, and what is looked into."""
        names = [*(one.name for one in self.findings), *(f"finding-{number}" for number in sorted(self.inquiries))]
        self.fuzz.found = [self.folder / name for name in names]

    # What is to be done

    def job_for(self, worker: int, leg: int) -> Job | None:
        """What a worker that has the SGLang of this leg (-1: none) is to do next; None: nothing."""
        job = self._inquiry(leg) or (None if self.over else self._block(leg))
        if job is not None:
            self._running[worker] = job
        return job

    def ended(self, worker: int) -> Job:
        """The job that a worker does no longer."""
        return self._running.pop(worker)

    def running(self, worker: int) -> Job | None:
        return self._running.get(worker)

    @property
    def over(self) -> bool:
        """Whether no further case is to be run."""
        plan = self.fuzz.plan
        return (
            self.fuzz.seconds >= plan.seconds
            or self.fuzz.tally.cases >= plan.max_cases
            or all(leg.closed or (leg.next == leg.blocks and not leg.begun) for leg in self.legs)
        )

    @property
    def all_done(self) -> bool:
        """Whether there is nothing more to wait for: blocks that are being run count no more when the campaign is over."""
        return self.over and not any(self._hopeful(job) for job in self.inquiries.values())

    def _hopeful(self, inquiry: InquiryJob) -> bool:
        return self._tries[inquiry.called] < TRIES and not self.legs[inquiry.leg].closed

    def _inquiry(self, leg: int) -> InquiryJob | None:
        busy = {job.number for job in self._running.values() if isinstance(job, InquiryJob)}
        free = [job for number, job in self.inquiries.items() if number not in busy and self._hopeful(job)]
        return min(free, key=lambda job: (job.leg != leg, job.number), default=None)

    def _block(self, leg: int) -> BlockJob | None:
        """A block that a worker left, or the next one, of the leg that is least far."""
        if self.fuzz.tally.cases + self._coming() >= self.fuzz.plan.max_cases:
            return None
        busy = {(job.leg, job.block) for job in self._running.values() if isinstance(job, BlockJob)}
        left = {number: [one for one in books.begun if (number, one) not in busy] for number, books in enumerate(self.legs)}
        may = [
            number
            for number, books in enumerate(self.legs)
            if not books.closed and (left[number] or books.next != books.blocks)
        ]
        if not may:
            return None
        least = min(may, key=lambda number: self.legs[number].next)
        chosen = leg if leg in may and self.legs[leg].next <= self.legs[least].next + _STAY else least
        books = self.legs[chosen]
        if left[chosen]:
            block = min(left[chosen])
        else:
            block, books.next = books.next, books.next + 1
            books.begun[block] = []
        return BlockJob(chosen, block, tuple(books.begun[block]))

    def _coming(self) -> int:
        """How many cases the blocks that are being run will have."""
        jobs = [job for job in self._running.values() if isinstance(job, BlockJob)]
        return sum(max(0, self._size(job) - len(self.legs[job.leg].begun.get(job.block, ()))) for job in jobs)

    def _size(self, job: BlockJob) -> int:
        if self.legs[job.leg].blocks >= 0:
            return BLOCK
        plan = self.fuzz.plan
        return block_of(plan.seed, job.block, plan.asked).size
