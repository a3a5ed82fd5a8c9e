"""A tie in a choice of experts: an engine that decides it otherwise is equal, and one that chooses wrongly is not."""

from unittest import mock

import msgspec
import pytest
import torch

from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.core.patch import Edit
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.core.verdict import Verdict
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.recipe import Recipe
from eagletwin.harness.families.weights import model_pair
from eagletwin.harness.judge import judge as judge_module
from eagletwin.harness.judge.bounds import FLOAT32
from eagletwin.harness.judge.experts import Nudge, nudges
from eagletwin.harness.judge.judge import judge
from eagletwin.reference.experts import route
from eagletwin.reference.llama import target_rows

from ..rows import long
from .conftest import Runner

LENGTH, SEQUENCES = 24, 80
SEEDS = {"deepseek-nextn": 8, "qwen3-moe-eagle3": 2}  # of prompts, one of which is near to a tie
NEAR, FAR = FLOAT32.tie / 4, 0.02  # a bias by which a router of the engine is off

ROUTERS = "sglang.srt.layers.moe.topk"
CHOSEN = "topk_weights, topk_ids = torch.topk(topk_weights, topk, dim=-1)"
# Model -> where its router is, what stands there, what stands there with a bias, and the rule that a wrong choice breaks.
ROUTED = {
    "deepseek-nextn": (
        f"{ROUTERS}.biased_grouped_topk_impl",
        "+ correction_bias.view(",
        "+ (correction_bias + {bias}).view(",
        "target.hidden",
    ),
    "qwen3-moe-eagle3": (
        f"{ROUTERS}.fused_topk_torch_native",
        CHOSEN,
        "topk_ids = torch.topk(gating_output + {bias}, topk, dim=-1)[1]\ntopk_weights = topk_weights.gather(1, topk_ids)",
        "target.kv",
    ),
}


def _prompt_that_a_bias_changes(recipe: Recipe, size: float) -> tuple[tuple[int, ...], int]:
    """A prompt whose last row alone goes to another expert if this one's bias is so much larger; and the expert."""
    weights, shape = model_pair(recipe.name).reference_target(), recipe.target
    assert shape.experts is not None
    generator = torch.Generator().manual_seed(SEEDS[recipe.name])
    tokens = torch.randint(0, shape.vocab_size - 1, (SEQUENCES * LENGTH,), generator=generator)
    lengths = [LENGTH] * SEQUENCES
    exact = target_rows(weights, shape, tokens, lengths).hidden
    for expert in range(shape.experts.count):
        nudged = target_rows(Nudge("target", expert, size).of("target", weights), shape, tokens, lengths).hidden
        moved = ((nudged - exact).abs().amax(1) > 0.01).view(SEQUENCES, LENGTH)
        for sequence, row in moved.nonzero().tolist():
            if row >= 2 and not moved[sequence, :row].any():
                begin = sequence * LENGTH
                return tuple(tokens[begin : begin + row + 1].tolist()), expert
    raise AssertionError(f"no row of {len(tokens)} is that near to a tie")


def _run(run: Runner, model: str, size: float) -> tuple[Trace, Verdict]:
    recipe = RECIPES[model]
    prompt, expert = _prompt_that_a_bias_changes(recipe, size)
    case = Case(
        name="routing",
        model=model,
        num_steps=1,
        chunked_prefill_size=512,
        requests=(Request(id="a", prompt=prompt, max_new_tokens=1),),
    )
    assert recipe.target.experts is not None
    bias = f"torch.nn.functional.one_hot(torch.tensor({expert}), {recipe.target.experts.count}) * {size}"
    target, match, biased, _ = ROUTED[model]
    return run(case, Edit(target=target, match=match, replacement=biased.format(bias=bias)))


def _untold(trace: Trace) -> Trace:
    """The same of a worker whose choices nobody saw, as in a graph."""
    records = tuple(
        msgspec.structs.replace(record, tensors=tuple(name for name in record.tensors if name != "experts"))
        for record in trace.header.records
    )
    return Trace(msgspec.structs.replace(trace.header, records=records), trace.tensors)


@pytest.mark.slow
@pytest.mark.parametrize("model", ["deepseek-nextn", *long("qwen3-moe-eagle3")])
def test_a_tie_that_the_engine_decided_otherwise_is_adopted(run: Runner, model: str) -> None:
    trace, verdict = _run(run, model, NEAR)
    assert (verdict.status, verdict.adopted, verdict.ties) == ("equal", 1, 1), verdict  # and not unknown
    assert (verdict.excused, [excuse.kind for excuse in verdict.excuses]) == ({"experts": 1}, ["experts"])
    untold = _untold(trace)
    guessed = judge(untold)
    assert (guessed.status, guessed.adopted) == ("equal", 1)  # by asking for each expert in turn
    [nudge] = guessed.excuses
    assert (nudge.kind, nudge.part) == ("nudge", "target")
    assert NEAR <= nudge.size <= FLOAT32.tie
    assert 0 <= nudge.expert < RECIPES[model].target.routed
    with mock.patch.object(judge_module, "nudges", return_value=()):
        told, blind = judge(trace), judge(untold)
    assert (told.status, told.adopted) == ("equal", 1)
    assert (blind.status, blind.rule) == ("diverged", ROUTED[model][3])


@pytest.mark.slow
@pytest.mark.parametrize("model", ["deepseek-nextn", *long("qwen3-moe-eagle3")])
def test_another_choice_than_a_tie_is_a_divergence(run: Runner, model: str) -> None:
    _, verdict = _run(run, model, FAR)
    assert (verdict.status, verdict.rule) == ("diverged", ROUTED[model][3]), verdict


def test_only_a_model_with_experts_has_such_ties_and_only_where_numbers_follow_from_them() -> None:
    recipe = RECIPES["deepseek-nextn"]
    assert not list(nudges(RECIPES["llama-tiny"], "target.hidden", FLOAT32))
    assert not list(nudges(recipe, "draft.positions", FLOAT32))
    found = list(nudges(recipe, "draft.kv", FLOAT32))
    assert {nudge.part for nudge in found} == {"draft"}
    assert {nudge.expert for nudge in found} == set(range(8))
    assert max(nudge.size for nudge in found) == FLOAT32.tie
    assert not list(nudges(RECIPES["qwen3-moe-eagle3"], "draft.kv", FLOAT32))  # its draft has no experts


def test_a_nudge_gives_a_router_without_biases_some_and_changes_no_weight_of_an_expert() -> None:
    shape = RECIPES["qwen3-moe-eagle3"].target.experts
    assert shape is not None
    weights = {"layer.mlp.gate.weight": torch.eye(4).double()}
    nudged = Nudge("target", 2, 0.5).of("target", weights)
    logits = torch.tensor([[3.0, 2.0, 1.6, 0.0]]).double()
    before, after = (route(these, "layer.mlp.", shape, logits) for these in (weights, nudged))
    assert (before.chosen.tolist(), after.chosen.tolist()) == ([[0, 1]], [[0, 2]])
    assert torch.allclose(after.weight, torch.tensor([[3.0, 1.6]]).double().softmax(-1))  # of its own logit, without the bias
    assert Nudge("draft", 2, 0.5).of("target", weights).keys() == weights.keys()
