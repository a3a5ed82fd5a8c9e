"""The form of a ledger entry: what a known bug is, the smallest case that shows it, and how to have it with and without."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from msgspec.structs import replace

from eagletwin.harness.core.case import (
    Adapter,
    Adaptive,
    Bias,
    Case,
    EngineSettings,
    Event,
    Grammar,
    Logprobs,
    Penalties,
    Processor,
    Request,
    Sampling,
    SGLangSettings,
    Tier,
    VLLMSettings,
)
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.run_spec import DEFAULT_ENGINE, DEFAULT_RUN, Dtype, Engine, RunSpec
from eagletwin.harness.core.verdict import DECLARED_VIEW, View

# What the files of the ledger take from here besides the classes below.
__all__ = [
    "Adapter",
    "Adaptive",
    "Bias",
    "Case",
    "Edit",
    "EngineSettings",
    "Event",
    "Grammar",
    "Logprobs",
    "Patch",
    "Penalties",
    "Processor",
    "Request",
    "SGLangSettings",
    "Sampling",
    "Tier",
    "VLLMSettings",
]


def small_case(*requests: Request, name: str = "", sglang: SGLangSettings | None = None, **more: Any) -> Case:
    """A case of the smallest model and the shortest chain, where `more`, other fields of Case, does not say otherwise. One
    without a name gets that of its entry."""
    settings = EngineSettings(sglang=sglang or SGLangSettings())
    smallest: dict[str, Any] = {"model": "llama-tiny", "num_steps": 1, "engine": settings}
    return Case(name=name, requests=requests, **(smallest | more))


def small_patch(name: str, target: str, match: str, replacement: str) -> Patch:
    return Patch(name=name, edits=(Edit(target=target, match=match, replacement=replacement),))


@dataclass(frozen=True, slots=True)
class Side:
    """One half of a proof: what is changed in the release, and what its trees are held to."""

    patches: tuple[Patch, ...] = ()
    view: View = DECLARED_VIEW


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What the mode of a run must have for a bug to be there at all: without it both sides are the same.

    device, dtype, attention  empty: any will do
    graphs   whether it takes CUDA graphs, which a GPU has by default
    prefill_graphs  whether it takes graphs of prefill
    overlap  whether it takes the overlap scheduler, which a GPU has by default; False: with it another rule is the first to
             break; None: either will do
    pp       stages of a pipeline; 1: none is needed
    """

    device: str = ""
    dtype: Literal["", Dtype] = ""
    attention: str = ""
    graphs: bool = False
    prefill_graphs: bool = False
    overlap: bool | None = None
    pp: int = 1

    @property
    def options(self) -> str:
        """What to type for a proof."""
        named = (("--device", self.device), ("--dtype", self.dtype), ("--attention", self.attention))
        words = [f"{option} {value}" for option, value in named if value]
        words += ["--prefill-graphs 16,64"] if self.prefill_graphs else []
        if self.overlap is not None and self.overlap != (self.device == "cuda"):
            words.append("--overlap" if self.overlap else "--no-overlap")
        words += [f"--pp {self.pp}"] if self.pp > 1 else []
        return " ".join(words)


# Under which condition a bug costs accepted drafts.
Condition = Literal["always", "prompts longer than a chunk", "prefix hits", "batches"]
# And what a server must do for it to be there at all, beside what it drafts.
Doing = Literal["sampling", "weight updates", "a host cache"]


