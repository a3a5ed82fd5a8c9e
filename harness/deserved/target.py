"""The target as transformers runs it: independent of the reference and of every engine."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from eagletwin.harness.core.errors import EagletwinError, InputError

from .checkpoint import Checkpoint
from .draft import Shared, States

Served = Literal["auto", "float32", "bfloat16", "float16"]
# Types of targets that keep Llama's names and norms in transformers: `model.layers`, `model.norm`, `lm_head`.
TARGETS = ("llama", "qwen2", "qwen3", "qwen3_moe")
_ROWS = 512  # rows of logits at once: a vocabulary of 128,000 tokens makes 256 MB of them in float32


@dataclass(frozen=True, slots=True)
class Read:
    """What the target makes of a text of T tokens.

    hidden  [T, ..] the states that the draft consumes; row i has consumed tokens 0..i
    best    [T] its own next token at each place
    lead    [T] by how much the best logit leads the token that the text has next, as a share of the largest; 0: it is the best
    said    [T - 1] log p(x[i+1] | x[0..i]) at the temperature that was asked for, in float64; without one, empty
    """

    hidden: Tensor
    best: Tensor
    lead: Tensor
    said: Tensor


class Target:
    """transformers' model of a checkpoint, in the type it is served in, on one device.

    weights: their type in the engine, where this is another than the one to compute in
    """

    def __init__(
        self, checkpoint: Checkpoint, served: Served = "auto", device: str = "cpu", weights: torch.dtype | None = None
    ) -> None:
        if checkpoint.config.get("model_type") not in TARGETS:
            raise InputError(
                f"{checkpoint.folder} is a target of type {checkpoint.config.get('model_type')!r}",
                consequence="it is not known which of its states a draft consumes",
                remedy="name a target of type " + ", ".join(TARGETS),
            )
        try:
            from transformers import AutoModelForCausalLM
            from transformers.utils.logging import disable_progress_bar
        except ImportError as error:
            raise EagletwinError(
                f"transformers cannot be imported: {error}",
                consequence="the target cannot be run",
                remedy="pip install 'eagletwin[acceptance]'",
            ) from error
        disable_progress_bar()
        dtype = served if served == "auto" else getattr(torch, served)
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=dtype, local_files_only=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise InputError(
                f"transformers cannot load {checkpoint.folder}: {str(error).splitlines()[0]}",
                consequence="the target cannot be run",
                remedy="name a complete checkpoint in Hugging Face's layout",
            ) from error
        if weights is not None:
            for parameter in model.parameters():
                parameter.data.copy_(parameter.data.to(weights))
        self._model = model.to(device).eval()
        self.device = torch.device(device)
        self.context = int(checkpoint.config.get("max_position_embeddings", 0)) or None
        head = model.get_output_embeddings()
        self.shared = Shared(model.get_input_embeddings().weight.detach(), head.weight.detach(), len(model.model.layers))

    @torch.no_grad()
    def read(self, tokens: Sequence[int], reads: States, temperature: float = 0.0) -> Read:
        """Run over a text of T tokens.

        Raises InputError for one that is longer than the context, and for an id that is no token.
        """
        self._must_take(tokens)
        ids = torch.tensor([list(tokens)], device=self.device)
        before: list[Tensor] = []
        hook = self._model.model.norm.register_forward_pre_hook(lambda _module, inputs: before.append(inputs[0][0]))
        try:
            out = self._model.model(ids, use_cache=False, output_hidden_states=not isinstance(reads, str))
        finally:
            hook.remove()
        normed = out.last_hidden_state[0]
        if reads == "post_norm":
            hidden = normed
        elif reads == "pre_norm":
            hidden = before[0]
        else:  # transformers' hidden state n is what enters layer n
            hidden = torch.cat([out.hidden_states[layer + 1][0] for layer in reads], -1)
        best, lead, chances = [], [], [normed.new_empty(0, dtype=torch.float64)]
        following = torch.cat([ids[0, 1:], ids.new_full((1,), -1)])  # nothing is known of the last
        for rows, after in zip(torch.split(normed, _ROWS), torch.split(following, _ROWS), strict=True):
            logits = self._model.lm_head(rows).float()  # [R, V]
            top = logits.max(-1)
            after_it = after.clamp(min=0)[:, None]
            said = logits.gather(1, after_it)[:, 0]
            best.append(top.indices)
            lead.append(torch.where(after < 0, 0.0, (top.values - said) / logits.abs().amax(-1)))
            if temperature:
                chances.append((logits.double() / temperature).log_softmax(-1).gather(1, after_it)[:, 0])
        return Read(hidden, torch.cat(best), torch.cat(lead), torch.cat(chances)[:-1])

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """What the target says to a prompt, up to `count` tokens or the end of its sequence, as transformers generates it."""
        self._must_take([*prompt, *[0] * count])
        ids = torch.tensor([list(prompt)], device=self.device)
        out = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, num_beams=1, pad_token_id=0
        )
        said: list[int] = out[0, len(prompt) :].tolist()
        return said

    def _must_take(self, tokens: Sequence[int]) -> None:
        if self.context and len(tokens) > self.context:
            raise InputError(
                f"a text of {len(tokens)} tokens is longer than the target's context of {self.context}",
                consequence="no engine could serve it",
                remedy="shorten the prompt, or ask for fewer new tokens",
            )
        size = len(self.shared.embedding)
        if not all(0 <= token < size for token in tokens):
            wrong = next(token for token in tokens if not 0 <= token < size)
            raise InputError(
                f"the text has the token {wrong}, and the target has {size} tokens",
                consequence="it cannot be embedded",
                remedy="use the tokenizer of this target",
            )
