"""What the commands of the command line share: their options, and how what was typed becomes cases, patches and rules."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from .errors import InputError

if TYPE_CHECKING:
    from eagletwin.cases.entry import Entry

    from .case import Case
    from .dtype import Dtype
    from .engines.mode import Attention, Mode
    from .patch import Patch
    from .probes import Probe

Runs = Annotated[Path, typer.Option("--out", help="Folder under which run folders are made; nothing is overwritten.")]
StepSeconds = Annotated[
    float, typer.Option("--step-timeout", min=0.1, help="Seconds that one stage of one iteration may take.")
]
CaseSeconds = Annotated[float, typer.Option("--case-timeout", min=0.1, help="Seconds that a whole case may take.")]
KernelRuntime = Annotated[
    Literal["fast", "interpreter", "shadow", "checked"],
    typer.Option(
        "--kernels",
        help="What executes Triton kernels: the fast runtime; Triton's interpreter; both, compared; or the fast runtime three "
        "times a launch, to find undefined values and races.",
    ),
]
Reverts = Annotated[list[str] | None, typer.Option("--revert", metavar="PR", help="Undo this fix, in memory. Repeatable.")]
Remedies = Annotated[
    list[str] | None, typer.Option("--remedy", metavar="ENTRY", help="Apply a live bug's candidate fix, in memory. Repeatable.")
]
Views = Annotated[
    Literal["slot_layout", "true_tree", "last_fed", "committed"],
    typer.Option(
        "--view",
        help="What is right where SGLang is known to approximate. slot_layout, last_fed: what it does counts as right. "
        "true_tree: a node of a draft tree must attend to its own ancestors alone (ledger entry 8409 shows that it does not). "
        "committed: a row of a multi-layer draft must be that of the committed token (entry boundary-kv).",
    ),
]
PatchFiles = Annotated[list[Path] | None, typer.Option("--patch", metavar="FILE", help="Apply this patch file, in memory.")]
Sglang = Annotated[
    str, typer.Option("--sglang", metavar="RELEASE|PATH", help="Run this SGLang: a published release, or a source tree.")
]
Device = Annotated[Literal["cpu", "cuda"], typer.Option("--device", help="What the worker runs on.")]
Graphs = Annotated[
    str,
    typer.Option(
        "--graphs",
        metavar="SIZES",
        help="On a GPU: batch sizes for which CUDA graphs are captured, such as 1,2,4; a larger batch runs without one. "
        "`none`: no graphs.",
    ),
]
Overlap = Annotated[
    bool | None,
    typer.Option("--overlap/--no-overlap", help="The release's overlap scheduler: by default on on a GPU, off on a CPU."),
]
Ranks = Annotated[
    int, typer.Option("--tp", min=1, help="Tensor parallelism: ranks that share the work, a GPU each; every one is judged.")
]
DataType = Annotated[
    Literal["float32", "bfloat16"],
    typer.Option("--dtype", help="What the worker computes in. bfloat16 is what users run; some choices are ties then."),
]
AttentionBackend = Annotated[
    Literal["triton", "fa3"],
    typer.Option(
        "--attention",
        help="SGLang's attention backend. fa3, FlashAttention 3, needs --device cuda and --dtype bfloat16, on a Hopper GPU.",
    ),
]
DEFAULT_GRAPHS = "1,2,4"
RulesOff = Annotated[list[str] | None, typer.Option("--without", metavar="RULE", help="Switch a rule off. Repeatable.")]
DEFAULT_RUNS = Path("eagletwin-runs")
STEP_SECONDS, CASE_SECONDS = 120.0, 900.0


def tell(text: str) -> None:
    """Progress: to stderr, as it comes."""
    print(text, file=sys.stderr, flush=True)


def mode_of(
    device: str,
    graphs: str,
    overlap: bool | None,
    tp: int = 1,
    dtype: "Dtype" = "float32",
    attention: "Attention" = "triton",
) -> "Mode":
    """How the worker is to be driven. Raises InputError for sizes that are none, for attention or ranks that cannot be, and for
    a GPU that is not there."""
    from .engines.mode import Mode

    check_attention(attention, device, dtype)
    check_ranks(tp)
    if device == "cpu":
        return Mode(overlap=bool(overlap), tp=tp, dtype=dtype)
    sizes = () if graphs == "none" else tuple(sorted({int(size) for size in graphs.split(",") if size.isdigit() and int(size)}))
    if graphs != "none" and (not sizes or ",".join(map(str, sizes)) != graphs):
        raise InputError(
            f"--graphs {graphs}: no ascending list of batch sizes",
            consequence="nothing was run",
            remedy="give sizes such as 1,2,4, or none",
        )
    must_have_cuda(tp, attention)
    return Mode(device="cuda", graphs=sizes, overlap=overlap is not False, tp=tp, dtype=dtype, attention=attention)


def check_attention(attention: "Attention", device: str, dtype: "Dtype") -> None:
    """Raises InputError for FlashAttention where it cannot run: its kernels are a GPU's, and know 16 bits and less."""
    if attention == "fa3" and (device != "cuda" or dtype != "bfloat16"):
        asked = "--device cpu" if device != "cuda" else f"--dtype {dtype}"
        raise InputError(
            f"--attention fa3 with {asked}: FlashAttention's kernels run on a GPU, and know no float32",
            consequence="nothing was run",
            remedy="give --device cuda --dtype bfloat16, or leave --attention out: Triton's runs everywhere",
        )


