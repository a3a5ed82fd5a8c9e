"""The result of a command as JSON: its fields, which are the schema of docs/reference/json.md, and how `--json` prints it.

Fields are added and none is renamed or removed while `schema` stays as it is. Commands that have had `--json` for longer than
this module print what json.md says of each.
"""

import contextlib
import io
import sys
from collections.abc import Callable
from contextvars import ContextVar
from functools import wraps
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct, field

from eagletwin.harness.core.errors import EXIT_HARNESS, EXIT_INTERRUPTED, AlreadyReported, EagletwinError
from eagletwin.harness.core.run_spec import DEFAULT_ENGINE, Engine
from eagletwin.harness.core.verdict import Verdict

from .options import JSON, Command, run_options

SCHEMA = 1


def says(text: str) -> Meta:
    """What a field is, for docs/reference/json.md."""
    return Meta(description=text)


class ResultFacts(Struct, kw_only=True, forbid_unknown_fields=True):
    """What every object has."""

    schema: Annotated[int, says("1")] = SCHEMA
    exit_code: Annotated[int, says("the exit code of the command")] = 0


class ErrorFacts(Struct, kw_only=True, forbid_unknown_fields=True):
    """An error as people read it on stderr."""

    cause: Annotated[str, says("what is wrong")]
    consequence: Annotated[str, says("what follows from it")]
    remedy: Annotated[str, says("what to do")]


class FailedFacts(ResultFacts, kw_only=True):
    """Any command that ends with an error."""

    error: Annotated[ErrorFacts, says("`cause`, `consequence` and `remedy`, as on stderr")]


class SaidFacts(ResultFacts, kw_only=True):
    """Any command that ends before it has a result, as where the engine would not start."""

    said: Annotated[str, says("what people read")]


class CheckFacts(ResultFacts, kw_only=True):
    """A case that ran."""

    case: Annotated[str, says("its name")]
    sglang: Annotated[str, says("the SGLang or vLLM that ran, as traces call it")]
    verdict: Annotated[
        Verdict,
        says(
            "as verdict.json has it: `status`, `rule`, `first`, `shares` (how much of each request was compared), "
            "`excuses` and more"
        ),
    ]
    folder: Annotated[str, says("the run folder")]
    again: Annotated[str, says("the command that repeats it")] = ""
    known: Annotated[str, says("the ledger's bug that it may be")] = ""


class BothFacts(ResultFacts, kw_only=True):
    """A case that ran on both engines, or on both model runners of one."""

    runs: Annotated[list[CheckFacts], says("each as of one engine, by the order of their names")]
    parting: Annotated[str, says("which one is wrong, and the first place where they differ")]
    again: Annotated[str, says("the command that repeats it")] = ""


class SearchFacts(ResultFacts, kw_only=True):
    """A search."""

    interrupted: Annotated[bool, says("whether it was ended before it was done")]
    folder: Annotated[str, says("the run folder")]
    summary: Annotated[
        dict[str, Any],
        says(
            "as summary.json has it: `headline`, `remarks` (sentences on what ran), `command`, `resume`: what continues a "
            "search that was ended, `meaning` of the exit code, `seconds`, `tally`, `findings`, `unconfirmed` (what was "
            "still being made smaller), `known`, `set_aside`, `refused` and `not_looked_at`; `tally` has `deaths` of "
            "workers, and the blocks that were `lost`"
        ),
    ]


class JobFacts(ResultFacts, kw_only=True):
    """One release or tree and the ledger."""

    folder: Annotated[str, says("the run folder")]
    job: Annotated[dict[str, Any], says("as a line of `--history` has it")]


class NamedFacts(Struct, kw_only=True, forbid_unknown_fields=True):
    name: str  # as typed
    version: str  # as in traces


class ExampleFacts(Struct, kw_only=True, forbid_unknown_fields=True):
    """The case to read of what is newly broken."""

    line: str
    case: dict[str, Any]
    changes: list[str]  # its options
    size: str
    shrunk: str = ""  # what became smaller
    looks: int = 0  # smaller cases that ran
    partial: bool = False  # time was up before it was smallest
    known: str = ""
    again: str
    portable: str  # `again` without a path of this machine
    folder: str


