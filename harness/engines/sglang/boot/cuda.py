"""What is different where the worker runs on a GPU: absent packages, layers without a float32 kernel, CUDA graphs.

Called by boot.py. On a CPU nothing here does anything.
"""

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from eagletwin.harness.core.patch import Edit
from eagletwin.harness.core.run_spec import Mode
from eagletwin.harness.engines.inside import changes, patches
from eagletwin.harness.engines.inside.blame import NotDriven

from ..graphs import install
from ..stand_ins import stubs
from ..taps.inner import CAPTURES, CHOICES

# Packages of a whole installation of SGLang that no case calls, and that a host may lack. Where one is there, it is used.
_SPARE: tuple[str, ...] = (
    *("IPython", "aiohttp", "compressed_tensors", "deep_gemm", "fastapi", "flashinfer", "gguf"),
    *("flash_mla", "torchaudio", "torchcodec", "torchvision", "uvicorn", "xgrammar"),
)

# Layers whose CUDA kernels know no float32 (norms have flashinfer's for other types). Their own code in torch runs instead.
_NATIVE = (
    *(("sglang.srt.layers.layernorm", name) for name in ("RMSNorm", "GemmaRMSNorm")),
    ("sglang.srt.layers.activation", "SiluAndMul"),
)


def prepare(shims: list[str], mode: Mode) -> None:
    """Before SGLang is imported."""
    changes.watch_graphs(torch.cuda.CUDAGraph)
    CHOICES.watch(torch.cuda.CUDAGraph)
    missing = absent(*_SPARE)
    stubs.install(gpu=missing)
    _leave_models_out()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False  # float32 is compared with float64
    for module, name in _NATIVE if mode.dtype == "float32" else ():
        layer = getattr(importlib.import_module(module), name)
        layer.forward_cuda = layer.forward_native
        shims.append(f"{module}.{name}.forward_cuda = forward_native")
    shims.append("TF32 is off; torch.compile is off")
    if "flashinfer" in missing:  # sgl_kernel would call the stub; it has kernels of its own to use instead
        for module in ("sgl_kernel.sampling", "sgl_kernel.elementwise"):
            importlib.import_module(module)._has_flashinfer = False  # type: ignore[attr-defined]
        shims.append("sgl_kernel.sampling: its own top_k and top_p kernels, as flashinfer is absent")
        shims.append("sgl_kernel.elementwise: its own norms, as flashinfer is absent")
    if mode.processes > 1:  # engines share GPUs here, and SGLang would not start where one rank's has less memory left
        os.environ["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "false"
        shims.append("the check that GPUs of several ranks have as much memory left is off")
    if mode.attention == "fa3":
        importlib.import_module("sgl_kernel.flash_ops")  # here it says why it cannot be loaded; sgl_kernel.flash_attn does not


def refuse(mode: Mode) -> None:
    """Raises NotDriven where ranks lack a GPU: a case says how many it has, and options do not know."""
    if mode.processes > 1 and (seen := torch.cuda.device_count()) < mode.processes:
        raise NotDriven(f"{mode.processes} ranks need a GPU each, and torch sees {seen}")


def absent(*names: str) -> tuple[str, ...]:
    """Packages of these names that are not installed; names of submodules are left out."""
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
        backend = {"cuda_graph_backend_prefill": "breakable"} if mode.device == "cpu" else {}  # what SGLang has on CUDA
        return (
            sizes
            | backend
            | {
                "cuda_graph_bs_prefill": list(mode.prefill_graphs),
                "cuda_graph_max_bs_prefill": max(mode.prefill_graphs),
            }
        )
    return sizes | {"disable_prefill_cuda_graph": True}


def captured_batch_sizes(scheduler: Any) -> tuple[int, ...]:
    """The batch sizes for which the target's verify was captured; none without graphs."""
    runner = getattr(scheduler.tp_worker.model_runner, "decode_cuda_graph_runner", None)
    return tuple(sorted(getattr(runner, "capture_bs", None) or ()))


@contextlib.contextmanager
def watch_captures(mode: Mode, *, frozen: bool, indexed: bool) -> Iterator[None]:
    """While a scheduler is built: note what its graphs hold. frozen: its draft reads the target's rows, and so has a worker of
    its own; indexed: indexers choose rows."""
    if not mode.graphs:
        yield
        return
    if mode.device == "cpu":
        with install.captures(frozen=frozen), _choices_to(install.note_choice, indexed=indexed):
            yield
        return
    worker = "frozen_kv_mtp_worker_v2" if frozen else "eagle_worker_v2"
    drafting: Any = importlib.import_module(f"sglang.srt.speculative.{worker}")
    original = drafting.select_top_k_tokens

    def capture(step: int, *args: Any, **kwargs: Any) -> Any:
        result = original(step, *args, **kwargs)
        CAPTURES.note(step, result)
        return result

    drafting.select_top_k_tokens = capture
    with _choices_to(CHOICES.note, indexed=indexed):
        try:
            yield
        finally:
            drafting.select_top_k_tokens = original


@contextlib.contextmanager
def _choices_to(note: Callable[[Tensor | None], None], *, indexed: bool) -> Iterator[None]:
    """While it lasts, `note` is called with what each indexer returns."""
    if not indexed:
        yield
        return
    indexer: Any = importlib.import_module("sglang.srt.layers.attention.dsa.dsa_indexer").Indexer
    original = indexer.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        note(result)
        return result

    with patch.object(indexer, "forward", forward):
        yield


# Experts in float32 on a GPU, for which SGLang's kernels are not written: what is changed so that they compute in float32.
#
# A served model has bfloat16, and nothing is changed for it. boot.py does it once a family's model classes are imported.

_FUSED = "sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe._fused_moe_kernel_sequence"
_NEXTN = "sglang.srt.models.deepseek_nextn"


def compute_experts_in_float32(shims: list[str]) -> None:
    """Change them, once in a process. Raises PatchFailed where a release has other code."""
    if any(_FUSED in shim for shim in shims):
        return
    # any type but bfloat16 is multiplied in float32 and then rounded to float16
    patches.rewrite(
        Edit(
            target=_FUSED,
            match="compute_type = tl.bfloat16 if hidden_states.dtype == torch.bfloat16 else tl.float16",
            replacement="compute_type = {torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}"
            ".get(hidden_states.dtype, tl.float16)",
        )
    )
    shims.append(f"{_FUSED}: products of experts in float32 stay float32, and are not rounded to float16")
    nextn = sys.modules.get(_NEXTN)
    if nextn is not None and hasattr(nextn, "fused_eh_norm"):
        nextn._is_cuda = False  # type: ignore[attr-defined]
        shims.append(f"{_NEXTN}: two norms and a concatenation in place of fused_eh_norm, which knows no float32")


# Layers that keep a state, in float32 on a GPU: what is changed so that SGLang's models compute in float32.
#
# The kernels of the gated delta rule's chunked prefill are compiled for any type; a check in front of them admits 16 bits
# alone, and one of them merges its blocks in TF32. A scan (Mamba-2) needs nothing. Of Qwen3.5 one kernel has the norms, the
# rotation and the gate of its attention, and rounds to bfloat16 whatever it is given: SGLang's own layers run in its place.

_RULE = "sglang.kernels.ops.attention.fla.chunk.chunk_gated_delta_rule"
_QWEN = "sglang.srt.models.qwen3_5"
_PREPARE = f"{_QWEN}.Qwen3_5AttentionDecoderLayer._prepare_qkv_gate"
_MERGE, _PRECISION = "sglang.kernels.ops.attention.fla.chunk_fwd", "_MERGE_DOT_PRECISION"


def compute_states_in_float32(shims: list[str]) -> None:
    """Change them, once in a process. Raises PatchFailed and ModuleNotFoundError where a release has other code."""
    if any(_RULE in shim for shim in shims):
        return
    from triton import language

    patches.rewrite(Edit(target=_RULE, match="assert q.dtype != torch.float32, (", replacement="assert True, ("))
    shims.append(f"{_RULE}: its kernels take float32 too")
    merge: Any = importlib.import_module(_MERGE)
    setattr(merge, _PRECISION, language.constexpr("ieee"))
    shims.append(f"{_MERGE}.{_PRECISION}: float32, where it is TF32")


def rotate_in_float32(shims: list[str]) -> None:
    """Change Qwen3.5's attention where it is imported, once in a process. Raises PatchFailed where a release has other code."""
    if _QWEN not in sys.modules or any(_PREPARE in shim for shim in shims):
        return
    patches.rewrite(Edit(target=_PREPARE, match="if _is_cuda and self.attn_output_gate:", replacement="if False:"))
    shims.append(f"{_PREPARE}: norms, rotation and gate by SGLang's own layers, in place of a kernel that rounds to bfloat16")
