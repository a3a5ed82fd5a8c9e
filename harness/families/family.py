"""What a model family has in addition to its arithmetic: the form that each family's file fills in.

The arithmetic is in `reference/`. A family's file holds the rest: its recipes, the weights of its draft, how its checkpoint is
laid out, SGLang's classes that serve it, what its pools keep, and its limits. weights.py, store.py and the engine's boot/ ask a
Family and know no family by name.

Nothing in this room imports torch while it is imported: cases are drawn and checked by recipes alone, before torch is there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from eagletwin.reference.eagle import Head
    from eagletwin.reference.sizes import LlamaShape

    from .recipe import Recipe

    # Tensors by the names of a checkpoint; float32, and integers where a checkpoint has them
    Weights = dict[str, Tensor]
    # normal(*shape, std=…) draws float32 numbers from the recipe's generator
    Normal = Callable[..., Tensor]


@dataclass(frozen=True, slots=True)
class Part:
    """A checkpoint of the target or of the draft: what a Llama's config.json lacks, its sizes and its tensors."""

    config: Mapping[str, object]
    shape: LlamaShape
    weights: Weights


def sizes(recipe: Recipe, shape: LlamaShape) -> dict[str, object]:
    """What every config.json says of a model of this shape, by Hugging Face's names."""
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": recipe.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": recipe.max_position,
        "rms_norm_eps": shape.rms_norm_eps,
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family.

    recipes        its target / draft pairs
    layer_weights  (recipe, number, normal) -> the tensors of one decoder layer of the target; None: those of a Llama
    stored         what an engine keeps of a sequence: rows by position, for ever: keys and values, or latent rows
    modules        SGLang's modules with the model classes of target and draft that boot/served does not name; they are imported
                   for the cases of this family alone
    norms_less     what a checkpoint's norms are stored less: the model adds it again
    names_type     whether SGLang's class computes in the type that the checkpoint names, whatever --dtype says
    one_checkpoint whether target and draft can lie in one checkpoint, as a weight update wants
    limits         what the family's real models have and the reference or the recipes lack, in words
    draft_weights  (recipe, target, normal) -> the draft's tensors, by the names of its head; it may change the target
    heads          (recipe, draft, embedding [V, H], lm_head [V, H], proposes [N]) in float64 -> the reference's heads, by layer
    checkpoint     (recipe, target, draft) -> both parts, by the names and configurations that SGLang reads
    arguments      recipe -> fields of SGLang's ServerArgs that the family needs
    environment    SGLang's own switches that are set for its cases
    """

    name: str
    recipes: tuple[Recipe, ...]
    draft_weights: Callable[[Recipe, Weights, Normal], Weights]
    heads: Callable[[Recipe, Weights, Tensor, Tensor, Tensor], tuple[Head, ...]]
    checkpoint: Callable[[Recipe, Weights, Weights], tuple[Part, Part]]
    arguments: Callable[[Recipe], Mapping[str, Any]] = lambda recipe: MappingProxyType({})
    environment: Mapping[str, str] = field(default_factory=dict)
    layer_weights: Callable[[Recipe, int, Normal], Weights] | None = None
    stored: Literal["rows", "latent rows"] = "rows"
    modules: tuple[str, ...] = ()
    norms_less: int = 0
    names_type: bool = False
    one_checkpoint: bool = False
    limits: tuple[str, ...] = ()
