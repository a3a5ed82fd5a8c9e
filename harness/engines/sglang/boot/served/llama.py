"""SGLang's own Llama, Llama-EAGLE and Llama-EAGLE-3, handed to its model registry unchanged."""

from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.llama_eagle import LlamaForCausalLMEagle
from sglang.srt.models.llama_eagle3 import LlamaForCausalLMEagle3

EntryClass = [LlamaForCausalLM, LlamaForCausalLMEagle, LlamaForCausalLMEagle3]
