"""SGLang's own Llama, Llama-EAGLE and Llama-EAGLE-3, handed to its model registry unchanged; and for each layer of a
multi-layer draft (MTP) a model of one EAGLE-1/2 head.

SGLang takes a model for chained (each layer consumes the state of the layer below) if its architecture is on a list, so one
of the two classes has a name of that list; without SGLang's special memory for it (boot.py) it is a Llama like the other.
"""

from collections.abc import Iterable
from typing import Any

from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.llama_eagle import LlamaForCausalLMEagle
from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3
from torch import Tensor

# The loader gives each runner the weights of its own layer, renamed to the first.
_MINE = "model.mtp.layers.0."


class LlamaForCausalLMMTP(LlamaForCausalLMEagle):  # type: ignore[misc]
    """Layer `draft_model_idx` of a non-chained draft."""

    def __init__(self, config: Any, quant_config: Any = None, draft_model_idx: int = 0, prefix: str = "") -> None:
        super().__init__(config, quant_config=quant_config, prefix=prefix)
        self.draft_model_idx = draft_model_idx

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        super().load_weights((name.removeprefix(_MINE), tensor) for name, tensor in weights)


class Step3p5MTP(LlamaForCausalLMMTP):
    """The same, chained."""


EntryClass = [LlamaForCausalLM, LlamaForCausalLMEagle, LlamaForCausalLMEagle3, LlamaForCausalLMMTP, Step3p5MTP]
