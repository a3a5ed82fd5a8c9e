"""How a scheduler's own loop is stepped: which loop it is, whom it asks for what came, and whether it may overlap on a CPU."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from .names import pick

# What rank 0 calls for what came since the last iteration, before it hands that on to the others (0.5.13 and later).
RECEIVE_OF_RANKS = "_pull_raw_reqs"


def drives_ranks(scheduler_module: Any) -> bool:
    """Whether several ranks of this release can be stepped together."""
    return hasattr(getattr(scheduler_module, "SchedulerRequestReceiver", None), RECEIVE_OF_RANKS)


def event_loop(scheduler: Any) -> Callable[[], None]:
    """The loop that this scheduler's own process would run; up to 0.5.9 that process chooses between two."""
    names = ["event_loop_overlap" if scheduler.enable_overlap else "event_loop_normal"]
    loop: Callable[[], None] = pick(scheduler, "run_event_loop", *names)
    return loop


def allow_overlap(shims: list[str]) -> None:
    """Releases that know EAGLE on a CPU turn their overlap scheduler off there (0.5.16 and later); earlier ones do not.
    The oldest have no such module."""
    package = "sglang.srt.arg_groups"
    if importlib.util.find_spec(package) is None or importlib.util.find_spec(f"{package}.speculative_hook") is None:
        return
    hook: Any = importlib.import_module(f"{package}.speculative_hook")
    if hasattr(hook, "_disable_overlap_schedule_for_cpu"):
        hook._disable_overlap_schedule_for_cpu = lambda _arguments: None
        shims.append("speculative_hook._disable_overlap_schedule_for_cpu: does nothing")
