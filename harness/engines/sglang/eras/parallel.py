"""Which rank a scheduler is: a record of its own up to 0.5.17, what the process's context says after that."""

import importlib
from typing import Any, NamedTuple


class Rank(NamedTuple):
    """tp of tp_size ranks that share the work, in replica dp of its server."""

    tp: int
    tp_size: int
    dp: int


def rank_of(scheduler: Any) -> Rank:
    """The rank of this process's scheduler."""
    state: Any = getattr(scheduler, "ps", None)
    if state is None:
        state = importlib.import_module("sglang.srt.runtime_context").get_parallel()
    return Rank(int(state.tp_rank), int(state.tp_size), int(getattr(state, "dp_rank", None) or 0))


def first_layer(scheduler: Any) -> int:
    """The first of the target's layers that this process of a pipeline has."""
    return int(scheduler.tp_worker.model_runner.layer_info.start_layer)
