"""The attention backend of the layers of a multi-layer draft, where the worker names FlashAttention itself.

Up to 0.5.10.post1 `MultiLayerEagleDraftWorker` makes a FlashAttentionBackend for each layer, whatever backend was asked
for. Its kernels are a GPU's, so its name stands for the release's Triton backend here, which is asked for everywhere else.
Listed among the shims.
"""

from typing import Any


def use_triton(shims: list[str]) -> None:
    """Before the worker is built."""
    from sglang.srt.speculative.multi_layer_eagle_worker_v2 import MultiLayerEagleDraftWorker

    name = "FlashAttentionBackend"
    if name not in MultiLayerEagleDraftWorker.init_attention_backend.__code__.co_names:
        return
    from sglang.srt.layers.attention import flashattention_backend
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    def triton(model_runner: Any, skip_prefill: bool, **_: Any) -> Any:
        return TritonAttnBackend(model_runner, skip_prefill=skip_prefill)

    setattr(flashattention_backend, name, triton)
    shims.append(f"{flashattention_backend.__name__}.{name} = TritonAttnBackend, for the layers of a multi-layer draft")
