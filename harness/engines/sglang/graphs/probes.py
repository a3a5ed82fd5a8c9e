"""What taps see inside a graph: nodes of a tape, which a real graph does not have. So nothing of a replay is unseen.

A probe is recorded where Python runs while a graph is captured: a forward of the draft, a step's candidates, a router. In each
replay it calls the listener, the taps of the case that runs, as Python would have called them.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Protocol

from torch import Tensor

from ..compat import attention
from . import tape


class ProbeListener(Protocol):
    def forward_begins_in_graph(self, runner: Any, batch: Any, used: Any) -> None: ...
    def forward_ends_in_graph(self, hidden: Tensor | None) -> None: ...
    def step_selects_in_graph(self, scores: Tensor, tokens: Tensor) -> None: ...
    def router_chooses_in_graph(self, chosen: Tensor) -> None: ...


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


def _ends(hidden: Tensor | None) -> None:
    if listener is not None:
        listener.forward_ends_in_graph(hidden)


def _selects(scores: Tensor, tokens: Tensor) -> None:
    if listener is not None:
        listener.step_selects_in_graph(scores, tokens)


def _chooses(chosen: Tensor) -> None:
    if listener is not None:
        listener.router_chooses_in_graph(chosen)
