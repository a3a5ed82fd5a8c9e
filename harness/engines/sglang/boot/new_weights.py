"""Give a scheduler that stands other weights than it was started with, by the messages that SGLang's own server sends for it.

What each path reaches differs from release to release; the judge sees it in the numbers of whatever runs afterwards.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from eagletwin.harness.core.case import WeightPath
from eagletwin.harness.families.store import whole_checkpoint
from eagletwin.harness.families.weights import model_pair

from . import alone, trainer


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

    port, tensors = trainer.free_port(), [tensor for _, tensor in named]
    update = io_struct.UpdateWeightsFromDistributedReqInput(
        names=[name for name, _ in named],
        dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
        shapes=[list(tensor.shape) for tensor in tensors],
        group_name=trainer.GROUP,
        **({"load_format": "flattened_bucket"} if bucket else {}),
    )
    joined = io_struct.InitWeightsUpdateGroupReqInput(
        master_address="127.0.0.1",
        master_port=port,
        rank_offset=1,
        world_size=trainer.RANKS,
        group_name=trainer.GROUP,
        backend="gloo",
    )
    left = io_struct.DestroyWeightsUpdateGroupReqInput(group_name=trainer.GROUP)
    with alone.meeting_others(), trainer.broadcasting([_bucket_of(named).get_flattened_tensor()] if bucket else tensors, port):
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
