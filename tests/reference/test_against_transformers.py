"""The target of the reference against transformers: rows, adapters, windows, experts and rotary embeddings."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from eagletwin.harness.core.case import Adapter
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.adapters import make_adapter, pad_adapter
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference.experts import CHOSEN, WITHIN, follow_routing, ranked_by, route_clamped
from eagletwin.reference.layers import LowRank, apply_adapter, frequencies, rotate
from eagletwin.reference.llama import causal, in_window, target_rows
from eagletwin.reference.sizes import ExpertShape, LlamaShape, RopeScaling

from .beside import fused

# The target of the reference against an outside implementation.


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
        and recipe.target.compressed is None
    ),
)  # test_states_against_transformers.py and test_latent_against_transformers.py have the others
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


# Adapters of the reference against an outside implementation: transformers' own model, with the adapter beside its maps.


ADAPTERS = (Adapter(), Adapter(seed=2, rank=8, on="mlp"), Adapter(seed=4, rank=3, on="attention"))


def exact(model: str, adapter: Adapter) -> dict[str, LowRank]:
    return {
        name: LowRank(part.down.double(), part.up.double(), part.scale) for name, part in make_adapter(model, adapter).items()
    }


def beside(map_: nn.Module, part: LowRank) -> None:
    """The map's output, and behind it what the adapter adds: two small maps, one after the other."""

    def add(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return output + part.scale * linear(linear(inputs[0], part.down), part.up)

    map_.register_forward_hook(add)


@pytest.mark.slow  # the import of transformers
@pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.on)
@pytest.mark.parametrize("name", ["llama-gqa", "qwen3-eagle3"])
def test_every_row_equals_transformers_own_model_with_the_adapter_beside_it(name: str, adapter: Adapter) -> None:
    parts, model, shape = exact(name, adapter), _model(name), RECIPES[name].target
    tokens = torch.randint(0, shape.vocab_size, (21,), generator=torch.Generator().manual_seed(5))
    for weight, part in parts.items():
        beside(model.get_submodule(weight.removesuffix(".weight")), part)
    with torch.no_grad():
        theirs = model(tokens[None], use_cache=True)
    ours = target_rows(apply_adapter(model_pair(name).reference_target(), parts), shape, tokens)
    pairs = [(ours.logits, theirs.logits[0])]
    for layer in range(shape.num_layers):
        pairs.append((ours.values[layer], theirs.past_key_values.layers[layer].values[0].transpose(0, 1)))
    for mine, other in pairs:
        assert (mine - other).abs().max() <= 1e-6 * other.abs().max()


@pytest.mark.parametrize("name", ["llama-tiny", "llama-eagle3"])
def test_an_adapter_changes_many_of_the_targets_choices(name: str) -> None:
    """Else a row of another adapter could pass for one's own."""
    shape, weights = RECIPES[name].target, model_pair(name).reference_target()
    tokens = torch.randint(0, shape.vocab_size, (64,), generator=torch.Generator().manual_seed(7))
    plain = target_rows(weights, shape, tokens).logits.argmax(-1)
    for adapter in ADAPTERS:
        changed = target_rows(apply_adapter(weights, exact(name, adapter)), shape, tokens).logits.argmax(-1)
        assert float((plain != changed).double().mean()) > 0.05


def test_a_wider_mlp_computes_the_same() -> None:
    parts = make_adapter("llama-tiny", Adapter(seed=3, rank=4))
    wide = pad_adapter(parts, 64)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1))
    for name, part in parts.items():
        inputs, outputs = part.down.shape[1], part.up.shape[0]
        given = torch.zeros(5, wide[name].down.shape[1])
        given[:, :inputs] = x[:, :1].expand(-1, inputs) + torch.arange(inputs)
        out = linear(linear(given, wide[name].down), wide[name].up)
        plain = linear(linear(given[:, :inputs], part.down), part.up)
        assert torch.allclose(out[:, :outputs], plain, rtol=1e-5)
        assert not out[:, outputs:].any()


# The target of gpt-oss: windows, sinks, biases and experts with clamped gates, against transformers' own model.


RECIPE = RECIPES["gpt-oss-eagle3"]


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    return model_pair(RECIPE.name).reference_target()


