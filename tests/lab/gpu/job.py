"""A job of a plan and its result, the blocks that one draws, and how its decode batches ran (jobs.py runs it)."""

from collections import Counter

from msgspec import Struct

from eagletwin.cases.blocks import Block, SearchConstraints, block_of
from eagletwin.cases.ledger import LEDGER
from eagletwin.cases.reach import why_unreachable
from eagletwin.harness.check.known import may_show
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.patch import Patch
from eagletwin.harness.core.records import EngineInfo
from eagletwin.harness.core.run_spec import Mode
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.core.verdict import DECLARED_VIEW, View
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.valid import runs_in

from .compared import Apart, Race

# Jobs of blocks as a search draws them (`gpu plan --blocks`): every recipe and option that a GPU runs, each with its share.
#
# A search on a CPU has four cases in a block, since an engine starts in a second there. Here one starts in twenty, so a block
# has as many as are asked for. A job draws its cases itself, where it runs: a plan of 100,000 cases would be hundreds of
# megabytes.

_GRAPHS = Mode(device="cuda", graphs=(1,))
_FEWER = 4  # times fewer cases of a block with large ones, so that jobs take about as long


class Draw(Struct, frozen=True):
    """Which cases a job draws: the first `cases` of block `number` of the search with this seed, with or without overlap."""

    seed: int
    number: int
    cases: int
    overlap: bool

    @property
    def block(self) -> Block:
        """The block. Raises InputError if there is none of its number."""
        return block_of(
            self.seed, self.number, SearchConstraints(wanted=runs_on_a_gpu, overlap=self.overlap, retract=not self.overlap)
        )

    def draw(self) -> tuple[Case, ...]:
        """The cases, which share a configuration."""
        block = self.block
        count = self.cases // _FEWER if block.large else self.cases
        return tuple(block.cases(max(count, 1)))


def runs_on_a_gpu(probe: Case) -> bool:
    """Whether such a configuration runs in all modes of a plan: float32, with graphs and without."""
    return runs_in(probe, _GRAPHS)


def bugs_of(probe: Case, release: str, mode: Mode) -> dict[str, Patch]:
    """Live bugs of the release that cases of this configuration may show in this mode, and what mends each."""
    return {
        entry.id: entry.remedy
        for entry in LEDGER.values()
        if entry.remedy is not None
        and entry.is_in(release)
        and not why_unreachable(entry, mode)
        and may_show(entry, probe, mode)
    }


# What a job of a plan is, and the result of one (jobs.py runs it).

RESULTS = "results.jsonl"  # in the folder of a campaign: a line a job
JOB = "job.json"  # in the folder of a job


class MustShow(Struct, frozen=True, kw_only=True):
    """What an engine with a bug must show: the red side of a proof, or a planted fault.

    rule    the rule that must break; empty: any
    hidden  why nothing shows in this mode, in which all cases must be equal
    """

    rule: str = ""
    hidden: str = ""


class Job(Struct, frozen=True, kw_only=True):
    """The cases of one engine, which share a configuration.

    draw      what the job draws in place of `cases`, in its own process
    times     how often each case is run, each time after a reset; runs that come out differently are `unknown`
    again     run the first case once more after all others, and compare its two traces number for number
    beside    run the first case on another engine as well, in this mode, and compare the two traces: integers must be equal,
              floats within the judge's bound. What only one of the two can see, of forwards in graphs, is left out.
    apart     run all cases in this mode as well, and say how far apart the two are (compared.py)
    known     known bugs of the release, by name, and what fixes each: a case that diverged runs again with the fix, and is
              explained by the bug if it is equal then
    mend      mend the live bugs that its cases may show, in memory, as many as fit together
    keep      keep the trace of the first case; those of cases that are not equal are kept anyway
    proof     a case says nothing unless all statements ran that the patches change
    expected  what must be found
    races     run each case that is equal so often again, with pauses between the streams of the GPU; it must be answered alike
    until_found  run no more cases when one has diverged
    """

    name: str
    mode: Mode
    cases: tuple[Case, ...] = ()
    draw: Draw | None = None
    patches: tuple[Patch, ...] = ()
    view: View = DECLARED_VIEW
    times: int = 1
    again: bool = False
    beside: Mode | None = None
    apart: Mode | None = None
    known: dict[str, Patch] = {}
    mend: bool = False
    keep: bool = False
    proof: bool = False
    expected: MustShow | None = None
    races: int = 0
    until_found: bool = False