class BrokenFacts(Struct, kw_only=True, forbid_unknown_fields=True):
    """What HEAD breaks in one way."""

    what: str
    rule: str
    stage: str
    layer: int
    function: str
    cases: list[str]
    changed_functions: list[str]
    example: ExampleFacts


class SideFacts(Struct, kw_only=True, forbid_unknown_fields=True):
    status: str
    rule: str
    line: str


class AnswerFacts(Struct, kw_only=True, forbid_unknown_fields=True):
    """A case on both sides."""

    name: str
    kind: str
    model: str
    shape: str
    group: str
    ran_change: bool | None
    ran_on_base: bool
    base: SideFacts
    head: SideFacts
    known: str
    again: str
    portable: str  # of an entry
    folder: str


class FunctionsFacts(Struct, kw_only=True, forbid_unknown_fields=True):
    """What differs on a side, and in how many runs of all it ran."""

    against: str
    run: dict[str, int]
    not_run: list[str]
    outside_of_functions: list[str]
    gone: list[str]
    not_run_here: list[str]
    runs: int


class RoundsFacts(Struct, forbid_unknown_fields=True):
    """mean: accept length, the bonus token counted; null: there was no round"""

    rounds: int = 0
    tokens: int = 0
    mean: float | None = None


class AcceptedFacts(Struct, forbid_unknown_fields=True):
    """One configuration: the generated cases that ran on both sides, to their end."""

    model: str
    shape: str
    cases: int = 0
    base: RoundsFacts = field(default_factory=RoundsFacts)
    head: RoundsFacts = field(default_factory=RoundsFacts)
    change: str = ""  # of the mean

    def add(self, base: tuple[int, int], head: tuple[int, int]) -> None:
        """One more case. base, head: rounds, and the tokens that they committed"""
        self.cases += 1
        for side, (rounds, tokens) in ((self.base, base), (self.head, head)):
            side.rounds, side.tokens = side.rounds + rounds, side.tokens + tokens
            side.mean = side.tokens / side.rounds if side.rounds else None
        if self.base.mean and self.head.mean:
            self.change = "same" if self.base == self.head else f"{self.head.mean / self.base.mean - 1:+.1%}"


class ComparisonFacts(ResultFacts, kw_only=True):
    """Two releases or trees. [The guide](../guide/compare.md#--json) has what is in the objects."""

    schema: Annotated[int, says("3")] = 3
    engine: Annotated[Engine, says("whose they are")] = DEFAULT_ENGINE
    result: Annotated[str, says("`newly broken`, `none newly wrong` or `cannot tell`")]
    headline: Annotated[str, says("how people read the result: `2 NEWLY BROKEN`")]
    sentence: Annotated[str, says("the result in words")]
    remarks: Annotated[list[str], says("sentences: how much ran, and which known live bugs were met")]
    not_seen: Annotated[str, says("changed statements that no case ran, where a case ran another")]
    interrupted: Annotated[bool, says("whether a signal or an error ended the command early")]
    base: Annotated[NamedFacts, says("`name`: as typed; `version`: as in traces")]
    head: NamedFacts
    command: str
    portable: Annotated[str, says("`command` without a path of this machine")]
    folder: str
    seconds: float
    counts: Annotated[dict[str, int], says("number of cases and entries in each group")]
    broken: list[BrokenFacts]
    ran_change: Annotated[int | None, says("how many cases ran the change; null if the change is not known")]
    known: Annotated[list[str], says("bugs of the ledger that generated cases showed")]
    not_looked_at: Annotated[list[str], says("features that no generated case had")]
    believed: Annotated[
        list[str], says("live bugs that did not run: both sides have the code of the newest release, which has them")
    ]
    not_run: Annotated[int, says("entries that did not run before the command was ended")]
    not_reached: Annotated[list[str], says("entries that the mode does not reach")]
    answers: list[AnswerFacts]
    changes: Annotated[list[str], says("sentences: what differs between the two, and what ran of it")]
    functions: dict[str, FunctionsFacts]
    acceptance: list[AcceptedFacts]


