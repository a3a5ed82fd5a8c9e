"""A model recipe, and the form that each family's file fills in.

A recipe is a declaration: a seeded tiny target / draft pair, the hidden states it feeds, and the acceptance it was built for.
Each family has its own; weights.py makes the numbers and store.py writes the checkpoint. The draft is *correlated* with the
target: its layer is the target's last layer plus noise, so it agrees with the target at some steps and not at others, and every
accept length occurs. Random pairs agree almost never, and leave everything after verify untested.

Nothing in this room imports torch while it is imported: cases are drawn and checked by recipes alone, before torch is there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from eagletwin.reference.sizes import LlamaShape

if TYPE_CHECKING:
    from torch import Tensor as Tensor

    from eagletwin.reference.eagle import Head as Head

    # Tensors by the names of a checkpoint; float32, and integers where a checkpoint has them
    Weights = dict[str, Tensor]
    # normal(*shape, std=…) draws float32 numbers from the recipe's generator
    Normal = Callable[..., Tensor]
    MakeWeights = Callable[["Recipe", Normal], Weights]
else:  # what annotations name, for each family's file
    Head = MakeWeights = Normal = Tensor = Weights = Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One target / draft pair.

    family         the family it belongs to, by its name in FAMILIES
    target_hidden  which target state the draft consumes as h[i] (DESIGN §2); none: the draft is a plain language model
    noise          relative size of the noise that separates draft and target: larger accepts less
    attention_gain, mlp_gain  size of the layers' contributions to the residual stream; larger means more context
    draft_vocab_size  size of a vocabulary of the draft's own, whose ids a d2t of the checkpoint maps to the target's; None:
                   it is the target's
    head_norms     norms that an EAGLE-3 head has besides those of every one, by the names of its configuration
    mtp_layers     layers of a multi-layer draft (MTP), of which a case uses the first num_steps; 0: a single head
    chained        a layer of an MTP draft consumes the state of the layer below; else every layer the target's
    frozen         the draft has no memory of its own, and reads the target's rows
    tracked_every  of layers that keep a state: rows from one state to the next that a prefill tracks for the prefix cache, as
                   many as a chunk of SGLang's kernels has
    window         how far back a row of a layer with a sliding window sees: so many rows before its own. 0: no such layers
    page           the page size that SGLang's attention takes; 0: any
    min_share      every accept length 1..num_steps+1 occurs in at least this share of rounds, for num_steps 1..5 (measured
                   over 24 prompts, 6 of a deep target, by tests/families/test_acceptance_profile.py)
    """

    name: str
    family: str
    target: LlamaShape
    draft: LlamaShape
    intermediate_size: int
    seed: int
    noise: float
    attention_gain: float
    mlp_gain: float
    min_share: float
    max_position: int = 4096
    target_hidden: Literal["post_norm", "pre_norm", "aux", "none"] = "post_norm"
    draft_vocab_size: int | None = None
    head_norms: tuple[Literal["norm_before_fc", "fc_norm", "norm_output"], ...] = ()
    mtp_layers: int = 0
    chained: bool = False
    window: int = 0
    frozen: bool = False
    tracked_every: int = 0
    page: int = 0

    @property
    def end_of_sequence(self) -> int:
        """The target's end-of-sequence token."""
        return self.target.vocab_size - 1

    @property
    def kv_heads(self) -> int:
        """KV heads of the one that has fewer, target or draft: ranks share them out evenly. With latent attention each head has
        its own, made of a row that is whole on every rank."""
        shapes = (self.target, self.draft)
        return min(shape.num_heads if shape.latent is not None else shape.num_kv_heads for shape in shapes)

    @property
    def narrowest_head(self) -> int:
        """The smaller width of a head, target's or draft's."""
        return min(self.target.head_dim, self.draft.head_dim)

    @property
    def drafts(self) -> tuple[str, ...]:
        """What the draft's KV pools are called in a trace, by layer."""
        return () if self.frozen else draft_parts(self.mtp_layers)

    @property
    def algorithm(self) -> Literal["EAGLE", "EAGLE3", "STANDALONE"]:
        """Which head the draft is, by SGLang's name for it."""
        names: dict[str, Literal["EAGLE3", "STANDALONE"]] = {"aux": "EAGLE3", "none": "STANDALONE"}
        return names.get(self.target_hidden, "EAGLE")

    @property
    def own_window(self) -> bool:
        """Whether a window of the draft (`draft_window`) is the head's own, in all its forwards; else it is draft decode's."""
        return self.algorithm == "EAGLE3" and self.draft.latent is None

    @property
    def is_eagle(self) -> bool:
        """Whether SGLang's EAGLE workers run the draft: it reads states, and has rows of its own."""
        return self.reads_states and not self.frozen

    @property
    def single_head(self) -> bool:
        """Whether the draft is one head of EAGLE or EAGLE-3, which drafts on by itself."""
        return self.is_eagle and not self.mtp_layers

    @property
    def samples_drafts(self) -> bool:
        """Whether SGLang has rejection sampling for the draft: one vocabulary, and a worker that keeps the draft's
        probabilities."""
        return self.is_eagle and self.draft_vocab_size is None

    @property
    def reads_states(self) -> bool:
        """Whether the draft consumes hidden states; else it is a plain language model, and nothing of its is handed on."""
        return self.target_hidden != "none"


