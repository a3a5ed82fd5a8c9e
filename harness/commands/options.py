"""What the commands of the command line share: their options, and how what was typed becomes cases, patches and rules."""

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.files import check_writable
from eagletwin.harness.core.run_spec import Attention, Dtype, Kernels, Mode
from eagletwin.harness.core.verdict import View

# Panels of --help. The options of one command alone are in panels of its own, or in "Options".
ENGINE, JUDGE, OUTPUT = "Engine: what runs", "Judge", "Output and limits"

Runs = Annotated[
    Path,
    typer.Option(
        "--out",
        metavar="FOLDER",
        callback=check_writable,
        rich_help_panel=OUTPUT,
        help="Folder for run folders. Nothing is overwritten.",
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", rich_help_panel=OUTPUT, help="Print the whole report.")]
StepSeconds = Annotated[
    float,
    typer.Option(
        "--step-timeout",
        metavar="SECONDS",
        min=0.1,
        rich_help_panel=OUTPUT,
        help="Time limit for one stage of one scheduler iteration.",
    ),
]
CaseSeconds = Annotated[
    float,
    typer.Option(
        "--case-timeout",
        metavar="SECONDS",
        min=0.1,
        rich_help_panel=OUTPUT,
        help="Time limit for a whole case.",
    ),
]
KernelRuntime = Annotated[
    Kernels,
    typer.Option(
        "--kernels",
        metavar="RUNTIME",
        rich_help_panel=ENGINE,
        help="The runtime of Triton kernels on a CPU. `fast`: the runtime of eagletwin. `interpreter`: Triton's own. "
        "`shadow`: both, compared launch by launch. `checked`: the fast runtime runs each launch three times, to find "
        "undefined values and races.",
    ),
]
Reverts = Annotated[
    list[str] | None,
    typer.Option("--revert", metavar="PR", rich_help_panel=ENGINE, help="Undo this fix of the ledger, in memory. Repeatable."),
]
Remedies = Annotated[
    list[str] | None,
    typer.Option(
        "--remedy",
        metavar="ENTRY",
        rich_help_panel=ENGINE,
        help="Apply the candidate fix of a live bug, in memory. Repeatable.",
    ),
]
Views = Annotated[
    View,
    typer.Option(
        "--view",
        metavar="VIEW",
        rich_help_panel=JUDGE,
        help="How to judge three known deviations of SGLang. `slot_layout`, `last_fed`: accept two approximations. "
        "`true_tree`: report a node of a draft tree that attends to anything but its own ancestors (ledger entry 8409). "
        "`committed`: report a row of a multi-layer draft that did not consume the committed token (entry boundary-kv). "
        "`shifted`: accept that a plain draft model is run on x[1..] (entry standalone-shift).",
    ),
]
PatchFiles = Annotated[
    list[Path] | None,
    typer.Option(
        "--patch",
        metavar="FILE",
        rich_help_panel=ENGINE,
        help="Apply this diff or these edits (JSON), without changing the installed release. Repeatable.",
    ),
]
Sglang = Annotated[
    str,
    typer.Option(
        "--sglang",
        metavar="RELEASE|PATH",
        rich_help_panel=ENGINE,
        help="Run this SGLang: a published release, or a source tree. Default: the installed one.",
        show_default=False,
    ),
]
Device = Annotated[
    Literal["cpu", "cuda"],
    typer.Option("--device", metavar="DEVICE", rich_help_panel=ENGINE, help="Where the worker runs: `cpu` or `cuda`."),
]
Graphs = Annotated[
    str | None,
    typer.Option(
        "--graphs",
        metavar="SIZES",
        rich_help_panel=ENGINE,
        help="On a GPU: batch sizes for which CUDA graphs are captured, by default 1,2,4. A larger batch runs without a graph. "
        "`none`: no graphs.",
        show_default=False,
    ),
]
PrefillGraphs = Annotated[
    str | None,
    typer.Option(
        "--prefill-graphs",
        metavar="SIZES",
        rich_help_panel=ENGINE,
        help="On a GPU: token counts, such as 16,64, for which graphs of prefill are captured too. Default: none.",
        show_default=False,
    ),
]
Overlap = Annotated[
    bool | None,
    typer.Option(
        "--overlap/--no-overlap",
        rich_help_panel=ENGINE,
        help="The release's overlap scheduler. Default: on for a GPU, off for a CPU.",
    ),
]
Ranks = Annotated[
    int,
    typer.Option(
        "--tp",
        metavar="N",
        min=1,
        rich_help_panel=ENGINE,
        help="Ranks of tensor parallelism, a GPU each. Every rank is judged.",
    ),
]
Stages = Annotated[
    int,
    typer.Option(
        "--pp",
        metavar="N",
        min=1,
        rich_help_panel=ENGINE,
        help="Stages of pipeline parallelism, on a CPU: a process each. The last one, which drafts and verifies, is judged.",
    ),
]
DataType = Annotated[
    Dtype,
    typer.Option(
        "--dtype",
        metavar="TYPE",
        rich_help_panel=ENGINE,
        help="Data type of the worker: `float32`, or `bfloat16`: the type of production, in which more choices are ties.",
    ),
]
AttentionBackend = Annotated[
    Attention,
    typer.Option(
        "--attention",
        metavar="BACKEND",
        rich_help_panel=ENGINE,
        help="SGLang's attention backend: `triton`, or, with --device cuda and --dtype bfloat16, `fa3` (FlashAttention 3, on a "
        "Hopper GPU), `flashinfer` (for models with heads of 64 and more, such as llama-wide) or `flashmla` (for chains of "
        "models with latent attention, in pages of 64).",
    ),
]
DEFAULT_GRAPHS = None  # GRAPHS on a GPU, none on a CPU
GRAPHS = "1,2,4"
RulesOff = Annotated[
    list[str] | None,
    typer.Option("--without", metavar="RULE", rich_help_panel=JUDGE, help="Switch a rule off. Repeatable."),
]
DEFAULT_RUNS = Path("eagletwin-runs")


def log_progress(text: str) -> None:
    """Progress: to stderr, as it comes."""
    print(text, file=sys.stderr, flush=True)


def let_threads_sleep() -> None:
    """Call this before torch is imported, which reads the variable: its threads then sleep while they wait for each other.

    They meet hundreds of times in a forward of a small model. Threads that wait busily burn a core each, and take five times as
    long where other programs run too.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def mode_of(
    device: str,
    graphs: str | None,
    overlap: bool | None,
    tp: int = 1,
    dtype: Dtype = "float32",
    attention: Attention = "triton",
    prefill_graphs: str | None = None,
    pp: int = 1,
) -> Mode:
    """How the worker is to be driven. Raises InputError for invalid sizes, for attention or ranks that cannot run, and for a
    missing GPU."""
    check_attention(attention, device, dtype)
    check_ranks(tp)
    check_stages(pp, device, tp, overlap=bool(overlap))
    usual = GRAPHS if device == "cuda" else "none"
    sizes = _sizes("--graphs", usual if graphs is None else graphs, "batch sizes", "1,2,4")
    prefill = _sizes("--prefill-graphs", prefill_graphs or "none", "token counts", "16,64")
    if prefill and not sizes:
        raise InputError(
            f"--prefill-graphs {prefill_graphs} with --graphs none: SGLang captures both, or neither",
            consequence="nothing was run",
            remedy="leave one of them out",
        )
    if device == "cpu":
        return Mode(graphs=sizes, prefill_graphs=prefill, overlap=bool(overlap), tp=tp, dtype=dtype, pp=pp)
    must_have_cuda(tp, attention)
    return Mode(
        device="cuda",
        graphs=sizes,
        prefill_graphs=prefill,
        overlap=overlap is not False,
        tp=tp,
        dtype=dtype,
        attention=attention,
    )


def _sizes(option: str, given: str, what: str, such: str) -> tuple[int, ...]:
    """For what graphs are captured: an ascending list, or `none`. Raises InputError."""
    if given == "none":
        return ()
    sizes = tuple(sorted({int(size) for size in given.split(",") if size.isdigit() and int(size)}))
    if not sizes or ",".join(map(str, sizes)) != given:
        raise InputError(
            f"{option} {given}: not an ascending list of {what}",
            consequence="nothing was run",
            remedy=f"give sizes such as {such}, or none",
        )
    return sizes


def check_attention(attention: Attention, device: str, dtype: Dtype) -> None:
    """Raises InputError for kernels of attention where they cannot run: a GPU's, which know 16 bits and less."""
    if attention != "triton" and (device != "cuda" or dtype != "bfloat16"):
        asked = "--device cpu" if device != "cuda" else f"--dtype {dtype}"
        raise InputError(
            f"--attention {attention} with {asked}: its kernels run on a GPU, and know no float32",
            consequence="nothing was run",
            remedy="give --device cuda --dtype bfloat16, or leave --attention out: the Triton backend runs everywhere",
        )


def check_kernels(kernels: Kernels, mode: Mode) -> None:
    """Raises InputError for a kernel runtime that would not run, or not with this type."""
    if mode.device == "cuda" and kernels != "fast":
        raise InputError(
            f"--kernels {kernels} with --device cuda: on a GPU Triton compiles the kernels, and no runtime of eagletwin's runs",
            consequence="nothing was run",
            remedy="leave --kernels out, or use --device cpu",
        )
    if mode.dtype == "bfloat16" and kernels in ("interpreter", "shadow"):
        raise InputError(
            f"--kernels {kernels} with --dtype bfloat16: Triton's interpreter computes with the bits of bfloat16 as if they "
            "were integers",
            consequence="nothing was run",
            remedy="use --kernels fast or checked",
        )


def check_ranks(tp: int) -> None:
    """Raises InputError for ranks among which no model's KV heads can be shared out."""
    from eagletwin.harness.families import RECIPES

    heads = {recipe.kv_heads for recipe in RECIPES.values()}
    if all(number % tp for number in heads):
        possible = [str(ranks) for ranks in range(1, max(heads) + 1) if any(number % ranks == 0 for number in heads)]
        raise InputError(
            f"--tp {tp}: KV heads are divided evenly among ranks, and eagletwin's models have {max(heads)}",
            consequence="nothing was run; the limit is eagletwin's, whose models are tiny, and not SGLang's",
            remedy=f"use --tp {' or '.join(possible)}",
        )


def check_stages(pp: int, device: str, tp: int, *, overlap: bool) -> None:
    """Raises InputError for a pipeline beside what it is not driven with."""
    if pp == 1:
        return
    beside = "--device cuda" if device == "cuda" else f"--tp {tp}" if tp > 1 else "--overlap" if overlap else ""
    if beside:
        raise InputError(
            f"--pp {pp} with {beside}: pipelines are driven on a CPU, of one rank a stage, without overlap",
            consequence="nothing was run",
            remedy=f"leave {beside.partition(' ')[0]} or --pp out",
        )
    from eagletwin.harness.families import RECIPES

    most = max(recipe.target.num_layers for recipe in RECIPES.values())
    if pp > most:
        raise InputError(
            f"--pp {pp}: each stage has a layer of the target, and eagletwin's models have {most} at most",
            consequence="nothing was run; the limit is eagletwin's, whose models are tiny, and not SGLang's",
            remedy=f"use --pp {most} or less",
        )


def must_have_cuda(gpus: int = 1, attention: Attention = "triton") -> None:
    """Raises InputError that says what the CUDA engine lacks here."""
    from eagletwin.harness.engines.machine import missing_for_cuda

    missing = missing_for_cuda(gpus, attention)
    if missing:
        raise InputError(
            missing[0], consequence="nothing was run: a CUDA engine needs it", remedy=f"{missing[1]} (docs/guide/gpu.md)"
        )