def check_ranks(tp: int) -> None:
    """Raises InputError for ranks among which no model's KV heads can be shared out."""
    from .models.recipes import RECIPES

    heads = {recipe.kv_heads for recipe in RECIPES.values()}
    if all(number % tp for number in heads):
        possible = [str(ranks) for ranks in range(1, max(heads) + 1) if any(number % ranks == 0 for number in heads)]
        raise InputError(
            f"--tp {tp}: each rank has equally many KV heads, and eagletwin's models have {max(heads)} to share out",
            consequence="nothing was run; the limit is eagletwin's, whose models are tiny, and not SGLang's",
            remedy=f"use --tp {' or '.join(possible)}",
        )


def must_have_cuda(gpus: int = 1, attention: "Attention" = "triton") -> None:
    """Raises InputError that says what the CUDA engine lacks here."""
    from .doctor import missing_for_cuda

    missing = missing_for_cuda(gpus, attention)
    if missing:
        raise InputError(
            missing[0], consequence="nothing was run: a CUDA engine needs it", remedy=f"{missing[1]} (docs/gpu/README.md)"
        )


def held_fields(**asked: str | int | None) -> dict[str, str | int]:
    """What all generated cases are to have: fields of cases.strategies.Focus. Raises InputError for what is never drawn."""
    from eagletwin.cases.strategies import VALUES

    held = {name: value for name, value in asked.items() if value is not None}
    for name, value in held.items():
        if value not in VALUES[name]:
            raise InputError(
                f"no case is generated with {name} {value}",
                consequence="nothing was run",
                remedy=f"use one of {', '.join(map(str, VALUES[name]))}, or write the case yourself (docs/case.md)",
            )
    return held


def patches_of(revert: list[str] | None, remedy: list[str] | None, patch: list[Path] | None) -> "tuple[Patch, ...]":
    from .patch import read_patch

    def refused(name: str, what: str, remedy: str) -> InputError:
        return InputError(f"entry {name} has no {what}", consequence="nothing was run", remedy=remedy)

    patches: list[Patch] = []
    for entry in (entry for name in revert or () for entry in entries_of(name)):
        if entry.revert is None:
            live = f"it is live: `eagletwin check {entry.id}` shows it as the release is, `prove {entry.id}` both sides"
            raise refused(entry.id, "fix that could be undone", live)
        patches.append(entry.revert)
    for entry in (entry for name in remedy or () for entry in entries_of(name)):
        if entry.remedy is None:
            raise refused(entry.id, "candidate fix", f"`eagletwin prove {entry.id}` shows both sides of it")
        patches.append(entry.remedy)
    return (*patches, *(read_patch(file) for file in patch or ()))