class Beside(Struct, frozen=True, kw_only=True):
    """Two traces of one case. largest: relative difference of two floats; differs: the first difference beyond rounding.

    unfinished  how one of the two runs ended before its end: what is the same until then says nothing of the rest
    """

    same: bool
    compared: int
    largest: float
    differs: str = ""
    unfinished: str = ""


class CaseResult(Struct, frozen=True, kw_only=True):
    """The result of one case. Times in seconds; trace: writing and reading it, measured anew, and so a part of engine.

    known  the known bug without which the case is equal
    rule   that was broken; `race` where a run with pauses was answered otherwise
    races  runs with pauses; raced: seconds of all of them
    paths  how many decode batches of which size ran in a graph of that size, padded to a larger one, or without a graph
    """

    case: str
    status: str
    rule: str = ""
    where: str = ""
    reason: str = ""
    engine: float = 0.0
    trace: float = 0.0
    judge: float = 0.0
    choices: int = 0
    ties: int = 0
    adopted: int = 0
    compared: int = 0
    headroom: float = 0.0
    unseen: dict[str, int] = {}
    exercised: tuple[str, ...] = ()
    paths: dict[str, int] = {}
    known: str = ""
    races: tuple[Race, ...] = ()
    raced: float = 0.0


class JobResult(Struct, frozen=True, kw_only=True):
    """The result of a job. `error`: why it ran none of its cases, or not all.

    again     whether the first case left the same trace after all others, number for number; None: that was not asked
    expected  what had to be found; None: that all is equal
    shared    whether its engine used the GPU at the same time as others (processes.py)
    mended    entries of the ledger whose remedies it ran with, since it was to `mend` them
    """

    name: str
    mode: Mode
    start: float = 0.0
    seconds: float = 0.0
    engine: EngineInfo | None = None
    seen: tuple[CaseResult, ...] = ()
    again: bool | None = None
    again_compared: int = 0
    again_differs: str = ""
    beside: Beside | None = None
    apart: Apart | None = None
    expected: MustShow | None = None
    shared: bool = False
    mended: tuple[str, ...] = ()
    error: str = ""


class CampaignFacts(Struct, kw_only=True):
    """What a plan came to. statuses: how many cases came out how; report: what people read"""

    jobs: int
    cases: int
    statuses: dict[str, int]
    seconds: float
    folder: str
    report: str
    exit_code: int = 0


# How decode batches ran: in a graph of their size, padded to a larger one's, or without a graph. The campaign counts them.

PATHS = ("exact", "padded", "eager")


def path(size: int, graphs: tuple[int, ...], in_graph: bool) -> str:
    """Which path a batch took, by the sizes that graphs are captured for."""
    return "eager" if not in_graph else "exact" if size in graphs else "padded"


def paths(trace: Trace, graphs: tuple[int, ...]) -> dict[str, int]:
    """Decode batches by size and by how each ran, as "3 padded".

    The trace says whether draft decode, or of several layers draft extend, was a replay. Where neither can be, of a single
    step, the sizes that were captured tell.
    """
    requests: Counter[int] = Counter()
    replayed: set[int] = set()
    case = trace.header.case
    for record in trace.header.records:
        if record.stage == "verify":
            requests[record.iteration] += 1
        elif record.numbers.get("in_graph"):
            replayed.add(record.iteration)
    recorded = case.num_steps > 1 or RECIPES[case.model].mtp_layers > 0
    counts: Counter[str] = Counter()
    for iteration, size in requests.items():
        in_graph = iteration in replayed if recorded else size <= max(graphs, default=0)
        counts[f"{size} {path(size, graphs, in_graph)}"] += 1
    return dict(counts)


def table(counts: Counter[str]) -> str:
    """Decode batches: a line for each size, a column for each path."""
    sizes = sorted({int(name.split()[0]) for name in counts})
    lines = [f"{'batch':>5} " + " ".join(f"{name:>8}" for name in PATHS)]
    lines += [f"{size:>5} " + " ".join(f"{counts[f'{size} {name}']:>8,}" for name in PATHS) for size in sizes]
    return "\n".join(lines)
