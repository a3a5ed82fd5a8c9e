"""Give a scheduler that stands other weights than it was started with, by the messages that SGLang's own server sends for it.

What each path reaches differs from release to release; the judge sees it in the numbers of whatever runs afterwards.
"""

import os
import socket
import traceback
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from eagletwin.harness.core.case import WeightPath
from eagletwin.harness.engines.inside.supervise import die_with_parent
from eagletwin.harness.families.store import whole_checkpoint
from eagletwin.harness.families.weights import model_pair

from . import single_rank

# A trainer that broadcasts weights to an engine, as SGLang's users train and serve at once: rank 0 of a group of gloo, in a
# process of its own.

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


def give(scheduler: Any, model: str, path: WeightPath, ranks: int) -> None:
    """Hand the recipe's weights to target and draft of one of so many ranks. Raises RuntimeError with the release's word if it
    fails."""
    from sglang.srt.managers import io_struct

    if not hasattr(scheduler, "result_queue"):  # the overlap loop makes it as it begins, and a flush looks whether it is empty
        scheduler.result_queue = deque()
    if path == "disk":
        # the scheduler asserts that the cache is flushed after it, as the server would have it
        _send(scheduler, [io_struct.UpdateWeightFromDiskReqInput(model_path=str(whole_checkpoint(model)), load_format="auto")])
        return
    pair = model_pair(model)
    named = [*pair.target.items(), *pair.draft.items()]
    if path.startswith("distributed"):
        _give_by_a_group(scheduler, named, bucket=path == "distributed_bucket")
    else:
        _send(scheduler, _in_a_session([_of_tensors(named, ranks, bucket=path == "tensor_bucket")]))


def _of_tensors(named: list[tuple[str, Tensor]], ranks: int, *, bucket: bool) -> Any:
    """Each rank takes the part of its number, and of that its share: all parts are the same."""
    from sglang.srt.managers import io_struct
    from sglang.srt.utils import MultiprocessingSerializer

    if not bucket:
        parts = [MultiprocessingSerializer.serialize(named)] * ranks
        return io_struct.UpdateWeightsFromTensorReqInput(serialized_named_tensors=parts)
    whole = _bucket_of(named)
    flat = {"flattened_tensor": whole.get_flattened_tensor(), "metadata": whole.get_metadata()}
    return io_struct.UpdateWeightsFromTensorReqInput(
        serialized_named_tensors=[MultiprocessingSerializer.serialize(flat)] * ranks, load_format="flattened_bucket"
    )


def _give_by_a_group(scheduler: Any, named: list[tuple[str, Tensor]], *, bucket: bool) -> None:
    """From another process, which is of the same group."""
    from sglang.srt.managers import io_struct

    port, tensors = free_port(), [tensor for _, tensor in named]
    update = io_struct.UpdateWeightsFromDistributedReqInput(
        names=[name for name, _ in named],
        dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
        shapes=[list(tensor.shape) for tensor in tensors],
        group_name=GROUP,
        **({"load_format": "flattened_bucket"} if bucket else {}),
    )
    joined = io_struct.InitWeightsUpdateGroupReqInput(
        master_address="127.0.0.1",
        master_port=port,
        rank_offset=1,
        world_size=RANKS,
        group_name=GROUP,
        backend="gloo",
    )
    left = io_struct.DestroyWeightsUpdateGroupReqInput(group_name=GROUP)
    with single_rank.meeting_others(), broadcasting([_bucket_of(named).get_flattened_tensor()] if bucket else tensors, port):
        _send(scheduler, [joined, *_in_a_session([update]), left])


def _bucket_of(named: list[tuple[str, Tensor]]) -> Any:
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    return FlattenedTensorBucket(named_tensors=named)


def _in_a_session(requests: Iterable[Any]) -> list[Any]:
    """0.5.21 and later take tensors in a session alone."""
    from sglang.srt.managers import io_struct

    if not hasattr(io_struct, "BeginWeightUpdateReqInput"):
        return [*requests]
    return [io_struct.BeginWeightUpdateReqInput(), *requests, io_struct.EndWeightUpdateReqInput()]


def _send(scheduler: Any, requests: Iterable[Any]) -> None:
    for request in requests:
        answer = scheduler._request_dispatcher(request)
        if not answer.success:
            raise RuntimeError(f"{type(request).__name__}: {answer.message}")
