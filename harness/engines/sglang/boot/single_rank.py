"""One rank alone: nobody to meet, and a thread that listens to nobody.

SGLang makes a dozen process groups in every engine, and torch gives each of gloo a thread of its own that wakes up a hundred
times a second for ever: eight engines that wait cost a tenth of a core. Groups of one rank send nothing, so they share one.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from eagletwin.harness.core.run_spec import Mode
from eagletwin.harness.engines.inside.blame import NotDriven


def meet_nobody(shims: list[str]) -> None:
    """One rank needs no server to meet others at: torch keeps what it would keep there in this process."""
    import torch.distributed
    from torch._C._distributed_c10d import HashStore

    meet = torch.distributed.init_process_group

    def alone(backend: str | None = None, init_method: str | None = None, **kwargs: Any) -> None:  # noqa: ARG001
        _share_a_listener()
        meet(backend, store=HashStore(), **kwargs)

    torch.distributed.init_process_group = alone  # type: ignore[assignment]
    shims.append("torch.distributed.init_process_group: one rank, with a store in its own memory")
    shims.append("torch's groups of gloo: one thread listens for all of them")


def _share_a_listener() -> None:
    """In the process that makes the groups: a fork has no threads."""
    from torch.distributed import distributed_c10d

    gloo: Any = distributed_c10d.ProcessGroupGloo
    device = gloo.create_default_device()

    class Sharing(gloo):  # type: ignore[misc]
        # torch 2.14 also says whether ranks may come and go, which one rank does not
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta, *, enable_reconfigure: bool = False) -> None:
            if enable_reconfigure:
                raise NotImplementedError("a group of one rank whose ranks may change: eagletwin makes none")
            options = gloo._Options()
            options._devices, options._threads, options._timeout = [device], 1, timeout
            super().__init__(store, rank, size, options)

    distributed_c10d.ProcessGroupGloo = Sharing  # type: ignore[misc]


@contextmanager
def meeting_others() -> Iterator[None]:
    """Groups that are made meanwhile meet other processes: each has a thread of its own, which ends with it."""
    from torch.distributed import distributed_c10d

    sharing: Any = distributed_c10d.ProcessGroupGloo
    distributed_c10d.ProcessGroupGloo = sharing.__mro__[1]  # type: ignore[misc]
    try:
        yield
    finally:
        distributed_c10d.ProcessGroupGloo = sharing  # type: ignore[misc]


# Stages of a pipeline: a process each, with some of the target's layers; the last one also has the draft.
#
# SGLang's pipelines run EAGLE where SGLANG_ENABLE_PP_SPEC is set (0.5.21 and later). When a round is over the last stage drafts
# the tree of the next one, which goes round with what the round decided, so that every stage verifies the same tree. What a
# request is verified with in its first round was never drafted: the token of its prefill, and zeros.

_VARIABLE = "SGLANG_ENABLE_PP_SPEC"


def stage_of(mode: Mode, rank: int) -> int:
    """The stage that is this process of ours: the first is the last stage, whose trace is judged."""
    return mode.pp - 1 - rank


def refuse() -> None:
    """Raises NotDriven where this release has no such stages."""
    from sglang.srt.environ import envs

    if not hasattr(envs, _VARIABLE):
        why = f"this release has no {_VARIABLE}, by which its stages run EAGLE (0.5.21 and later have it)"
        raise NotDriven(f"a pipeline: {why}")
