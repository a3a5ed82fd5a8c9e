"""One run: on which engine a case runs, in which mode, what is changed in it, and how it is judged.

Everything that names a run is derived from a RunSpec: the options that a person types to have it again, the reproduction
script, what a search hands to an engine. Imports nothing slow: start.py reads it before torch is there.
"""

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from .case import SGLangSettings
from .errors import EXIT_UNKNOWN, InputError, exit_code_of
from .patch import Patch
from .verdict import DECLARED_VIEW, Verdict, View

# float32 is the mode in which the judge can decide every choice; bfloat16 is what users run, and makes part of the choices ties
Dtype = Literal["float32", "bfloat16"]

# Branches of the widest trees that are worth generating: of 16, and with EAGLE-3 of 8, more than three quarters of the choices
# are ties in bfloat16 (docs/explanation/bfloat16.md), and the verdict is unknown.
WIDEST: dict[Dtype, int] = {"float32": 16, "bfloat16": 4}


Engine = Literal["sglang", "vllm"]


class EngineFacts(NamedTuple):
    """What is said of an engine where none is named.

    title      what reports call it
    installed  whether it is a package of this environment, and that one the default; else the newest known release is
    folder     of a checkout, that holds its package; "": the checkout itself
    launch     how its server is started
    older      why releases before those that are known do not run; "": nothing is to be said
    """

    title: str
    installed: bool
    folder: str
    launch: str
    older: str = ""


ENGINES: dict[Engine, EngineFacts] = {
    "sglang": EngineFacts("SGLang", True, "python", "python -m sglang.launch_server"),
    "vllm": EngineFacts("vLLM", False, "", "vllm serve", "older ones have another speculator"),
}
DEFAULT_ENGINE: Engine = "sglang"
TITLES: dict[str, str] = {engine: facts.title for engine, facts in ENGINES.items()}


def chosen_engine(chosen: Engine | None, given: Mapping[Engine, str], option: str = "--") -> tuple[Engine, str]:
    """The engine that runs, and its release or tree, which names the engine too. option: how an option of it begins. Raises
    InputError for two engines."""

    def refusal(what: str, remedy: str) -> InputError:
        return InputError(what, consequence="nothing was run", remedy=remedy)

    named = {engine: name for engine, name in given.items() if name}
    if len(named) > 1:
        both = " with ".join(f"{option}{engine} {name}" for engine, name in named.items())
        raise refusal(f"{both}: one engine runs", "leave one of them out")
    engine, name = next(iter(named.items()), (chosen or DEFAULT_ENGINE, ""))
    if chosen is not None and chosen != engine:
        raise refusal(
            f"{option}{engine} {name} with {option}engine {chosen}: it names the engine {TITLES[engine]}",
            f"leave {option}engine {chosen} out, or name {TITLES[chosen]} by {option}{chosen}",
        )
    return engine, name


Device = Literal["cpu", "cuda"]
Attention = Literal["triton", "fa3", "flashinfer", "flashmla"]
FLASHINFER_HEAD = 64  # the narrowest head for which FlashInfer has kernels
FLASHMLA_PAGE = 64  # the page size of FlashMLA's kernels


class Mode(Struct, frozen=True):
    """What the worker runs on, and how it is driven; what a case asks for does not depend on it.

    graphs   batch sizes for which its CUDA graphs are captured: a smaller batch is padded to the next one, a larger one runs
             without a graph. Empty: no graphs.
    prefill_graphs  token counts for which graphs of prefill are captured; empty: none
    dtype    what the worker computes in, and keeps its KV rows in
    overlap  the release's overlap scheduler: a batch is launched before the results of the one before are looked at
    attention  the attention backend, of target and draft. fa3, FlashAttention 3, flashinfer and flashmla know no float32
             on a GPU; fa3 runs on a CPU, too; flashmla is for latent attention alone, chains, and pages of 64
    gpu      number of the GPU, of those that this process may see; -1: as the process sees them
    tp       tensor parallelism: ranks that share the work, a process each, on a GPU a GPU each
    pp       pipeline parallelism: stages, a process each, that have some of the target's layers each; the last one drafts
    dp       DP attention: ranks that have requests of their own, a process each. A case says how many
    engine   which engine it is
    """

    device: Device = "cpu"
    graphs: tuple[int, ...] = ()
    prefill_graphs: tuple[int, ...] = ()
    overlap: bool = False
    dtype: Dtype = "float32"
    gpu: int = -1
    tp: int = 1
    attention: Attention = "triton"
    pp: int = 1
    dp: int = 1
    engine: Engine = DEFAULT_ENGINE

    @property
    def title(self) -> str:
        """What reports call the engine."""
        return TITLES[self.engine]

    @property
    def processes(self) -> int:
        """Processes that run a case together."""
        return self.tp * self.pp * self.dp

    @property
    def options(self) -> list[str]:
        """How it is typed on the command line; empty for the CPU engine as it always is."""
        more = ["--engine", self.engine] if self.engine != DEFAULT_ENGINE else []
        more += ["--tp", str(self.tp)] if self.tp > 1 else []
        more += ["--pp", str(self.pp)] if self.pp > 1 else []
        more += ["--dtype", self.dtype] if self.dtype != "float32" else []
        more += ["--attention", self.attention] if self.attention != "triton" else []
        graphs = ["--graphs", ",".join(map(str, self.graphs)) or "none"]
        graphs += ["--prefill-graphs", ",".join(map(str, self.prefill_graphs))] if self.prefill_graphs else []
        if self.device == "cpu":
            return (graphs if self.graphs else []) + (["--overlap"] if self.overlap else []) + more
        return ["--device", "cuda", *graphs, "--overlap" if self.overlap else "--no-overlap", *more]

    @property
    def words(self) -> str:
        """For a trace's header; empty for the CPU engine as it always is."""
        if self.device == "cpu" and not self.graphs:
            return ", ".join([self.dtype] * (self.dtype != "float32") + [self.attention] * (self.attention != "triton"))
        graphs = f"graphs {' '.join(map(str, self.graphs))}" if self.graphs else "no graphs"
        if self.prefill_graphs:
            graphs += f" (prefill {' '.join(map(str, self.prefill_graphs))})"
        attention = "" if self.attention == "triton" else f", {self.attention}"
        return f"{graphs}, {'with' if self.overlap else 'no'} overlap, {self.dtype}{attention}"


