"""What draft extend leaves for the next round, after a prefill as after a verify."""

from typing import Any

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.trace import snapshot

from .speculation import Speculation


def proposals_of(draft_input: Any, of: Speculation) -> list[dict[str, Array]]:
    """Of each request: what the root row of the next round proposes. Probabilities are a constant where topk is 1."""
    found = {"proposal": draft_input.topk_index}  # [n, topk], or of all layers [n, layers * topk]
    if not of.layers and of.states:  # several layers have drafted all there is, and hand nothing on
        found["proposal_hidden"] = draft_input.hidden_states
    if of.topk > 1:
        found["proposal_probabilities"] = draft_input.topk_p
    rows = [snapshot(tensor) for tensor in found.values()]
    return [dict(zip(found, parts, strict=True)) for parts in zip(*rows, strict=True)]
