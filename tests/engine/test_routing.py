"""A tie in a choice of experts: an engine that decides it otherwise is equal, and one that chooses wrongly is not."""

from unittest import mock

import pytest
import torch

from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.core.patch import Edit
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.core.verdict import Verdict
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.weights import model_pair
from eagletwin.harness.judge import judge as judge_module
from eagletwin.harness.judge.bounds import FLOAT32
from eagletwin.harness.judge.judge import judge
from eagletwin.harness.judge.routing import Nudge, nudges
from eagletwin.reference.llama import target_rows

from .conftest import Runner

RECIPE = RECIPES["deepseek-nextn"]
LENGTH, SEQUENCES = 24, 80
NEAR, FAR = FLOAT32.tie / 4, 0.02  # a bias by which a router of the engine is off


def _prompt_that_a_bias_changes(size: float) -> tuple[tuple[int, ...], int]:
    """A prompt whose last row alone goes to another expert if this one's bias is so much larger; and the expert."""
    weights = model_pair(RECIPE.name).reference_target()
    generator = torch.Generator().manual_seed(8)
    tokens = torch.randint(0, RECIPE.target.vocab_size - 1, (SEQUENCES * LENGTH,), generator=generator)
    lengths = [LENGTH] * SEQUENCES
    exact = target_rows(weights, RECIPE.target, tokens, lengths).hidden
    for expert in range(8):
        nudged = target_rows(Nudge("target", expert, size).of("target", weights), RECIPE.target, tokens, lengths).hidden
        moved = ((nudged - exact).abs().amax(1) > 0.01).view(SEQUENCES, LENGTH)
        for sequence, row in moved.nonzero().tolist():
            if row >= 2 and not moved[sequence, :row].any():
                begin = sequence * LENGTH
                return tuple(tokens[begin : begin + row + 1].tolist()), expert
    raise AssertionError(f"no row of {len(tokens)} is that near to a tie")


def _run(run: Runner, size: float) -> tuple[Trace, Verdict]:
    prompt, expert = _prompt_that_a_bias_changes(size)
    case = Case(
        name="routing",
        model=RECIPE.name,
        num_steps=1,
        chunked_prefill_size=512,
        requests=(Request(id="a", prompt=prompt, max_new_tokens=1),),
    )
    biased = f"torch.nn.functional.one_hot(torch.tensor({expert}), 8) * {size}"
    edit = Edit(
        target="sglang.srt.layers.moe.topk.biased_grouped_topk_impl",
        match="+ correction_bias.view(",
        replacement=f"+ (correction_bias + {biased}).view(",
    )
    return run(case, edit)


@pytest.mark.slow
def test_a_tie_that_the_engine_decided_otherwise_is_adopted(run: Runner) -> None:
    trace, verdict = _run(run, NEAR)
    assert (verdict.status, verdict.adopted, verdict.ties) == ("equal", 1, 1), verdict
    with mock.patch.object(judge_module, "nudges", return_value=()):
        blind = judge(trace)
    assert (blind.status, blind.rule) == ("diverged", "target.hidden")


@pytest.mark.slow
def test_another_choice_than_a_tie_is_a_divergence(run: Runner) -> None:
    _, verdict = _run(run, FAR)
    assert (verdict.status, verdict.rule) == ("diverged", "target.hidden"), verdict


def test_only_a_model_with_experts_has_such_ties_and_only_where_numbers_follow_from_them() -> None:
    assert not list(nudges(RECIPES["llama-tiny"], "target.hidden", FLOAT32))
    assert not list(nudges(RECIPE, "draft.positions", FLOAT32))
    found = list(nudges(RECIPE, "draft.kv", FLOAT32))
    assert {nudge.part for nudge in found} == {"draft"}
    assert {nudge.expert for nudge in found} == set(range(8))
    assert max(nudge.size for nudge in found) == FLOAT32.tie