def change_words(
    revert: list[str] | None, remedy: list[str] | None, patch: list[Path] | None, without: list[str] | None
) -> list[str]:
    """The options that change what is run or judged, as they were typed."""
    words = [word for number in revert or () for word in ("--revert", number)]
    words += [word for name in remedy or () for word in ("--remedy", name)]
    words += [word for file in patch or () for word in ("--patch", str(file))]
    return words + [word for rule in without or () for word in ("--without", rule)]


def unusual_words(*options: tuple[str, object, object]) -> list[str]:
    """Options (name, value, default) that were not left at their default, as they were typed."""
    return [word for name, value, usual in options if value != usual for word in (name, str(value))]


def rules_off(names: list[str] | None) -> frozenset[str]:
    """Rules to switch off. What happens to the engine or a kernel itself is not a comparison, and cannot be."""
    from .verdict import RULES

    known = [rule for rule in RULES if not rule.startswith(("engine.", "kernel."))]
    for name in names or ():
        if name not in known:
            raise InputError(
                f"{name!r} is not a rule that can be switched off",
                consequence="nothing was run",
                remedy=f"use some of {', '.join(known)}",
            )
    return frozenset(names or ())


def entry_of(name: str) -> "Entry":
    """The entry of this id. Raises InputError: there is none, or there are several whose id begins so."""
    found = entries_of(name)
    if len(found) > 1:
        raise InputError(
            f"{name} has several entries",
            consequence="nothing was run",
            remedy=f"use one of {', '.join(entry.id for entry in found)}",
        )
    return found[0]


def entries_of(name: str) -> "list[Entry]":
    """The entry of this id, or all whose id begins with these words. Raises InputError if there is none."""
    from eagletwin.cases.regressions import LEDGER

    found = _matching(name)
    if not found:
        raise InputError(
            f"the ledger has no entry {name!r}", consequence="nothing was run", remedy=f"use one of {', '.join(LEDGER)}"
        )
    return found


def _matching(name: str) -> "list[Entry]":
    """The entry of this id, or all whose id begins with these words; none, if there is none."""
    from eagletwin.cases.regressions import LEDGER

    name = name.removeprefix("#")
    return [entry for entry in LEDGER.values() if entry.id == name or entry.id.startswith(f"{name}-")]


def ledger_of(names: list[str]) -> "list[Entry]":
    """The entries of these names; of `all`, the whole ledger. Raises InputError."""
    from eagletwin.cases.regressions import LEDGER

    return list(LEDGER.values()) if "all" in names else [entry for name in names for entry in entries_of(name)]


def rule_of(name: str) -> str:
    """A rule by its name. Raises InputError."""
    from .verdict import RULES

    if name not in RULES:
        raise InputError(
            f"{name!r} is no rule", consequence="nothing was run", remedy=f"use one of {', '.join(RULES)} (docs/rules.md)"
        )
    return name


def with_probes(names: list[str]) -> "list[Entry | Probe]":
    """The same with what is no case but a call of a single function, which only whole releases are asked."""
    from .probes import PROBES

    probes = PROBES.values() if "all" in names else [PROBES[name] for name in names if name in PROBES]
    return [*ledger_of([name for name in names if name not in PROBES]), *probes]


def case_of(name: str) -> "Case":
    """The case in this file, or of this entry. Raises InputError."""
    from .case import read_case

    entry = entry_named(name)
    return entry.case if entry is not None else read_case(Path(name))


def entry_named(name: str) -> "Entry | None":
    """The entry that is meant by the name of a case; None: it is a file. Raises InputError."""
    if Path(name).exists() or not (name.removeprefix("#").isdigit() or _matching(name)):
        return None
    return entry_of(name)  # says which entries there are