class ProofFacts(Struct, kw_only=True, forbid_unknown_fields=True):
    """An entry, with its case on both sides of the fix."""

    entry: str
    holds: bool
    exit_code: int
    green: str  # the status with the fix, and the rule if it is not equal; "" if it did not run
    red: str
    why: str = ""
    folders: list[str] = []
    title: str = ""
    state: str = ""  # the releases that have the bug
    green_folder: str = ""  # "" of a function that was called alone, and of what did not run
    red_folder: str = ""


class ProveFacts(ResultFacts, kw_only=True):
    """Proofs."""

    proofs: Annotated[
        list[ProofFacts],
        says(
            "a list: `entry`, `holds`, `exit_code`, `green` and `red`: status and rule with the fix and without it, `why` "
            "it does not hold, or by which rule it does in place of the entry's, `folders`, `title`, `state`: the "
            "releases that have the bug, `green_folder` and `red_folder`"
        ),
    ]
    not_reached: Annotated[list[str], says("entries that did not run: the mode does not reach them, or no release has the fix")]
    asked: Annotated[int, says("how many entries were to be proven")] = 0
    seconds: float
    folder: Annotated[str, says("the run folder, which holds this object as proofs.json, and its page")] = ""
    sglang: Annotated[str, says("the SGLang or vLLM that ran, as traces call it; empty: published wheels")] = ""
    engine: Annotated[Engine, says("whose it is")] = DEFAULT_ENGINE
    command: Annotated[str, says("the command that repeats it")] = ""
    interrupted: Annotated[bool, says("whether it was ended before all was proven")] = False


class BisectFacts(ResultFacts, kw_only=True):
    """A bisection."""

    answer: Annotated[str, says("such as `FIXED WITH 0.5.13`")]
    report: Annotated[str, says("the report, as report.txt has it")]
    folder: Annotated[str, says("the run folder")]


class DifferenceFacts(Struct, kw_only=True, forbid_unknown_fields=True):
    where: str
    left: str
    right: str


class DiffFacts(ResultFacts, kw_only=True):
    """Two traces."""

    left: Annotated[str, says("what is left, and how its run ended")]
    right: str
    same: Annotated[bool, says("within the judge's bound")]
    compared: Annotated[int, says("tensors that both have")]
    differences: Annotated[list[DifferenceFacts], says("a list, in order of flow: `where`, `left`, `right`")]


class RecordedFacts(Struct, kw_only=True, forbid_unknown_fields=True):
    folder: str
    status: str
    headline: str
    rounds: int
    tokens: int
    weighed: dict[str, int] = {}
    untold: str = ""


class JudgeFacts(ResultFacts, kw_only=True):
    """A trace, or what a server recorded."""

    status: Annotated[str, says("`equal`, `diverged` or `unknown`")]
    verdict: Annotated[Verdict | None, says("of a trace: as verdict.json has it; null for a server")] = None
    requests: Annotated[
        list[RecordedFacts],
        says(
            "of a server: `folder`, `status`, `headline`, `rounds`, `tokens` of each request; with the checkpoints "
            "`weighed`: comparisons with them by rule, and `untold`: the cause for which no draft is among them"
        ),
    ] = []
    untold: Annotated[
        dict[str, int], says("of a server with its checkpoints: the requests of which no draft was compared, by cause")
    ] = {}
    report: Annotated[str, says("what people read")]


class WrittenFacts(ResultFacts, kw_only=True):
    """What wrote files."""

    files: Annotated[dict[str, str], says("what each file or folder is, and its path")]
    said: Annotated[list[str], says("what else there is to say of it, a line each")] = []


class DoctorCheckFacts(Struct, kw_only=True, forbid_unknown_fields=True):
    """needed: without it the CPU engine cannot run; the other checks are for information"""

    what: str
    found: str
    good: bool
    needed: bool
    remedy: str


class DoctorFacts(ResultFacts, kw_only=True):
    """What can run here."""

    checks: Annotated[
        list[DoctorCheckFacts], says("a list: `what`, `found`, `good`, `needed`: without it no CPU engine runs, `remedy`")
    ]