def draft_parts(layers: int) -> tuple[str, ...]:
    """What the KV pools of a draft of so many layers are called in a trace; 0: a single head."""
    return ("draft", *(f"draft{layer}" for layer in range(1, layers)))


def llama_shape(
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    vocab_size: int,
    aux_layers: tuple[int, ...] = (),
    *,
    pre_norm: bool = False,
    qk_norm: bool = False,
) -> LlamaShape:
    """A Llama of these sizes, with heads of 16."""
    return LlamaShape(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=16,  # the smallest block the attention kernels work on without padding
        rope_theta=10000.0,
        rms_norm_eps=1e-6,
        aux_layers=aux_layers,
        pre_norm=pre_norm,
        qk_norm=qk_norm,
    )


# Weights that several families have: in the order in which they are drawn.


def noisy(recipe: Recipe, tensor: Tensor, normal: Normal) -> Tensor:
    """A tensor of the target with the noise that separates the draft from it."""
    return tensor + normal(*tensor.shape, std=recipe.noise * float(tensor.std()))


def attention_weights(shape: LlamaShape, gain: float, normal: Normal) -> Weights:
    """A Llama's projections. Scores have std 1.5: attention that picks a few tokens, neither uniform nor a single one."""
    size, heads, kv_heads = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return {
        "self_attn.q_proj.weight": normal(heads, size, std=(1.5 / size) ** 0.5),
        "self_attn.k_proj.weight": normal(kv_heads, size, std=(1.5 / size) ** 0.5),
        "self_attn.v_proj.weight": normal(kv_heads, size, std=size**-0.5),
        "self_attn.o_proj.weight": normal(size, heads, std=gain * heads**-0.5),
    }


def gated_weights(prefix: str, size: int, inner: int, gain: float, normal: Normal) -> Weights:
    """A gated feed-forward part, of width `inner`."""
    return {
        f"{prefix}gate_proj.weight": normal(inner, size, std=size**-0.5),
        f"{prefix}up_proj.weight": normal(inner, size, std=size**-0.5),
        f"{prefix}down_proj.weight": normal(size, inner, std=2 * gain * inner**-0.5),
    }


# A family has the arithmetic in `reference/`. Its file holds the rest: its recipes, the weights of its draft, how its
# checkpoint is laid out, SGLang's classes that serve it, what its pools keep, and its limits. weights.py, store.py and the
# engine's boot/ ask a Family and know no family by name.


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
    dp_attention   whether SGLang's class of the target runs where each rank has requests of its own
    limits         what the family's real models have and the reference or the recipes lack, in words
    draft_weights  (recipe, target, normal) -> the draft's tensors, by the names of its head; it may change the target
    heads          (recipe, draft, embedding [V, H], lm_head [V, H], proposes [N]) in float64 -> the reference's heads, by layer
    checkpoint     (recipe, target, draft) -> both parts, by the names and configurations that SGLang reads
    vllm_method    what vLLM's speculative_config calls its drafts; empty: eagletwin does not run it there
    on_vllm        the draft's part -> the same by the names and configurations that vLLM reads
    not_on_sglang  why eagletwin does not run it on SGLang; empty: it does
    asked_for      searches draw it only where it is asked for: a live bug shows in each of its chains
    arguments      recipe -> fields of SGLang's ServerArgs that the family needs
    environment    SGLang's own switches that are set for its cases
    """

    name: str
    recipes: tuple[Recipe, ...]
    draft_weights: Callable[[Recipe, Weights, Normal], Weights]
    heads: Callable[[Recipe, Weights, Tensor, Tensor, Tensor], tuple[Head, ...]]
    checkpoint: Callable[[Recipe, Weights, Weights], tuple[Part, Part]]
    vllm_method: Literal["", "eagle", "eagle3", "mtp", "draft_model"] = ""
    on_vllm: Callable[[Part], Part] = lambda draft: draft
    not_on_sglang: str = ""
    asked_for: bool = False
    arguments: Callable[[Recipe], Mapping[str, Any]] = lambda recipe: MappingProxyType({})
    environment: Mapping[str, str] = field(default_factory=dict)
    layer_weights: Callable[[Recipe, int, Normal], Weights] | None = None
    stored: Literal["rows", "latent rows"] = "rows"
    modules: tuple[str, ...] = ()
    norms_less: int = 0
    names_type: bool = False
    one_checkpoint: bool = False
    dp_attention: bool = False
    limits: tuple[str, ...] = ()


# What families have in common whose layers keep a state, but for one in so many, which attends.

# Rows from one state to the next that rounds track for the prefix cache: as many as a chunk of SGLang's kernels of the gated
# delta rule has, which is the least that it admits for them.
TRACKED_EVERY = 64


def state_or_attention_layer(
    recipe: Recipe, number: int, normal: Normal, *, keeps: MakeWeights, attends: MakeWeights, feeds: MakeWeights
) -> Weights:
    """A decoder layer of the target: the last one of every `attends_every` attends, the others keep a state."""
    size = recipe.target.hidden_size
    mixes = keeps if recipe.target.keeps_state(number) else attends
    return {
        "input_layernorm.weight": 1 + normal(size, std=0.1),
        **mixes(recipe, normal),
        "post_attention_layernorm.weight": 1 + normal(size, std=0.1),
        **feeds(recipe, normal),
    }
