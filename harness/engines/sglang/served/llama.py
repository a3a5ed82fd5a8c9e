"""SGLang's own Llama and Llama-EAGLE, handed to its model registry unchanged."""

from sglang.srt.models.llama import LlamaForCausalLM
from sglang.srt.models.llama_eagle import LlamaForCausalLMEagle

EntryClass = [LlamaForCausalLM, LlamaForCausalLMEagle]
