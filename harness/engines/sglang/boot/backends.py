"""The parts of a worker that SGLang chooses itself: attention backends, and the classes that capture and replay its graphs.

A trace says it, so that what ran is shown and not assumed: it depends on the attention backend which layers have a graph each,
and which share one. Called by boot.py and engine.py.
"""

import importlib
from typing import Any

from eagletwin.harness.core.mode import Attention

from ..compat import workers
from ..taps.speculation import draft_runners

_CLASSES: dict[Attention, str] = {
    "triton": "TritonAttnBackend",
    "fa3": "FlashAttentionBackend",
    "flashinfer": "FlashInferAttnBackend",
    "flashmla": "FlashMLABackend",
}
_LATENT: dict[Attention, str] = {"flashinfer": "FlashInferMLAAttnBackend"}


def class_of(name: Attention, *, latent: bool) -> str:
    """The class of an attention backend; FlashInfer has another one for latent attention."""
    return (_LATENT if latent else {}).get(name) or _CLASSES[name]


def attention(scheduler: Any) -> str:
    """The classes of the attention backends of the target's runner and of the draft's; one name if all are of one. Where other
    layers keep a state, a backend of both kinds has the one that attends inside."""
    backends = [runner.attn_backend for runner in (scheduler.tp_worker.model_runner, *draft_runners(scheduler))]
    return " and ".join(sorted({type(getattr(one, "full_attn_backend", one)).__name__ for one in backends}))


def draft_window(scheduler: Any) -> tuple[int, int]:
    """How many of the newest committed rows the draft reads, and how many of the first: of its draft decode, or of the model
    itself, as an EAGLE-3 head has it. (0, 0): all. Without draft decode (one step) it is what the server was asked for."""
    backend: Any = getattr(workers.drafter(scheduler), "draft_attn_backend", None)
    if window := getattr(backend, "draft_window_size", 0):
        return window, backend.draft_sink_size
    if window := getattr(draft_runners(scheduler)[0], "sliding_window_size", None):
        return window, 0
    asked = () if backend is not None else ("speculative_draft_window_size", "speculative_draft_sink_size")
    window, sink = (getattr(scheduler.server_args, name, None) or 0 for name in asked) if asked else (0, 0)
    return window, sink


def parts(scheduler: Any) -> tuple[str, ...]:
    """The classes, each behind what it does; what the worker lacks is left out."""
    drafter = workers.drafter(scheduler)
    found = {
        "draft decode's attention": getattr(drafter, "draft_attn_backend", None),
        "verify in graphs": getattr(scheduler.tp_worker.model_runner, "decode_cuda_graph_runner", None),
        "draft decode in graphs": getattr(drafter, "cuda_graph_runner", None),
        "draft extend in graphs": getattr(drafter, "cuda_graph_runner_for_draft_extend", None),
    }
    classes = {what: type(part).__name__ for what, part in found.items() if part is not None}
    return tuple(f"{what}: {name}" for what, name in ({"attention": attention(scheduler)} | classes).items())


# The engine of a configuration without speculative decoding: what SGLang is given for it.

_SPECULATIVE = ("speculative_", "enable_multi_layer_eagle")


def arguments(given: dict[str, Any]) -> dict[str, Any]:
    """The same fields of ServerArgs without those of drafts. Batches do not overlap: each token is known when the next is
    chosen."""
    return {name: value for name, value in given.items() if not name.startswith(_SPECULATIVE)} | {
        "disable_overlap_schedule": True
    }


def order_penalties(shims: list[str]) -> None:
    """Have penalties applied in the order of SGLang's overlap scheduler and of its verify: what is added, then what is scaled.

    Without overlap the order is that of a set of classes, another in each process (docs/findings/penalty-order.md)."""
    module: Any = importlib.import_module("sglang.srt.sampling.penaltylib.orchestrator")
    orchestrator = module.BatchedPenalizerOrchestrator
    begin = orchestrator.__init__

    def ordered(self: Any, vocab_size: int, batch: Any, penalizers: set[type]) -> None:
        begin(self, vocab_size, batch, sorted(penalizers, key=lambda kind: ("Repetition" in kind.__name__, kind.__name__)))

    orchestrator.__init__ = ordered
    shims.append("BatchedPenalizerOrchestrator: penalties that scale come last")
