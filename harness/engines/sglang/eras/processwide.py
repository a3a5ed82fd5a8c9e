"""What a scheduler knows of its process: SGLang's process-wide configuration, and which rank it is."""

import inspect
from typing import Any

from ..not_driven import NotDriven

# Of the first process of all.
_FIRST = dict.fromkeys(("gpu_id", "tp_rank", "moe_ep_rank", "pp_rank", "attn_cp_rank", "moe_dp_rank"), 0) | {"dp_rank": None}


def publish(scheduler_module: Any, arguments: Any, rank: int, stage: int) -> None:
    """Hand the arguments to SGLang's process-wide configuration, where it has one (0.5.17 and later).

    rank, stage: of tensor and of pipeline parallelism"""
    publish = getattr(scheduler_module, "publish", None)
    if publish is None:
        return
    if hasattr(scheduler_module, "SpawnRanks"):  # 0.5.21 and later
        world_rank = scheduler_module.spawn_world_rank(arguments, tp_rank=rank, pp_rank=stage)
        ranks = scheduler_module.SpawnRanks(world_rank=world_rank, dp_rank=None, gpu_id=rank + stage)
        publish(arguments, role="scheduler", ranks=ranks)
    else:
        publish(arguments, role="scheduler")


def ranks_of(scheduler: Any, rank: int) -> dict[str, int | None]:
    """Arguments of the scheduler's constructor that name its rank: up to 0.5.20 it has some. Raises NotDriven for a parameter
    that is not known here and has no default."""
    all_of_them = list(inspect.signature(scheduler.__init__).parameters.values())
    parameters = [each for each in all_of_them[3:] if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    unknown = [each.name for each in parameters if each.name not in _FIRST and each.default is each.empty]
    if unknown:
        raise NotDriven(f"this release's Scheduler is built with {', '.join(unknown)}, and what that has to be is not known")
    ranks = _FIRST | {"gpu_id": rank, "tp_rank": rank}
    return {each.name: ranks[each.name] for each in parameters if each.name in ranks}
