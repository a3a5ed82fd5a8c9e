"""Llama with an EAGLE-3 head (arXiv 2503.01840), whose vocabulary is the target's or a part of it. qwen3.py has its head too.

The token that a row consumes reaches the residual sum through attention alone. A trained head learns to pass it on, and this
one is made to: a row attends mostly to itself; its value is the token's embedding, less most of the hidden state, which the
residual sum has from the start and would otherwise pile up from one draft step to the next. Then follow the MLP of the
target's last layer, the final norm and the rows of the LM head, each with noise. Further layers are the target's with noise.
"""

from dataclasses import replace
from functools import partial

from .llama import llama_layer, target_part
from .recipe import Family, Head, Normal, Part, Recipe, Tensor, Weights, llama_shape, noisy

_FULL = Recipe(
    name="llama-eagle3-full",
    family="llama_eagle3",
    target=llama_shape(32, 4, 2, 2, 96, aux_layers=(0, 1, 2)),
    draft=llama_shape(32, 1, 2, 2, 96),
    intermediate_size=48,
    seed=40,
    noise=0.05,
    attention_gain=0.06,
    mlp_gain=0.06,
    target_hidden="aux",
    min_share=0.08,
)
RECIPES = (_FULL, replace(_FULL, name="llama-eagle3", seed=41, min_share=0.06, draft_vocab_size=64))

AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"  # what checkpoints call the target's layers that a head reads
# Scores of a row with itself of 4 * SELF**2 = 13 at heads of 16, and with others of a standard deviation a quarter of that:
# most of the attention is a row's own, and the rest is context.
SELF = 1.8
# Share of the hidden state in queries, keys and the residual sum: enough for a wrong one to show in every number, and so
# little that the token still decides.
CONTEXT = 0.06
# A vocabulary is reduced to the tokens that a target often emits: this one emits them more often than others.
HOT = 1.4
# How far apart the weights of the last norm are, in logarithms, where the next step consumes what it makes.
FED_ON = 0.2


def draft_weights(recipe: Recipe, target: Weights, normal: Normal) -> Weights:
    """Tensors by the names of an EAGLE-3 checkpoint; d2t is int64."""
    import torch

    proposes = torch.arange(recipe.target.vocab_size)
    if recipe.draft_vocab_size is not None:
        # drawn, and so in no order, which makes d2t go up and down
        proposes = normal(recipe.target.vocab_size, std=1.0).argsort()[: recipe.draft_vocab_size]
        target["lm_head.weight"][proposes] *= HOT
    shape, size = recipe.draft, recipe.draft.hidden_size
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    if heads != size or kv_heads != size:
        raise ValueError(f"{recipe.name}: an embedding passes through attention only if heads are as wide as the state")

    with_noise = partial(noisy, recipe, normal=normal)

    def reads(token: float, state: float) -> Tensor:
        """[size, 2 * size]: the embedding times `token`, the hidden state times `state`, and some mixture of the latter."""
        context = normal(size, size, std=CONTEXT * size**-0.5)
        return torch.cat([with_noise(token * torch.eye(size)), state * torch.eye(size) + context], 1)

    last, width = f"model.layers.{recipe.target.num_layers - 1}.", len(recipe.target.aux_layers) * size
    draft = {
        "fc.weight": normal(size, width, std=width**-0.5),
        "midlayer.input_layernorm.weight": 1 + normal(size, std=recipe.noise),
        "midlayer.hidden_norm.weight": 1 + normal(size, std=recipe.noise),
        "midlayer.self_attn.q_proj.weight": reads(SELF, 0.0),
        "midlayer.self_attn.k_proj.weight": reads(SELF, 0.0),
        "midlayer.self_attn.v_proj.weight": reads(1.0, CONTEXT - 1),
        "midlayer.self_attn.o_proj.weight": with_noise(torch.eye(size)),
        "norm.weight": with_noise(target["model.norm.weight"]),
    }
    own = "mlp." if f"{last}mlp.gate_proj.weight" in target else "mlp.experts.0."
    for name in ("post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"):
        draft[f"midlayer.{name}.weight"] = with_noise(target[last + name.replace("mlp.", own) + ".weight"])
    if recipe.draft_vocab_size is not None:
        draft["d2t"] = proposes - torch.arange(len(proposes))
    draft["lm_head.weight"] = with_noise(target["lm_head.weight"][proposes])
    # As far as an argmax goes, a norm whose weights are all about 1 might as well not be there: these are 1/4 to 4, and the
    # LM head takes it back. A state that is fed on takes it along, and is spread less.
    spread = normal(size, std=0.7 if "norm_output" not in recipe.head_norms else FED_ON).exp()
    draft["norm.weight"] *= spread
    draft["lm_head.weight"] /= spread
    return draft | _norms_before_fc(recipe, normal) | _further_layers(recipe, normal)


def _norms_before_fc(recipe: Recipe, normal: Normal) -> Weights:
    """Of the states side by side, or of each of them. Weights far from 1: a norm that is left out shows in every number."""
    states, size = len(recipe.target.aux_layers), recipe.target.hidden_size
    if "norm_before_fc" in recipe.head_norms:
        return {"input_norm.weight": 1 + normal(states * size, std=0.3)}
    if "fc_norm" in recipe.head_norms:
        return {f"fc_norm.{n}.weight": 1 + normal(size, std=0.3) for n in range(states)}
    return {}


def _further_layers(recipe: Recipe, normal: Normal) -> Weights:
    """Layers behind the first: those of a Llama, with the norm before attention by SGLang's name for it."""
    found: Weights = {}
    for layer in range(1, recipe.draft.num_layers):
        for name, tensor in llama_layer(recipe, recipe.draft, normal).items():
            found[f"layers.{layer}.{name.replace('input_layernorm', 'hidden_norm')}"] = tensor
    return found


def heads(recipe: Recipe, draft: Weights, embedding: Tensor, lm_head: Tensor, proposes: Tensor) -> tuple[Head, ...]:  # noqa: ARG001
    """The one head, with an LM head of its own."""
    from eagletwin.reference.draft_heads import Eagle3Head

    return (Eagle3Head(draft, recipe.draft, embedding, proposes, "norm_output" in recipe.head_norms),)


def draft_part(recipe: Recipe, draft: Weights) -> Part:
    """The head's checkpoint. A `draft_vocab_size` of null would also stand for the target's LM head; this one has its own."""
    config: dict[str, object] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": recipe.draft_vocab_size or recipe.target.vocab_size,
        "eagle_config": {AUX_LAYERS: list(recipe.target.aux_layers)},
    }
    for name in recipe.head_norms:
        config[name] = True
    return Part(config, recipe.draft, draft)


def checkpoint(recipe: Recipe, target: Weights, draft: Weights) -> tuple[Part, Part]:
    """Both as they are."""
    return target_part(recipe, target), draft_part(recipe, draft)


def on_vllm(draft: Part) -> Part:
    """vLLM's numbers of auxiliary layers are of those that a state enters, SGLang's of those that it leaves."""
    config = dict(draft.config)
    layers = [number + 1 for number in config["eagle_config"][AUX_LAYERS]]  # type: ignore[index]
    config |= {"eagle_config": {AUX_LAYERS: layers}, AUX_LAYERS: layers}
    return replace(draft, config=config)


FAMILY = Family(
    name="llama_eagle3",
    recipes=RECIPES,
    draft_weights=draft_weights,
    heads=heads,
    checkpoint=checkpoint,
    vllm_method="eagle3",
    on_vllm=on_vllm,
)
