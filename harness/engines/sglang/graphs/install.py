"""Have the scheduler of a CPU engine capture and replay its graphs: tapes stand in for CUDA's, and SGLang's gates are open."""

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Protocol
from unittest.mock import patch

import torch
from torch import Tensor

from eagletwin.harness.core.patch import Edit
from eagletwin.harness.core.run_spec import Mode
from eagletwin.harness.engines.inside import changes, patches
from eagletwin.harness.engines.inside.blame import NotDriven, hand_on

from ..compat import attention
from . import tape
from .streams import stored_to

_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_SETUP = "sglang.srt.model_executor.model_runner_components.cuda_graph_setup.capture_decode_graph"
_DRAFT = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker._capture_cuda_graphs"
_FROZEN = "sglang.srt.speculative.frozen_kv_mtp_worker_v2"
# Where SGLang asks for the device before it captures or replays. A release that lacks one of these is not driven with graphs.
GATES = (
    Edit(target=_SETUP, match='model_runner.device != "cpu" and check_cuda', replacement="check_cuda"),
    Edit(
        target=_SETUP,
        match='model_runner.device == "cpu" and not get_flags().capture.enable_torch_compile',
        replacement="False",
    ),
    Edit(target=_SETUP, match='"cpu": CPUGraphRunner', replacement='"cpu": model_runner._decode_cuda_graph_runner_cls()'),
    Edit(target=f"{_RUNNER}._forward_raw", match='if self.device == "cpu"', replacement="if False"),
    Edit(
        target=_DRAFT,
        match='"cuda": EAGLEDraftCudaGraphRunner,',
        replacement='"cpu": EAGLEDraftCudaGraphRunner, "cuda": EAGLEDraftCudaGraphRunner,',
    ),
    Edit(
        target=_DRAFT,
        match='"cuda": EAGLEDraftExtendCudaGraphRunner,',
        replacement='"cpu": EAGLEDraftExtendCudaGraphRunner, "cuda": EAGLEDraftExtendCudaGraphRunner,',
    ),
    # classes of backends that are not installed here
    Edit(target=_DRAFT, match="if _is_cuda or _is_musa:", replacement="if False:"),
    Edit(target=_DRAFT, match="if _is_cuda:", replacement="if False:"),
    Edit(
        target=_DRAFT,
        match="_is_cuda or _is_musa\n    ) and graph_supported_backend",
        replacement="True) and graph_supported_backend",
    ),
)
FROZEN_GATES = (
    Edit(
        target=f"{_FROZEN}.FrozenKVMTPDraftWorker._capture_cuda_graphs",
        match='self.target_worker.device != "cuda"',
        replacement="False",
    ),
)
# Up to 0.5.22 no graph has the draft extend of a single head with FlashAttention.
FLASH_GATE = Edit(
    target=_DRAFT,
    match="if _is_cuda:\n        # FlashAttention is",
    replacement="""from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
graph_supported_backend_types.append(FlashAttentionBackend)
if _is_cuda:
    # FlashAttention is""",
)
# SGLang has two for each graph, so that kernels are loaded. The largest graph is captured first, and its warm-up writes all
# rows that those of smaller ones would.
_ONE_WARM_UP = Edit(
    target="sglang.srt.model_executor.runner_backend.full_cuda_graph_backend.FullCudaGraphBackend.capture_one",
    match="for warmup_step in range(2):",
    replacement="for warmup_step in range(not self._graphs):",
)
_TO_HOST = Edit(
    target="sglang.srt.utils.common.async_d2h",
    match='"cpu":\n        return tensor',
    replacement='"cpu":\n    return tensor.clone()',
)
_EXPERTS = "sglang.srt.layers.moe.fused_moe_native"
# Modules below sglang.srt.layers, and their classes whose forward is one kernel on a GPU, and torch's operations on a CPU.
_FUSED = {
    "layernorm": ("RMSNorm", "GemmaRMSNorm", "Gemma3RMSNorm", "Gemma4RMSNorm", "RMSNormWithoutScale"),
    "activation": ("SiluAndMul", "GeluAndMul", "ReLU2"),
    "rotary_embedding.base": ("RotaryEmbedding",),
    "attention.mamba.mixer2_rms_norm_gated": ("Mixer2RMSNormGated",),
}
_BREAKABLE = "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph.breakable_cuda_graph"


