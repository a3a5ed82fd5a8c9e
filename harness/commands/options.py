"""What commands share: panels of --help, a line of progress, and how options become a mode."""

import os
import sys
from pathlib import Path

from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.run_spec import Attention, Dtype, Kernels, Mode

# Panels of --help. The options of one command alone are in panels of its own, or in "Options".
ENGINE, JUDGE, OUTPUT = "Engine: what runs", "Judge", "Output and limits"

DEFAULT_GRAPHS = None  # GRAPHS on a GPU, none on a CPU
GRAPHS = "1,2,4"
DEFAULT_RUNS = Path("eagletwin-runs")


def log_progress(text: str) -> None:
    """Progress: to stderr, as it comes."""
    print(text, file=sys.stderr, flush=True)


def nothing_run(cause: str, remedy: str) -> InputError:
    """The error of what was typed and cannot be run."""
    return InputError(cause, consequence="nothing was run", remedy=remedy)


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
        raise nothing_run(
            f"--prefill-graphs {prefill_graphs} with --graphs none: SGLang captures both, or neither", "leave one of them out"
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
        raise nothing_run(f"{option} {given}: not an ascending list of {what}", f"give sizes such as {such}, or none")
    return sizes


def check_attention(attention: Attention, device: str, dtype: Dtype) -> None:
    """Raises InputError for kernels of attention where they cannot run: a GPU's, which know 16 bits and less."""
    if attention != "triton" and (device != "cuda" or dtype != "bfloat16"):
        asked = "--device cpu" if device != "cuda" else f"--dtype {dtype}"
        raise nothing_run(
            f"--attention {attention} with {asked}: its kernels run on a GPU, and know no float32",
            "give --device cuda --dtype bfloat16, or leave --attention out: the Triton backend runs everywhere",
        )


def check_kernels(kernels: Kernels, mode: Mode) -> None:
    """Raises InputError for a kernel runtime that would not run, or not with this type."""
    if mode.device == "cuda" and kernels != "fast":
        raise nothing_run(
            f"--kernels {kernels} with --device cuda: on a GPU Triton compiles the kernels, and no runtime of eagletwin's runs",
            "leave --kernels out, or use --device cpu",
        )
    if mode.dtype == "bfloat16" and kernels in ("interpreter", "shadow"):
        raise nothing_run(
            f"--kernels {kernels} with --dtype bfloat16: Triton's interpreter computes with the bits of bfloat16 as if they "
            "were integers",
            "use --kernels fast or checked",
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
        raise nothing_run(
            f"--pp {pp} with {beside}: pipelines are driven on a CPU, of one rank a stage, without overlap",
            f"leave {beside.partition(' ')[0]} or --pp out",
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
