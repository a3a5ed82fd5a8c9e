"""What the forward of a layer of a multi-layer draft reads and writes with: where attention looks for it.

Up to 0.5.12.post1 a forward takes attention backend and pools from fields of the batch alone. From 0.5.13 on it takes the
backend from its context, and the pools from the backend; the fields of the batch are not read.
"""

import dataclasses
from typing import Any


def used(*arguments: Any) -> dict[str, Any]:
    """By the name that it has on a model runner. arguments: those of the model's forward, the batch among them."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    names = ("attn_backend", "token_to_kv_pool", "req_to_token_pool")
    if {field.name for field in dataclasses.fields(ForwardBatch)}.issuperset(names):
        [batch] = [argument for argument in arguments if isinstance(argument, ForwardBatch)]
        return {name: getattr(batch, name) for name in names}
    from sglang.srt.model_executor.forward_context import get_attn_backend

    backend = get_attn_backend()
    return {"attn_backend": backend} | {name: getattr(backend, name) for name in names[1:]}
