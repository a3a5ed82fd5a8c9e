"""What is different where the worker runs on a GPU: packages that may be absent, layers without a float32 kernel, CUDA graphs.

Called by boot.py; taps.py reads CAPTURES. On a CPU nothing here does anything.
"""

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagletwin.harness.engines.mode import Mode
from eagletwin.harness.slot_runs import Array
from eagletwin.harness.trace import snapshot

from . import stubs

# Packages of a whole installation of SGLang that no case calls, and that a host may lack. Where one is there, it is used.
_SPARE: tuple[str, ...] = (
    *("IPython", "aiohttp", "compressed_tensors", "deep_gemm", "fastapi", "flashinfer", "gguf"),
    *("torchaudio", "torchcodec", "torchvision", "uvicorn", "xgrammar"),
)

# Layers whose CUDA kernels know no float32 (RMSNorm's are flashinfer's for other types). Their own code in torch runs instead.
_NATIVE = (("sglang.srt.layers.layernorm", "RMSNorm"), ("sglang.srt.layers.activation", "SiluAndMul"))


def prepare(shims: list[str], mode: Mode) -> None:
    """Before SGLang is imported."""
    missing = absent(*_SPARE)
    stubs.install(gpu=missing)
    _leave_models_out()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False  # float32 is compared with float64
    for module, name in _NATIVE if mode.dtype == "float32" else ():
        layer = getattr(importlib.import_module(module), name)
        layer.forward_cuda = layer.forward_native
        shims.append(f"{module}.{name}.forward_cuda = forward_native")
    shims.append("TF32 is off; torch.compile is off")
    if "flashinfer" in missing:  # sgl_kernel would call the stub; it has kernels of its own for where there is none
        for module in ("sgl_kernel.sampling", "sgl_kernel.elementwise"):
            importlib.import_module(module)._has_flashinfer = False  # type: ignore[attr-defined]
        shims.append("sgl_kernel.sampling: its own top_k and top_p kernels, as flashinfer is absent")
        shims.append("sgl_kernel.elementwise: its own norms, as flashinfer is absent")
    if mode.attention == "fa3":
        importlib.import_module("sgl_kernel.flash_ops")  # here it says why it cannot be loaded; sgl_kernel.flash_attn does not


def absent(*names: str) -> tuple[str, ...]:
    """Those packages of these names that are not installed; parts of packages are none."""
    return tuple(name for name in names if "." not in name and importlib.util.find_spec(name) is None)


def _leave_models_out() -> None:
    """Have SGLang's registry import no models but Llama's: the others take seconds, and some need packages of their own."""
    found = importlib.util.find_spec("sglang")
    assert found is not None
    assert found.submodule_search_locations
    files = Path(found.submodule_search_locations[0], "srt", "models").glob("*.py")
    os.environ["SGLANG_DISABLED_MODEL_ARCHS"] = ",".join(
        sorted(file.stem for file in files if not file.stem.startswith("llama"))
    )


def graph_arguments(mode: Mode) -> dict[str, Any]:
    """ServerArgs of the graphs. Those of prefill are the mode's own choice; SGLang captures them for token counts."""
    if not mode.graphs:
        return {"disable_cuda_graph": True}
    sizes = {"cuda_graph_bs_decode": list(mode.graphs), "cuda_graph_max_bs_decode": max(mode.graphs)}
    if mode.prefill_graphs:
        return sizes | {
            "cuda_graph_bs_prefill": list(mode.prefill_graphs),
            "cuda_graph_max_bs_prefill": max(mode.prefill_graphs),
        }
    return sizes | {"disable_prefill_cuda_graph": True}


def captured(scheduler: Any) -> tuple[int, ...]:
    """The batch sizes for which the target's verify was captured; none without graphs."""
    runner = getattr(scheduler.tp_worker.model_runner, "decode_cuda_graph_runner", None)
    return tuple(sorted(getattr(runner, "capture_bs", None) or ()))


class Captures:
    """What draft decode of a tree holds between its steps, in the graph of each batch size.

    Tensors that Python refers to are not reused by the allocator of a graph, nor by that of a later one in the same pool. So
    what select_top_k_tokens returned while a graph was captured is where each replay of it writes the same values again. The
    graph itself is not changed; only its memory is reused less.
    """

    def __init__(self) -> None:
        self._steps: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}  # batch size -> per step: tokens, scores, frontier

    def note(self, step: int, result: Any) -> None:
        """select_top_k_tokens of this step returned this. Warm-up runs, before a capture, are of no use."""
        if not torch.cuda.is_current_stream_capturing():
            return
        frontier, (scores, tokens, _) = result[0], result[3]
        if step == 0:
            self._steps[tokens.shape[0]] = []
        self._steps[tokens.shape[0]].append((tokens, scores, frontier))

    def read(self, size: int, count: int, topk: int) -> tuple[list[tuple[Array, Array]], Array]:
        """After the graph of this batch size ran for `count` requests: all candidates of each step, (tokens, scores)
        [count, ..], and the tokens that went on [count, (S - 1) * topk]."""
        steps = self._steps[size]
        candidates = [
            (snapshot(tokens[:count]).reshape(count, -1), snapshot(scores[:count]).reshape(count, -1))
            for tokens, scores, _ in steps
        ]
        return candidates, np.concatenate([snapshot(frontier).reshape(size, topk)[:count] for _, _, frontier in steps[:-1]], 1)


CAPTURES = Captures()


@contextlib.contextmanager
def watch_captures(mode: Mode) -> Iterator[None]:
    """While a scheduler is built: note what its graphs hold."""
    if not mode.graphs:
        yield
        return
    drafting: Any = importlib.import_module("sglang.srt.speculative.eagle_worker_v2")
    original = drafting.select_top_k_tokens

    def noted(step: int, *args: Any, **kwargs: Any) -> Any:
        result = original(step, *args, **kwargs)
        CAPTURES.note(step, result)
        return result

    drafting.select_top_k_tokens = noted
    try:
        yield
    finally:
        drafting.select_top_k_tokens = original
