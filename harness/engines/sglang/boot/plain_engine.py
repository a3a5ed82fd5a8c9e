"""The engine of a configuration without speculative decoding: what SGLang is given for it."""

import importlib
from typing import Any

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