@pytest.mark.slow  # the import of transformers
def test_every_row_equals_transformers_gpt_oss_in_float64(weights: dict[str, Tensor]) -> None:
    from transformers import GptOssConfig, GptOssForCausalLM

    shape, clamped = RECIPE.target, RECIPE.target.clamped
    assert clamped is not None
    config = GptOssConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=clamped.inner,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rms_norm_eps=shape.rms_norm_eps,
        num_local_experts=clamped.count,
        num_experts_per_tok=clamped.chosen,
        sliding_window=max(shape.windows),
        layer_types=[("full_attention", "sliding_attention")[window > 0] for window in shape.windows],
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        attention_bias=True,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    model = GptOssForCausalLM(config).double().eval()
    model.load_state_dict(weights)
    tokens = torch.randint(0, shape.vocab_size, (33,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        theirs = model.model(tokens[None], output_hidden_states=True)
        logits = model.lm_head(theirs.last_hidden_state)[0]
    ours = target_rows(weights, shape, tokens)
    handed = torch.cat([theirs.hidden_states[layer + 1][0] for layer in shape.aux_layers], -1)
    # transformers works out its rotary angles in float32 whatever the dtype: 1e-6 of the largest number is what that leaves
    for mine, other in ((ours.hidden, handed), (ours.logits, logits)):
        assert (mine - other).abs().max() <= 1e-6 * other.abs().max()


@pytest.mark.parametrize(
    "missing", ["self_attn.sinks", "mlp.router.bias", "mlp.experts.down_proj_bias", "self_attn.o_proj.bias"]
)
def test_no_part_of_it_is_too_small_to_be_seen(weights: dict[str, Tensor], missing: str) -> None:
    """Ten times the bound of a float, in nine rows of ten."""
    tokens = torch.randint(0, RECIPE.target.vocab_size, (33,), generator=torch.Generator().manual_seed(3))
    right = target_rows(weights, RECIPE.target, tokens).hidden
    nothing = -torch.inf if missing == "self_attn.sinks" else 0.0
    without = {name: torch.full_like(tensor, nothing) if name.endswith(missing) else tensor for name, tensor in weights.items()}
    off = (target_rows(without, RECIPE.target, tokens).hidden - right).abs().amax(1) / right.abs().amax(1)
    assert (off > 1e-3).float().mean() > 0.9


def test_gates_reach_their_limit_and_every_expert_is_chosen(weights: dict[str, Tensor]) -> None:
    clamped = RECIPE.target.clamped
    assert clamped is not None
    inner = torch.randn(200, RECIPE.target.hidden_size, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    prefix = "model.layers.1.mlp."
    chosen = route_clamped(weights, prefix, clamped, inner)
    assert chosen.experts.unique().tolist() == list(range(clamped.count))
    assert torch.allclose(chosen.weight.sum(-1), torch.ones(200, dtype=torch.float64))
    both = inner @ weights[f"{prefix}experts.gate_up_proj"][0]
    assert 0 < (both.abs() > clamped.limit).double().mean() < 0.2


# Stretched rotary embeddings against transformers' own functions.


HALF, THETA, ORIGINAL = 32, 10000.0, 2048

# What a config.json says, and what it means here.
FORMS: dict[str, tuple[dict[str, object], RopeScaling]] = {
    "linear": (
        {"rope_type": "linear", "factor": 4.0},
        RopeScaling(kind="linear", factor=4.0),
    ),
    "llama3": (
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        RopeScaling(kind="llama3", factor=8.0, original=ORIGINAL, seldom=1.0, often=4.0),
    ),
    "yarn": (
        {"rope_type": "yarn", "factor": 4.0},
        RopeScaling(kind="yarn", factor=4.0, original=ORIGINAL, amplitude=1.1386294361119891),
    ),
    "yarn without whole pairs": (
        {"rope_type": "yarn", "factor": 32.0, "truncate": False, "beta_fast": 20.0, "beta_slow": 2.0},
        RopeScaling(
            kind="yarn", factor=32.0, original=ORIGINAL, seldom=2.0, often=20.0, amplitude=1.3465735902799727, truncate=False
        ),
    ),
}


@pytest.mark.slow  # the import of transformers
@pytest.mark.parametrize("form", sorted(FORMS))
def test_frequencies_are_those_of_transformers(form: str) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    said, scaling = FORMS[form]
    config = LlamaConfig(
        hidden_size=4 * 2 * HALF,
        num_attention_heads=4,
        head_dim=2 * HALF,
        max_position_embeddings=ORIGINAL * 8,
        rope_parameters={"rope_theta": THETA, "original_max_position_embeddings": ORIGINAL, **said},
    )
    theirs, amplitude = ROPE_INIT_FUNCTIONS[str(said["rope_type"])](config, torch.device("cpu"))
    ours = frequencies(HALF, THETA, scaling)
    # transformers works in float32
    assert (ours - theirs.double()).abs().max() <= 1e-6 * ours.max()
    assert amplitude == pytest.approx(scaling.amplitude, rel=1e-12)
    assert not torch.equal(ours, frequencies(HALF, THETA)), "this form must change something"


def test_amplitude_multiplies_what_is_turned() -> None:
    x, positions = torch.ones(3, 1, 2 * HALF, dtype=torch.float64), torch.arange(3)
    plain = RopeScaling(kind="yarn", factor=4.0, original=ORIGINAL)
    louder = RopeScaling(kind="yarn", factor=4.0, original=ORIGINAL, amplitude=2.0)
    assert torch.allclose(rotate(x, positions, THETA, louder), 2 * rotate(x, positions, THETA, plain))


# Layers with a window: what a row sees. test_against_transformers.py has them against transformers' own.


def test_a_row_sees_the_last_rows_of_those_before_it() -> None:
    sees = in_window(causal(6), 3)
    assert [row.nonzero().flatten().tolist() for row in sees] == [[0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]]
    assert torch.equal(in_window(causal(6), 0), causal(6))


def test_on_a_branch_of_a_tree_only_its_own_rows_are_counted() -> None:
    """Prefix 0 1 2, node 3 behind it, nodes 4 and 5 behind that, node 6 behind 5: nodes of other branches take no room."""
    sees = torch.tensor([[1, 1, 1, 1, 0, 1, 1]], dtype=torch.bool)
    assert in_window(sees, 4)[0].nonzero().flatten().tolist() == [2, 3, 5, 6]


@pytest.mark.parametrize("window", [1, 4])
def test_sequences_side_by_side_have_windows_of_their_own(window: int) -> None:
    torch.manual_seed(6)
    shape = LlamaShape(
        vocab_size=9,
        hidden_size=16,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=16,
        rope_theta=1e4,
        rms_norm_eps=1e-6,
        windows=(window,),
    )
    names = {"self_attn.q_proj": 16, "self_attn.k_proj": 16, "self_attn.v_proj": 16, "self_attn.o_proj": 16}
    weights = {f"model.layers.0.{name}.weight": torch.randn(16, 16) for name in names}
    weights |= {f"model.layers.0.mlp.{name}_proj.weight": torch.randn(16, 16) for name in ("gate", "up", "down")}
    weights |= {f"model.layers.0.{name}_layernorm.weight": torch.randn(16) for name in ("input", "post_attention")}
    weights |= {"model.norm.weight": torch.randn(16), "model.embed_tokens.weight": torch.randn(9, 16)}
    weights = {name: tensor.double() for name, tensor in (weights | {"lm_head.weight": torch.randn(9, 16)}).items()}
    one, other = torch.randint(0, 9, (7,)), torch.randint(0, 9, (5,))
    together = target_rows(weights, shape, torch.cat([one, other]), [7, 5]).logits
    apart = torch.cat([target_rows(weights, shape, tokens).logits for tokens in (one, other)])
    assert torch.allclose(together, apart, rtol=0, atol=1e-12)


# Experts that somebody else chose: followed where rounding admits them, and nowhere else.


SCORES = torch.tensor([[1.0, 0.9, 0.896, 0.2]], dtype=torch.float64)  # experts 1 and 2 are 0.004 apart


def _followed(score: Tensor, chosen: list[int], within: float, groups: int = 1, kept: int = 1) -> list[int]:
    weights = {f"gate.{CHOSEN}": torch.tensor([chosen]), f"gate.{WITHIN}": torch.tensor(within)}
    shape = ExpertShape(count=score.shape[1], chosen=2, inner=1, affinity="sigmoid", shared=False, groups=groups, kept=kept)
    own = ranked_by(score, 0.0, shape).topk(2).indices
    found: list[int] = follow_routing(weights, "gate.", score, own, groups, kept)[0].tolist()
    return found


@pytest.mark.parametrize(
    ("chosen", "within", "expected"),
    [
        ([0, 2], 0.005, [0, 2]),
        ([0, 2], 0.003, [0, 1]),  # they are farther apart
        ([1, 2], 0.005, [0, 1]),  # so is the best one
        ([1, 2], 0.2, [1, 2]),
        ([0, 3], 0.005, [0, 1]),
        ([-1, -1], 1.0, [0, 1]),  # nobody says what was chosen
    ],
)
def test_what_was_chosen_is_followed_within_the_bound(chosen: list[int], within: float, expected: list[int]) -> None:
    assert _followed(SCORES, chosen, within) == expected


def test_the_bound_is_a_share_of_the_largest_score() -> None:
    assert _followed(10 * SCORES, [0, 2], 0.005) == [0, 2]
    assert _followed(10 * SCORES, [0, 2], 0.003) == [0, 1]


def test_nothing_is_followed_where_nothing_is_given() -> None:
    own = SCORES.topk(2).indices
    assert follow_routing({}, "gate.", SCORES, own) is own


def test_a_tie_of_groups_admits_experts_of_another_group() -> None:
    # groups of 1.5, 0.902, 0.9 and 0.1, of which two are kept: experts 0 and 2 are the best of them
    score = torch.tensor([[1.1, 0.4, 0.6, 0.302, 0.7, 0.2, 0.05, 0.05]], dtype=torch.float64)
    assert _followed(score, [0, 4], 0.01, groups=4, kept=2) == [0, 4]  # of the other group, which ties
    assert _followed(score, [0, 4], 0.0005, groups=4, kept=2) == [0, 2]
    assert _followed(score, [0, 1], 0.01, groups=4, kept=2) == [0, 2]  # whichever is kept, it has a better one
    score[0, 3] = 0.4  # the second group has 1.0 now
    assert _followed(score, [0, 4], 0.01, groups=4, kept=2) == [0, 2]


def test_experts_of_more_groups_than_are_kept_are_not_followed() -> None:
    score = torch.full((1, 8), 0.5, dtype=torch.float64)
    own = torch.tensor([[0, 1]])
    weights = {f"gate.{CHOSEN}": torch.tensor([[0, 2]]), f"gate.{WITHIN}": torch.tensor(0.1)}
    assert follow_routing(weights, "gate.", score, own, 4, 1).tolist() == [[0, 1]]
    assert follow_routing(weights, "gate.", score, own, 4, 2).tolist() == [[0, 2]]