@dataclass(frozen=True, slots=True)
class Loses:
    """How a server with the bug accepts fewer drafts than the pair deserves, and leaves the output as it is.

    condition  what the requests have in common that lose
    layers     whether the draft has several layers; None: either
    tree       whether topk is more than 1; None: either
    num_steps  at least so many
    needs      without this no server has it; None: any may
    """

    condition: Condition
    layers: bool | None = None
    tree: bool | None = None
    num_steps: int = 1
    needs: Doing | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of a bug, however it is shown.

    id        the number of the pull request that fixed it, with the part of it that is meant; a live one that has none: a word
    rule      the rule that it breaks
    buggy     releases that have the bug: "FIRST - LAST", "FIRST -" for a live bug, "before OLDEST" for one that no release here
              has; fixed: the first release without it, "" for a live bug
    last_bad  the last release before `fixed`, if the bug can be shown there; else `hidden` says why it cannot
    trigger   what a run needs for the bug to matter
    loses     how it shows in the acceptance of a server; None: it shows in the output, or in a crash, or in nothing
    engine    whose bug it is, and whose releases are meant
    """

    id: str
    title: str
    rule: str
    buggy: str
    trigger: str
    fixed: str = ""
    last_bad: str = ""
    hidden: str = ""
    loses: Loses | None = None
    engine: Engine = DEFAULT_ENGINE

    @property
    def state(self) -> str:
        """Which releases have it, in words."""
        return self.buggy + ("" if self.fixed else " (live)")

    def is_in(self, release: str) -> bool:
        """Whether a release has it. False where the order of versions does not say: of a commit, or of a fork."""
        from packaging.version import InvalidVersion, Version

        first, _, last = self.buggy.partition(" -")
        try:
            version = Version(release)
        except InvalidVersion:
            return False
        if self.buggy.startswith("before "):
            return version < Version(self.buggy.removeprefix("before "))
        return Version(first) <= version and (not last or version <= Version(last))


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionCall:
    """A call of one function of the engine alone, and the rows that it must answer (engines/sglang/call_function.py makes it).

    what   what a row is, before its number: "slots planned for draft decode step"
    words  the call in short, which a measured cell remembers
    """

    name: str
    given: Mapping[str, list[int]]
    expected: tuple[list[int], ...]
    what: str
    words: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe(Facts):
    """A bug that no case can reach without a GPU, shown by one call. Whole releases are asked.

    revert  undoes the fix on a current engine, in memory; remedy: of a live bug, a candidate fix
    """

    call: FunctionCall
    revert: Patch | None = None
    remedy: Patch | None = None

    @property
    def command(self) -> str:
        """What to type to see it."""
        return f"eagletwin prove --releases {self.id}" if self.fixed else f"python -m tests.lab releases --entry {self.id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class OnCuda:
    """What a proof on a GPU has otherwise (`gpu plan --prove` of tests/lab).

    green, red      patches of the sides in releases up to `until`, which have the bug and no fix to undo, need another
                    candidate fix, or have another bug there, which is mended on both sides; None: the entry's
    one_graph       the green side's, where one graph holds all layers
    eager           the green side's without graphs, where the engine has the fault in another function as well
    triton_alone    why no other attention backend than Triton's has it, or its candidate fix; empty: others do
    max_new_tokens  of the case, so many that not every draw is the best token: coins differ from a CPU's. 0: the case's
    modes           modes of tests/lab/gpu/plan.py in which it is proven in addition to the usual ones
    hidden          mode -> why both sides are equal in it
    """

    green: tuple[Patch, ...] | None = None
    red: tuple[Patch, ...] | None = None
    until: str = ""
    one_graph: Patch | None = None
    eager: Patch | None = None
    triton_alone: str = ""
    max_new_tokens: int = 0
    modes: tuple[str, ...] = ()
    hidden: Mapping[str, str] = field(default_factory=dict)

    def sides(self, release: str) -> tuple[tuple[Patch, ...] | None, tuple[Patch, ...] | None]:
        """Patches of the green and of the red side in a release; None: the entry's."""
        from packaging.version import Version

        earlier = self.until and Version(release) <= Version(self.until)
        return (self.green, self.red) if earlier else (None, None)


