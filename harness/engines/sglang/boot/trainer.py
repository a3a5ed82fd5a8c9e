"""A trainer that broadcasts weights to an engine, as SGLang's users train and serve at once: rank 0 of a group of gloo, in a
process of its own. Called by new_weights.py.
"""

import os
import socket
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from ..processes.supervise import die_with_parent

GROUP = "eagletwin"
RANKS = 2  # the trainer and the engine


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


@contextmanager
def broadcasting(tensors: Sequence[Tensor], port: int) -> Iterator[None]:
    """While a process of its own broadcasts these, one after the other, to the engine that joins the group at this port.

    Raises RuntimeError if it did not end well."""
    trainer = os.fork()
    if trainer == 0:
        try:
            die_with_parent()
            _broadcast(tensors, port)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    yield
    _, status = os.waitpid(trainer, 0)
    if status:
        raise RuntimeError(f"the trainer ended with status {status}")


def _broadcast(tensors: Sequence[Tensor], port: int) -> None:
    import torch.distributed
    from sglang.srt.utils import init_custom_process_group

    group = init_custom_process_group(
        backend="gloo", init_method=f"tcp://127.0.0.1:{port}", world_size=RANKS, rank=0, group_name=GROUP
    )
    for tensor in tensors:
        torch.distributed.broadcast(tensor, src=0, group=group)
    torch.distributed.destroy_process_group(group)