class ReleaseFacts(Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    here: bool
    paths: list[str] = []


class ReleasesFacts(ResultFacts, kw_only=True):
    """Releases."""

    releases: Annotated[
        list[ReleaseFacts], says("a list: `name`, `here`: whether it is in the cache, `paths`: of a fetched one")
    ]


# What each command prints. The others print what they did before there was a schema, or are no commands with a result.
SHAPES: dict[str, type[ResultFacts]] = {
    "check": CheckFacts,
    "check --engine ENGINE --engine ENGINE": BothFacts,
    "fuzz": SearchFacts,
    "prove": ProveFacts,
    "bisect": BisectFacts,
    "compare BASE HEAD": ComparisonFacts,
    "compare SGLANG": JobFacts,
    "compare RUN RUN": DiffFacts,
    "judge": JudgeFacts,
    "judge --html": WrittenFacts,
    "info doctor": DoctorFacts,
    "info releases list": ReleasesFacts,
    "info releases fetch": ReleasesFacts,
}
OLDER = ("acceptance", "kernels", "info ledger", "info rules", "info models")
NO_RESULT = ("record",)  # it runs a server


# `--json`: the result of a command as one JSON object, alone on stdout, whatever becomes of the command.
#
# A command is decorated with `with_json` and hands its result to `emit_result`. What a person reads then goes to stderr. Where
# a command ends without a result, as where the engine would not start, the object has what it said; where it raises, the object
# has the error (`print_error`, for every command). docs/reference/json.md has the fields of all.


_told: ContextVar[list[ResultFacts] | None] = ContextVar("told", default=None)  # None: nobody asked for JSON


def wants_json() -> bool:
    """Whether the command that runs was asked for JSON."""
    return _told.get() is not None


def emit_result(result: ResultFacts) -> None:
    """The result of the command that runs; the last one counts. Without --json nothing comes of it."""
    told = _told.get()
    if told is not None:
        told[:] = [result]


def with_json(command: Command) -> Command:
    """Give a command `--json`."""

    @wraps(command)
    def wrapper(*args: Any, as_json: bool, **kwargs: Any) -> object:
        return _run_and_print(lambda: command(*args, **kwargs)) if as_json else command(*args, **kwargs)

    return run_options((JSON,))(wrapper)


def _run_and_print(run: Callable[[], object]) -> object:
    """What `run` returns, after its result was printed."""
    told, said = list[ResultFacts](), _Aside()
    token = _told.set(told)
    try:
        with contextlib.redirect_stdout(said):
            code = run()
    except AlreadyReported as end:
        _print(told, end.exit_code, said.getvalue())
        raise
    finally:
        _told.reset(token)
    if type(code) is int:
        _print(told, code, said.getvalue())
    return code


def _print(told: list[ResultFacts], code: int, said: str) -> None:
    result = told[0] if told else SaidFacts(said=said.strip())
    result.exit_code = code
    print_object(result)


def print_object(facts: object) -> None:
    """One JSON value on stdout."""
    print(msgspec.json.format(msgspec.json.encode(facts), indent=1).decode(), flush=True)


def print_error(error: BaseException) -> None:
    """What a program reads in place of a result."""
    if isinstance(error, AlreadyReported):
        return
    if isinstance(error, EagletwinError):
        failure = ErrorFacts(cause=error.cause, consequence=error.consequence, remedy=error.remedy)
        print_object(FailedFacts(exit_code=error.exit_code, error=failure))
        return
    ended = isinstance(error, KeyboardInterrupt)
    cause = "the command was ended" if ended else f"{type(error).__name__}: {error}"
    failure = ErrorFacts(cause=cause, consequence="there is no result", remedy="see stderr")
    print_object(FailedFacts(exit_code=EXIT_INTERRUPTED if ended else EXIT_HARNESS, error=failure))


class _Aside(io.StringIO):
    """What a person reads: on stderr, and kept for a command that ends without a result."""

    def write(self, text: str) -> int:
        sys.stderr.write(text)
        return super().write(text)

    def flush(self) -> None:
        sys.stderr.flush()
