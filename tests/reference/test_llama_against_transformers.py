"""The target of the reference against an outside implementation."""

from typing import Any

import pytest
import torch
from torch import Tensor

from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference.llama import target_rows
from eagletwin.reference.sizes import LlamaShape

from .fused import fused


def _model(name: str) -> Any:
    """transformers' own model with a recipe's weights: a Llama; a Qwen3, which norms queries and keys, with experts or without,
    and may have windows; or a Ministral, which is a Llama with windows."""
    import transformers

    recipe, weights = RECIPES[name], model_pair(name).reference_target()
    shape, sizes = recipe.target, _windows(recipe.target)
    if shape.experts is not None:
        sizes |= {"num_experts": shape.experts.count, "num_experts_per_tok": shape.experts.chosen}
        sizes |= {"moe_intermediate_size": shape.experts.inner, "norm_topk_prob": True, "experts_implementation": "eager"}
        for layer in range(shape.num_layers):
            weights = fused(weights, f"model.layers.{layer}.", shape.experts.count)
    plain = "Ministral" if shape.windows else "Llama"
    kind = "Qwen3Moe" if shape.experts is not None else "Qwen3" if shape.qk_norm else plain
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=recipe.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        rope_theta=shape.rope_theta,
        tie_word_embeddings=False,
        attn_implementation="eager",
        **sizes,
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config).double().eval()
    model.load_state_dict(weights)
    return model


def _windows(shape: LlamaShape) -> dict[str, object]:
    if not shape.windows:
        return {}
    of_layers = [("full_attention", "sliding_attention")[window > 0] for window in shape.windows]
    return {"use_sliding_window": True, "sliding_window": max(shape.windows), "layer_types": of_layers}


@pytest.mark.slow  # the import of transformers
@pytest.mark.parametrize(
    "name",
    sorted(
        name
        for name, recipe in RECIPES.items()
        if not (recipe.target.latent or recipe.target.clamped or recipe.target.states or recipe.target.gemma)
    ),
)  # test_mla.py, test_clamped_experts.py, test_delta.py, test_mamba2.py and test_gemma4.py have the others
def test_every_row_equals_transformers_own_model_in_float64(name: str) -> None:
    recipe, weights, model = RECIPES[name], model_pair(name).reference_target(), _model(name)
    shape = recipe.target
    tokens = torch.randint(0, shape.vocab_size, (33,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        theirs = model.model(tokens[None], use_cache=True, output_hidden_states=True)
        logits = model.lm_head(theirs.last_hidden_state)[0]
    ours = target_rows(weights, shape, tokens)
    # transformers' hidden state n is what enters layer n
    handed = [theirs.hidden_states[layer + 1][0] for layer in shape.aux_layers] or [theirs.last_hidden_state[0]]
    if shape.pre_norm:
        before = model.model.layers[-1].register_forward_hook(lambda _module, _inputs, output: handed.__setitem__(0, output[0]))
        with torch.no_grad():
            model.model(tokens[None])
        before.remove()
    # transformers works out its rotary angles in float32 whatever the dtype, and the softmax of its router: 1e-6 of the largest
    # number is what that leaves. The largest that was seen is 4.9e-7, on a Qwen3; 3.7e-7 on a Qwen3-MoE.
    for mine, other in (
        (ours.hidden, torch.cat(handed, -1)),
        (ours.logits, logits),
        *(_those_kept(ours.keys[layer], theirs.past_key_values.layers[layer].keys[0]) for layer in range(shape.num_layers)),
        *(_those_kept(ours.values[layer], theirs.past_key_values.layers[layer].values[0]) for layer in range(shape.num_layers)),
    ):
        assert (mine - other).abs().max() <= 1e-6 * other.abs().max()


def _those_kept(rows: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    """Of our rows [T, G, D] those that transformers keeps [G, n, D]: of a layer with a window, the last ones."""
    return rows[len(rows) - kept.shape[1] :].transpose(0, 1), kept
