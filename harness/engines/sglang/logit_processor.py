"""The custom logit processor that a case may ask for. SGLang takes a class by its pickle, and numbers for it by request.

Imported in a process that has SGLang.
"""

from typing import Any

import torch
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from torch import Tensor


class Adds(CustomLogitProcessor):  # type: ignore[misc]
    """Adds its request's numbers to each row of logits [n, V]; custom_param_list [n]. A row without any is left as it
    is: the judge says whether that was right."""

    def __call__(self, logits: Tensor, custom_param_list: list[dict[str, Any]] | None = None) -> Tensor:
        none = {"added": [0.0] * logits.shape[-1]}
        added = [(parameters or none)["added"] for parameters in custom_param_list or ()]
        return logits + torch.tensor(added, dtype=logits.dtype, device=logits.device)
