"""Gemma-4 with its assistant: a draft without a memory of its own, which reads the target's rows (SGLang's frozen-KV MTP).

Layers with and without a window take turns, and the last one has none. Each layer of the assistant reads the rows of the
target's last layer of its kind. SGLang's own classes serve both; EAGLE becomes FROZEN_KV_MTP by the name of the draft's.

Conventions, with their outside sources, are in docs/explanation/frozen-kv.md.
"""

from dataclasses import replace

from eagletwin.reference.sizes import GemmaShape, LlamaShape

from .mimo_v2 import ENDING, ENVIRONMENT, WINDOW
from .recipe import Family, Head, Normal, Part, Recipe, Tensor, Weights, llama_shape, sizes

_PLAIN = replace(llama_shape(32, 4, 2, 1, 96), gemma=GemmaShape(theta=1e6, pairs=2, cap=30.0))


def _recipe(name: str, back: int) -> Recipe:
    return Recipe(
        name=name,
        family="gemma4",
        target=replace(_PLAIN, windows=(back + 1, 0) * 2),
        draft=replace(_PLAIN, num_layers=2, windows=(back + 1, 0)),
        intermediate_size=48,
        seed=141,
        noise=0.06,
        attention_gain=0.5,
        mlp_gain=0.5,
        min_share=0.03,
        window=back,
        frozen=True,
    )


# As with MiMo-V2: the window of one is longer than most cases, that of the other ends in every case.
RECIPES = (_recipe("gemma-4-assistant", WINDOW), _recipe("gemma-4-assistant-window", ENDING))


def layer_weights(recipe: Recipe, number: int, normal: Normal) -> Weights:  # noqa: ARG001
    """A decoder layer of the target. Norms on the way out say how much of the stream a half of it is."""
    shape, size, inner = recipe.target, recipe.target.hidden_size, recipe.intermediate_size
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    return {
        "input_layernorm.weight": 1 + normal(size, std=0.1),
        "self_attn.q_proj.weight": normal(heads, size, std=size**-0.5),
        "self_attn.k_proj.weight": normal(kv_heads, size, std=size**-0.5),
        "self_attn.v_proj.weight": normal(kv_heads, size, std=size**-0.5),
        # scores of std 1.5, which are not scaled
        "self_attn.q_norm.weight": 0.6 + normal(shape.head_dim, std=0.06),
        "self_attn.k_norm.weight": 0.6 + normal(shape.head_dim, std=0.06),
        "self_attn.o_proj.weight": normal(size, heads, std=heads**-0.5),
        "post_attention_layernorm.weight": recipe.attention_gain * (1 + normal(size, std=0.1)),
        "pre_feedforward_layernorm.weight": 1 + normal(size, std=0.1),
        "post_feedforward_layernorm.weight": recipe.mlp_gain * (1 + normal(size, std=0.1)),
        "mlp.gate_proj.weight": normal(inner, size, std=size**-0.5),
        "mlp.up_proj.weight": normal(inner, size, std=size**-0.5),
        "mlp.down_proj.weight": normal(size, inner, std=inner**-0.5),
        "layer_scalar": 0.9 + normal(1, std=0.05),
    }


def draft_weights(recipe: Recipe, target: Weights, normal: Normal) -> Weights:
    """The target's last layers and what is behind them with noise, after a projection that takes the embedding."""
    import torch

    size, layers = recipe.draft.hidden_size, recipe.draft.num_layers

    def noisy(tensor: Tensor) -> Tensor:
        spread = float(tensor.std()) if tensor.numel() > 1 else 0.0
        return tensor + normal(*tensor.shape, std=recipe.noise * spread)

    def mixing(*parts: Tensor) -> Tensor:
        joined = torch.cat(parts, 1)
        return joined + normal(*joined.shape, std=recipe.noise * size**-0.5)

    draft: Weights = {}
    for layer in range(layers):
        prefix, own = f"model.layers.{recipe.target.num_layers - layers + layer}.", f"model.layers.{layer}."
        of_layer = {name.removeprefix(prefix): tensor for name, tensor in target.items() if name.startswith(prefix)}
        without = ("self_attn.k_", "self_attn.v_")
        draft |= {own + name: noisy(tensor) for name, tensor in of_layer.items() if not name.startswith(without)}
    draft |= {name: noisy(target[name]) for name in ("model.norm.weight", "lm_head.weight")}
    draft["pre_projection.weight"] = mixing(torch.eye(size), torch.zeros(size, size))
    draft["post_projection.weight"] = mixing(torch.eye(size))
    return draft


def heads(recipe: Recipe, draft: Weights, embedding: Tensor, lm_head: Tensor, proposes: Tensor) -> tuple[Head, ...]:  # noqa: ARG001
    """The one head; a layer of it reads the target's last one of its kind."""
    from eagletwin.reference.draft_heads import FrozenHead

    kinds = [window > 0 for window in recipe.target.windows]
    reads = tuple(max(n for n, kind in enumerate(kinds) if kind == (window > 0)) for window in recipe.draft.windows)
    return (FrozenHead(draft, recipe.draft, embedding, reads),)


def _text(recipe: Recipe, shape: LlamaShape) -> dict[str, object]:
    gemma = shape.gemma
    assert gemma is not None
    return {
        "model_type": "gemma4_text",
        "hidden_activation": "gelu_pytorch_tanh",
        **sizes(recipe, shape),
        "global_head_dim": shape.head_dim,
        "sliding_window": recipe.window + 1,
        "layer_types": [("full_attention", "sliding_attention")[window > 0] for window in shape.windows],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": shape.rope_theta},
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 2 * gemma.pairs / shape.head_dim,
                "rope_theta": gemma.theta,
            },
        },
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        "tie_word_embeddings": False,
    }


def checkpoint(recipe: Recipe, target: Weights, draft: Weights) -> tuple[Part, Part]:
    """A text model, and the assistant around another. SGLang works the sizes of layers with a window out of a model with a
    vision tower alone; of a text model it finds them here."""
    shape = recipe.target
    config = {
        "architectures": ["Gemma4ForCausalLM"],
        **_text(recipe, shape),
        "final_logit_softcapping": shape.gemma.cap if shape.gemma is not None else None,
        "swa_num_key_value_heads": shape.num_kv_heads,
        "swa_head_dim": shape.head_dim,
        "swa_v_head_dim": shape.head_dim,
        "v_head_dim": shape.head_dim,
    }
    assistant = {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": shape.hidden_size,
        "text_config": _text(recipe, recipe.draft) | {"num_kv_shared_layers": recipe.draft.num_layers},
        "tie_word_embeddings": False,
    }
    return Part(config, shape, target), Part(assistant, recipe.draft, draft)


FAMILY = Family(
    name="gemma4",
    recipes=RECIPES,
    draft_weights=draft_weights,
    heads=heads,
    checkpoint=checkpoint,
    layer_weights=layer_weights,
    modules=("sglang.srt.models.gemma4_causal", "sglang.srt.models.gemma4_mtp"),
    environment=ENVIRONMENT,
    limits=(
        "dense feed-forward layers, no embeddings by layer, no layers that share rows",
        "heads of one width, keys and values of their own projections",
        "embeddings that are not tied to the LM head, no centroids",
    ),
)