# OnCuda.hidden of a bug of batches that no graph was captured for.
IN_A_GRAPH = dict.fromkeys(("graphs", "overlap"), "a batch in a graph takes another way")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry(Facts):
    """A bug that a case shows.

    by_hand   what builds a worker on `last_bad` that the release itself would not, so that the bug can show
    beside    release -> a patch that fixes another bug of that release, which would show first
    needs     what the mode must have, where the CPU engine as it always is does not reach the bug
    on_cuda   how a proof on a GPU differs
    within    the view that both sides are judged in, where another live bug shows first in the declared one
    accepted  of that other bug: the view, which takes what it does as right
    case      minimal: equal on the green side, diverged on the red one
    claim     a longer case in which the two sides give the same tokens, and the red one accepts fewer drafts
    behind    of a live bug: another one, which shows with the candidate fix, and is mended on the green side too
    also      cases of other kinds that show it, where they lack what makes `case` a special one
    recorded  the rule by which integers of a recorded server show it, or why none does, where tests/ledger.py does not say it
    rounded   whether a case of any kind shows it in a mode of fewer bits than float32, where rounding decides between tokens

    One of these tells the two sides apart:

    revert    undoes the fix on a current engine, in memory
    remedy    of a live bug: a candidate fix
    view      of a live bug that the judge declares and follows: the view in which it is a divergence
    """

    case: Case
    claim: Case | None = None
    also: tuple[Case, ...] = ()
    behind: "Entry | None" = None
    recorded: str = ""
    rounded: bool = False
    by_hand: Patch | None = None
    beside: Mapping[str, Patch] = field(default_factory=dict)
    needs: Needs | None = None
    on_cuda: OnCuda = OnCuda()
    within: View = DECLARED_VIEW
    accepted: View | None = None
    revert: Patch | None = None
    remedy: Patch | None = None
    view: View | None = None

    def __post_init__(self) -> None:
        if not self.case.name:
            name = f"pr-{self.id}" if self.id[0].isdigit() else self.id
            object.__setattr__(self, "case", replace(self.case, name=name))
        if sum(part is not None for part in (self.revert, self.remedy, self.view)) != 1:
            raise ValueError(f"{self.id}: exactly one of revert, remedy and view tells its two sides apart")
        if bool(self.fixed) != (bool(self.last_bad) ^ bool(self.hidden)):
            raise ValueError(
                f"{self.id}: a fixed one has a last release that shows it, or a reason why none does; a live one none"
            )

    @property
    def green(self) -> Side:
        mended = (self.behind, self) if self.behind is not None else (self,)
        return Side(tuple(one.remedy for one in mended if one.remedy is not None), self.within)

    @property
    def red(self) -> Side:
        return Side((self.revert,) if self.revert is not None else (), self.view or self.within)

    @property
    def options(self) -> str:
        """What to type for a proof beside its id."""
        of_engine = f"--engine {self.engine} " if self.engine != DEFAULT_RUN.mode.engine else ""
        return f"{of_engine}{self.needs.options if self.needs is not None else ''}".rstrip()

    def says(self, side: Side) -> str:
        """What a side is, in words."""
        if self.view is not None:
            return "as the judge declares it" if side == self.green else "as it should be"
        if self.revert is not None:
            return "with the fix, as released" if side == self.green else "without the fix, which is undone in memory"
        return "with a candidate fix, in memory" if side == self.green else "as released"

    def run(self, side: Side, run: RunSpec = DEFAULT_RUN) -> RunSpec:
        """This run, with what the side changes and how it is judged."""
        changes: tuple[str, ...] = ("--revert", self.id) if self.revert in side.patches else ()
        for one in (self.behind, self):
            changes += ("--remedy", one.id) if one is not None and one.remedy in side.patches else ()
        return replace(run, patches=side.patches, changes=changes, view=side.view)

    def command(self, side: Side, run: RunSpec = DEFAULT_RUN) -> str:
        """What to type to see one side."""
        run = replace(run, mode=replace(run.mode, engine=self.engine))
        return self.run(side, run).command("check", self.id)


Known = Entry | Probe