def prepare(mode: Mode, *, frozen: bool, shims: list[str]) -> None:
    """Before a scheduler that captures is built. Raises NotDriven for a release, or a tree, that has other gates."""
    changes.watch_graphs(tape.Tape)
    torch.cuda.CUDAGraph = tape.Tape  # type: ignore[assignment,misc]
    for module in (torch.cpu, torch.cuda):
        module.graph = tape.graph  # type: ignore[attr-defined]
        module.graph_pool_handle = lambda: (0, 1)  # type: ignore[attr-defined]
        module.is_current_stream_capturing = tape.capturing  # type: ignore[attr-defined]
    try:
        _open_gates(mode, frozen=frozen)
    except (patches.PatchFailed, ImportError, AttributeError) as error:
        raise NotDriven(f"CUDA graphs on a CPU: this SGLang asks for the device in another way: {error}") from error
    shims.append("freeze_gc of the graph runners: does nothing")
    shims.append("CUDA graphs: tapes of torch's operations and Triton's launches on CPU tensors; gates of capture are open")


@functools.cache
def prepare_gates(*, frozen: bool) -> None:
    """Once in the process that engines are forked from: import and compile what each would. What does not fit shows there."""
    with contextlib.suppress(patches.PatchFailed, ImportError, AttributeError):
        importlib.import_module("sglang.srt.layers.attention.deepseek_v4_backend")  # each runner asks whether it is this one
        patches.prepare_rewrites((*_gates(frozen=frozen), _ONE_WARM_UP))


def _gates(*, frozen: bool) -> tuple[Edit, ...]:
    return GATES + FROZEN_GATES if frozen else GATES


def _open_gates(mode: Mode, *, frozen: bool) -> None:
    experts: Any = importlib.import_module(_EXPERTS)
    for name in ("moe_forward_native", "fused_moe_forward_native"):  # a CPU's own experts count tokens on the host
        setattr(experts, name, tape.opaque(getattr(experts, name)))
    for name, classes in _FUSED.items():
        with contextlib.suppress(ImportError):  # an older release lacks some of them
            layers: Any = importlib.import_module(f"sglang.srt.layers.{name}")
            for one in filter(None, (getattr(layers, each, None) for each in classes)):
                one.forward_native = tape.fused(one.forward_native)
    for name in ("decode_cuda_graph_runner", "prefill_cuda_graph_runner"):  # it thaws what engines share, and takes a second
        runner: Any = importlib.import_module(f"sglang.srt.model_executor.runner.{name}")
        runner.freeze_gc = lambda _enabled: contextlib.nullcontext()
    if mode.prefill_graphs:
        runner.is_cuda = lambda: True  # another device's graph restores what eager attention of latent layers would read
        broken: Any = importlib.import_module(_BREAKABLE)
        broken._is_stream_capturing = lambda _stream: tape.capturing()
        broken.get_device_module = lambda: torch.cpu
        broken._check_cuda_bindings = lambda: None
    if mode.attention == "fa3":
        with contextlib.suppress(patches.PatchFailed):
            patches.rewrite(FLASH_GATE)
    for edit in _gates(frozen=frozen):
        patches.rewrite(edit)
    with contextlib.suppress(patches.PatchFailed):  # an older release runs it twice
        patches.rewrite(_ONE_WARM_UP)


