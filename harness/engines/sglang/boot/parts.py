"""The parts of a worker that SGLang chooses itself: attention backends, and the classes that capture and replay its graphs.

A trace says it, so that what ran is shown and not assumed: it depends on the attention backend which layers have a graph each,
and which share one. Called by boot.py and engine.py.
"""

from typing import Any

from eagletwin.harness.core.mode import Attention

from ..eras import workers
from ..taps.speculation import draft_runners

# Name of an attention backend -> its class.
CLASSES: dict[Attention, str] = {"triton": "TritonAttnBackend", "fa3": "FlashAttentionBackend"}


def attention(scheduler: Any) -> str:
    """The classes of the attention backends of the target's runner and of the draft's; one name if all are of one."""
    runners = (scheduler.tp_worker.model_runner, *draft_runners(scheduler))
    return " and ".join(sorted({type(runner.attn_backend).__name__ for runner in runners}))


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
