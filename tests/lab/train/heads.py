"""The drafts of a pair: each is a recipe of its family, with weights that are yet to be trained.

A recipe says how its family lays out the checkpoint, and makes the reference's heads of the weights. What is trained is
therefore what the reference checks, and what is written is what SGLang reads.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from eagletwin.harness.families import family_of
from eagletwin.harness.families.mtp import PREFIX
from eagletwin.harness.families.recipe import Recipe
from eagletwin.reference.eagle import Head
from eagletwin.reference.sizes import LlamaShape

from .settings import PairSettings

Weights = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """A draft that is to be trained.

    name      of the draft, and of its folder
    recipe    its family and sizes
    proposes  [N] the tokens that it can propose
    tensors   name -> shape, by the names of its family's heads
    """

    name: str
    recipe: Recipe
    proposes: Tensor
    tensors: dict[str, tuple[int, ...]]

    @property
    def keeps_states(self) -> bool:
        """Whether a state that the head computes should be the target's next one. EAGLE-3 leaves it free."""
        return self.recipe.target_hidden != "aux"

    def initial(self, seed: int) -> Weights:
        """Weights before training, float32: norms are ones, biases zeros, matrices small random numbers."""
        generator = torch.Generator().manual_seed(seed)

        def tensor(name: str, shape: tuple[int, ...]) -> Tensor:
            if name.endswith("norm.weight"):
                return torch.ones(shape)
            if name.endswith("bias"):
                return torch.zeros(shape)
            return torch.randn(shape, generator=generator).mul(0.5 * float(shape[-1]) ** -0.5)

        return {name: tensor(name, shape) for name, shape in self.tensors.items()}

    def heads(self, weights: Weights, target: Weights) -> tuple[Head, ...]:
        """The reference's heads of these weights, by layer; in the dtype and on the device of both."""
        proposes = self.proposes.to(target["lm_head.weight"].device)
        embedding, lm_head = target["model.embed_tokens.weight"], target["lm_head.weight"]
        return family_of(self.recipe).heads(self.recipe, weights, embedding, lm_head, proposes)

    def checkpoint(self, weights: Weights) -> Weights:
        """The tensors as a checkpoint has them: those of a draft with a vocabulary of its own need d2t [N], int64."""
        if self.recipe.draft_vocab_size is None:
            return weights
        return {**weights, "d2t": self.proposes - torch.arange(len(self.proposes))}


def draft_plans(settings: PairSettings, frequent: Tensor) -> dict[str, DraftPlan]:
    """The drafts of a pair, by name. frequent [N]: the tokens that the EAGLE-3 draft proposes."""
    plain, width = replace(settings.target, aux_layers=()), settings.intermediate_size
    everything = torch.arange(settings.target.vocab_size)
    one = dict(_eagle_tensors(settings.draft, width))
    layers = {PREFIX.format(n) + name: shape for n in range(settings.mtp_layers) for name, shape in one.items()}
    eagle3 = dict(_eagle3_tensors(settings, len(frequent)))
    reduced = _recipe(settings, "llama_eagle3", settings.target, vocabulary=len(frequent))
    plans = (
        DraftPlan("eagle", _recipe(settings, "llama", plain), everything, one),
        DraftPlan("eagle3", reduced, frequent, eagle3),
        DraftPlan("mtp", _recipe(settings, "llama_mtp", plain, layers=settings.mtp_layers), everything, layers),
    )
    return {plan.name: plan for plan in plans}


def _recipe(settings: PairSettings, family: str, target: LlamaShape, vocabulary: int | None = None, layers: int = 0) -> Recipe:
    """A recipe whose weights come from training: the fields that say how to draw them are zero."""
    return Recipe(
        name=f"trained-{settings.name}",
        family=family,
        target=target,
        draft=settings.draft,
        intermediate_size=settings.intermediate_size,
        max_position=settings.max_position,
        seed=settings.seed,
        noise=0.0,
        attention_gain=0.0,
        mlp_gain=0.0,
        target_hidden="aux" if target.aux_layers else "post_norm",
        min_share=0.0,
        draft_vocab_size=vocabulary,
        mtp_layers=layers,
    )


def _layer_tensors(shape: LlamaShape, reads: int, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A decoder layer whose attention reads `reads` numbers a row, without the norms before it."""
    size, heads, kv_heads = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    yield "self_attn.q_proj.weight", (heads, reads)
    yield "self_attn.k_proj.weight", (kv_heads, reads)
    yield "self_attn.v_proj.weight", (kv_heads, reads)
    yield "self_attn.o_proj.weight", (size, heads)
    yield "post_attention_layernorm.weight", (size,)
    yield "mlp.gate_proj.weight", (width, size)
    yield "mlp.up_proj.weight", (width, size)
    yield "mlp.down_proj.weight", (size, width)


def _eagle_tensors(shape: LlamaShape, width: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    size = shape.hidden_size
    yield "fc.weight", (size, 2 * size)
    yield "fc.bias", (size,)
    for name, tensor in _layer_tensors(shape, size, width):
        yield f"layers.0.{name}", tensor


def _eagle3_tensors(settings: PairSettings, vocabulary: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    size = settings.draft.hidden_size
    yield "fc.weight", (size, len(settings.target.aux_layers) * size)
    yield "midlayer.input_layernorm.weight", (size,)
    yield "midlayer.hidden_norm.weight", (size,)
    for name, tensor in _layer_tensors(settings.draft, 2 * size, settings.intermediate_size):
        yield f"midlayer.{name}", tensor
    yield "norm.weight", (size,)
    yield "lm_head.weight", (vocabulary, size)