def copy_between_host_and_device(shims: list[str]) -> None:
    """A tensor that goes to the host is a copy of what a buffer holds then, and not that buffer. Once in a process."""
    with contextlib.suppress(patches.PatchFailed):  # older releases copy by Tensor.to
        patches.rewrite(_TO_HOST)
    cpu, to = torch.Tensor.cpu, torch.Tensor.to

    def copied_to_cpu(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = hand_on(cpu, self, *args, **kwargs)
        return result.clone() if result is self else result

    def copied(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = hand_on(to, self, *args, **kwargs)
        goes = kwargs.get("non_blocking") or "cpu" in (*args[:1], kwargs.get("device"))
        return result.clone() if result is self and goes else result

    torch.Tensor.cpu, torch.Tensor.to = copied_to_cpu, copied  # type: ignore[method-assign,assignment]
    shims.append('Tensor.cpu, and Tensor.to with "cpu" or non_blocking: a copy')


@contextlib.contextmanager
def captures(*, frozen: bool) -> Iterator[None]:
    """While a scheduler is built: launches of kernels go onto tapes, and what taps want to see becomes a node."""
    runner: Any = importlib.import_module(_RUNNER.rpartition(".")[0]).ModelRunner
    routers: Any = importlib.import_module("sglang.srt.layers.moe.topk").TopK
    drafting: Any = importlib.import_module(_FROZEN if frozen else "sglang.srt.speculative.eagle_worker_v2")
    load = runner.load_model

    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = load(self, *args, **kwargs)
        if self.is_draft_worker:
            around_draft(self)
        return result

    with (
        patch.object(runner, "load_model", load_model),
        patch.object(routers, "forward", around_router(routers.forward)),
        patch.object(drafting, "select_top_k_tokens", around_select(drafting.select_top_k_tokens)),
        _launches_on_tapes(),
    ):
        yield


@contextlib.contextmanager
def _launches_on_tapes() -> Iterator[None]:
    """Whatever runs kernels here. Warm-ups see buffers as a replay does."""
    from triton.runtime.interpreter import InterpretedFunction

    capture_mode: Any = importlib.import_module("sglang.srt.model_executor.runner_utils.capture_mode")
    run = InterpretedFunction.run

    def run_or_record(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if warmup or not (tape.capturing() or capture_mode.is_capture_mode):
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)
        if callable(grid):
            named = inspect.signature(self.fn).bind_partial(*args, **{k: v for k, v in kwargs.items() if k in self.arg_names})
            named.apply_defaults()
            grid = grid(named.arguments)
        if not tape.capturing():
            return hand_on(run, self, *tape.widened(args), grid=grid, warmup=False, **tape.widened(kwargs))
        tape.launch(run, self, grid, args, kwargs, stored_to(self, args, kwargs))
        return None

    with patch.object(InterpretedFunction, "run", run_or_record):
        yield


# What taps see inside a graph: nodes of a tape, which a real graph does not have. So nothing of a replay is unseen.
#
# A probe is recorded where Python runs while a graph is captured: a forward of the draft, a step's candidates, a router. In
# each replay it calls the listener, the taps of the case that runs, as Python would have called them.


class ProbeListener(Protocol):
    def forward_begins_in_graph(self, runner: Any, batch: Any, used: Any) -> None: ...
    def forward_ends_in_graph(self, hidden: Tensor | None) -> None: ...
    def step_selects_in_graph(self, scores: Tensor, tokens: Tensor) -> None: ...
    def router_chooses_in_graph(self, chosen: Tensor) -> None: ...
    def indexer_chooses_in_graph(self, chosen: Tensor) -> None: ...


listener: ProbeListener | None = None  # the taps of the case that runs; None: nobody looks


def around_draft(runner: Any) -> None:
    """Have a draft's model probe its forwards while they are captured. Once it is loaded."""
    forward = runner.model.forward

    def probed(input_ids: Tensor, positions: Tensor, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if not tape.capturing():
            return forward(input_ids, positions, batch, *args, **kwargs)
        mode, used = batch.forward_mode, attention.forward_memory(input_ids, positions, batch, *args, **kwargs)

        def begins(ids: Tensor, positions: Tensor, slots: Tensor | None, hidden: Tensor | None) -> None:
            if listener is not None:
                spec = SimpleNamespace(hidden_states=hidden)
                seen = SimpleNamespace(
                    forward_mode=mode, input_ids=ids, positions=positions, out_cache_loc=slots, spec_info=spec
                )
                listener.forward_begins_in_graph(runner, seen, used)

        hidden = getattr(batch.spec_info, "hidden_states", None)
        tape.probe(begins, input_ids, positions, batch.out_cache_loc, hidden)
        result = forward(input_ids, positions, batch, *args, **kwargs)
        tape.probe(_ends, getattr(result, "hidden_states", None))
        return result

    runner.model.forward = probed


def around_select(select: Callable[..., Any]) -> Callable[..., Any]:
    """select_top_k_tokens, whose candidates are seen in each replay."""

    def probed(*args: Any, **kwargs: Any) -> Any:
        result = select(*args, **kwargs)
        scores, tokens, _ = result[3]
        tape.probe(_selects, scores, tokens)
        return result

    return probed


def around_router(forward: Callable[..., Any]) -> Callable[..., Any]:
    """TopK.forward, whose choice of experts is seen in each replay."""

    def probed(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        if (chosen := getattr(result, "topk_ids", None)) is not None:
            tape.probe(_chooses, chosen)
        return result

    return probed


def note_choice(chosen: Tensor | None) -> None:
    """An indexer returned these rows, which are seen in each replay."""
    if chosen is not None:
        tape.probe(_attends, chosen)


def _ends(hidden: Tensor | None) -> None:
    if listener is not None:
        listener.forward_ends_in_graph(hidden)


def _selects(scores: Tensor, tokens: Tensor) -> None:
    if listener is not None:
        listener.step_selects_in_graph(scores, tokens)


def _chooses(chosen: Tensor) -> None:
    if listener is not None:
        listener.router_chooses_in_graph(chosen)


def _attends(chosen: Tensor) -> None:
    if listener is not None:
        listener.indexer_chooses_in_graph(chosen)
