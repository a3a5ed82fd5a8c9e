"""What a job of a plan is, and the result of one (jobs.py runs it)."""

from msgspec import Struct

from eagletwin.harness.core.case import Case
from eagletwin.harness.core.patch import Patch
from eagletwin.harness.core.records import EngineInfo
from eagletwin.harness.core.run_spec import Mode
from eagletwin.harness.core.verdict import DECLARED_VIEW, View

from .precision_gap import Apart
from .races import Race
from .searched import Draw

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
    apart     run all cases in this mode as well, and say how far apart the two are (precision_gap.py)
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
    shared    whether its engine used the GPU at the same time as others (sharing.py)
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
