"""Give a scheduler that stands other weights than it was started with, by the messages that SGLang's own server sends for it.

What each path reaches differs from release to release; the judge sees it in the numbers of whatever runs afterwards.
"""

from collections import deque
from typing import Any, Literal

from eagletwin.harness.families.store import whole_checkpoint
from eagletwin.harness.families.weights import model_pair


def give(scheduler: Any, model: str, path: Literal["disk", "tensor"]) -> None:
    """Hand the recipe's weights to target and draft. Raises RuntimeError with the release's word if it fails."""
    from sglang.srt.managers import io_struct

    if path == "disk":
        # the scheduler asserts that the cache is flushed after it, as the server would have it
        requests = [io_struct.UpdateWeightFromDiskReqInput(model_path=str(whole_checkpoint(model)), load_format="auto")]
    else:
        from sglang.srt.utils import MultiprocessingSerializer

        pair = model_pair(model)
        tensors = MultiprocessingSerializer.serialize([*pair.target.items(), *pair.draft.items()])
        requests = [io_struct.UpdateWeightsFromTensorReqInput(serialized_named_tensors=[tensors])]
        if hasattr(io_struct, "BeginWeightUpdateReqInput"):  # 0.5.21 and later take tensors in a session alone
            requests = [io_struct.BeginWeightUpdateReqInput(), *requests, io_struct.EndWeightUpdateReqInput()]
    if not hasattr(scheduler, "result_queue"):  # the overlap loop makes it as it begins, and a flush looks whether it is empty
        scheduler.result_queue = deque()
    for request in requests:
        answer = scheduler._request_dispatcher(request)
        if not answer.success:
            raise RuntimeError(f"{type(request).__name__}: {answer.message}")
