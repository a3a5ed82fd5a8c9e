"""What a scheduler knows of its process: SGLang's process-wide configuration, and which rank it is."""

import inspect
from typing import Any


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
    """Arguments of the scheduler's constructor that name its rank: up to 0.5.20 it has some."""
    parameters = list(inspect.signature(scheduler.__init__).parameters)[3:]
    own = {"dp_rank": None, "gpu_id": rank, "tp_rank": rank}
    return {name: own.get(name, 0) for name in parameters}