CPU = Mode()


def mode_of_case(mode: Mode, settings: SGLangSettings) -> Mode:
    """The mode of an engine of a case with these settings, which may have DP attention, and on a CPU graphs, overlap and
    another attention backend."""
    mode = replace(mode, dp=settings.attn_dp_size)
    if mode.device != "cpu":
        return mode
    graphs = {"graphs": mode.graphs or settings.graphs, "prefill_graphs": mode.prefill_graphs or settings.prefill_graphs}
    attention = settings.attention_backend if mode.attention == "triton" else mode.attention
    return replace(mode, overlap=mode.overlap or settings.overlap, attention=attention, **graphs)


# What executes Triton kernels: the fast runtime; Triton's interpreter; both, compared launch by launch; the fast runtime
# three times a launch, to find undefined values and races.
Kernels = Literal["fast", "interpreter", "shadow", "checked"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Seconds. A step is one stage of one scheduler iteration: under the interpreter some 0.1 to 1 s on an idle machine."""

    step: float = 120.0
    case: float = 900.0


DEFAULT_LIMITS = Limits()


class RunSpec(Struct, frozen=True, kw_only=True):
    """One run, whatever the case.

    release  what the option of the engine named: "" for the installed one, or the newest known; a release; or a folder
    patches  changes in memory; `changes`: the options that give them, such as ("--revert", "26329"), as far as options can
    workarounds  candidate fixes of known bugs, which keep these out of a case that is about something else: one that nothing
             calls is no doubt about the verdict, as a patch would be
    finding  of a reproduction: the signature of the finding. The case is to show whether it is still there: a tree's other
             changes need not run
    without  rules that are switched off
    view     what counts as right where an engine is known to approximate
    repeat   how many times a case is run before it is called equal
    strict   whether an equal run that did not run all of a change counts as unknown
    """

    release: str = ""
    mode: Mode = CPU
    kernels: Kernels = "fast"
    patches: tuple[Patch, ...] = ()
    workarounds: tuple[Patch, ...] = ()
    finding: str = ""
    changes: tuple[str, ...] = ()
    without: frozenset[str] = frozenset()
    view: View = DECLARED_VIEW
    limits: Limits = DEFAULT_LIMITS
    repeat: int = 1
    strict: bool = False

    @property
    def applied(self) -> tuple[Patch, ...]:
        """All changes in memory."""
        return tuple(dict.fromkeys((*self.patches, *self.workarounds)))

    @property
    def options(self) -> list[str]:
        """What to type for this run; nothing for what is left at its default."""
        words = [*self.changes, *(word for rule in sorted(self.without) for word in ("--without", rule))]
        given = (
            ("--view", self.view, DECLARED_VIEW),
            (f"--{self.mode.engine}", self.release, ""),
            ("--kernels", self.kernels, "fast"),
            ("--repeat", self.repeat, 1),
            ("--step-timeout", exact(self.limits.step), exact(DEFAULT_LIMITS.step)),
            ("--case-timeout", exact(self.limits.case), exact(DEFAULT_LIMITS.case)),
        )
        return [*words, *(["--strict"] if self.strict else []), *unusual(given), *self.mode.options]

    def exit_code(self, verdict: Verdict) -> int:
        """Of a command that comes to this verdict."""
        return EXIT_UNKNOWN if self.strict and verdict.not_seen else exit_code_of(verdict.status)

    def command(self, *words: object) -> str:
        """The command line that has this run: `eagletwin`, these words, and the options."""
        return shlex.join(["eagletwin", *map(str, words), *self.options])


def unusual(given: Iterable[tuple[str, object, object]]) -> list[str]:
    """What to type of these options, each (name, value, default): nothing for what is left at its default."""
    return [word for name, value, usual in given if value != usual for word in (name, str(value))]


def exact(number: float) -> str:
    """The shortest text that is read as this number: 120, and not 120.0."""
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


DEFAULT_RUN = RunSpec()
