"""Which hidden states a recipe feeds (DESIGN §2), by what they are and not by what somebody calls them."""

import pytest
import torch

from eagletwin.harness.models.recipes import RECIPES
from eagletwin.harness.models.weights import model_pair
from eagletwin.reference.chain import draft_chain
from eagletwin.reference.eagle import draft_rows
from eagletwin.reference.llama import causal, rms_norm, target_rows


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_the_target_feeds_its_state_after_the_final_norm(name: str) -> None:
    recipe, weights = RECIPES[name], model_pair(name).reference_target()
    rows = target_rows(weights, recipe.target, torch.arange(9))
    assert recipe.target_hidden == "post_norm"
    normed = rms_norm(rows.residual, weights["model.norm.weight"], recipe.target.rms_norm_eps)
    assert torch.equal(rows.hidden, normed)
    assert (rows.hidden - rows.residual).abs().max() > 0.1  # the two can be told apart
    assert torch.equal(rows.logits, rows.hidden @ weights["lm_head.weight"].T)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_the_draft_feeds_on_its_residual_sum_without_a_norm(name: str) -> None:
    recipe, pair = RECIPES[name], model_pair(name)
    head, tokens = pair.reference_head(recipe), torch.arange(9)
    hidden = target_rows(pair.reference_target(), recipe.target, tokens).hidden
    assert recipe.draft_hidden == "residual"
    rows = draft_rows(head, tokens[1:], hidden[:8], torch.arange(8), causal(8))
    assert torch.equal(rows.logits, rows.hidden @ head.lm_head.T)  # and sends the same state to the LM head
    chain = draft_chain(head, tokens, hidden, num_steps=2)
    assert (chain.hidden[0] - rows.hidden[-1]).abs().max() < 1e-11
    assert not any("norm.weight" in name and "layers." not in name for name in head.weights)  # there is no final norm


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_the_same_recipe_gives_the_same_weights(name: str) -> None:
    first = model_pair(name)
    model_pair.cache_clear()
    assert model_pair(name).digest == first.digest
    assert all(tensor.dtype == torch.float32 for tensor in (*first.target.values(), *first.draft.values()))
