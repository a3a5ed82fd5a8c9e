"""Drafting behind every position of a text, against drafting behind each."""

import functools
from itertools import product

import pytest
import torch

from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference.chain import Chain, draft_chain
from eagletwin.reference.everywhere import chains_everywhere, layers_everywhere
from eagletwin.reference.llama import target_rows
from eagletwin.reference.mtp import draft_extend

from ..rows import long, spread

SAME = 1e-9  # float64, of logits of a few units
LENGTH = 21


@functools.cache
def _text(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    recipe = RECIPES[name]
    tokens = torch.randint(0, recipe.target.vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(5))
    return tokens, target_rows(model_pair(name).reference_target(), recipe.target, tokens).hidden


@functools.cache
def _alone(name: str, committed: int, num_steps: int) -> Chain:
    """The chain behind x[0..committed], along the text. However long the blocks are, it is this one."""
    tokens, hidden = _text(name)
    follow = [*tokens[committed + 1 : committed + num_steps + 1].tolist(), *[0] * num_steps][:num_steps]
    head = model_pair(name).reference_head(RECIPES[name])
    return draft_chain(head, tokens[: committed + 1], hidden, num_steps, drafted=follow)


@pytest.mark.parametrize(
    ("name", "block"),
    spread(
        product(sorted(name for name in RECIPES if not (RECIPES[name].mtp_layers or RECIPES[name].frozen)), [7, 1, 4, 64]),
        lambda row: row[0],
        lambda row: row[1],
    ),
)
def test_a_chain_behind_every_position_is_the_chain_behind_each(name: str, block: int) -> None:
    head, num_steps = model_pair(name).reference_head(RECIPES[name]), 3
    tokens, hidden = _text(name)
    seen = []
    for first, logits in chains_everywhere(head, tokens, hidden, num_steps, block):
        for offset, ours in enumerate(logits):
            committed = first + offset
            known = min(num_steps, LENGTH - committed)
            alone = _alone(name, committed, num_steps)
            finite = alone.logits[:known].isfinite()
            assert torch.equal(finite, ours[:known].isfinite())
            assert (ours[:known] - alone.logits[:known])[finite].abs().max() < SAME
            seen.append(committed)
    assert seen == list(range(1, LENGTH))


@pytest.mark.parametrize("block", [*long(1), 7, *long(64)])
@pytest.mark.parametrize("name", sorted(name for name in RECIPES if RECIPES[name].mtp_layers and name != "step-3.5"))
def test_layers_behind_every_position_are_the_layers_behind_each(name: str, block: int) -> None:
    recipe = RECIPES[name]
    heads = model_pair(name).reference_heads(recipe)
    tokens, hidden = _text(name)
    seen = []
    for first, logits in layers_everywhere(heads, recipe.chained, tokens, hidden, block):
        for offset, ours in enumerate(logits):
            committed = first + offset
            follow = [*tokens[committed + 1 :].tolist(), *[0] * len(heads)][: len(heads)]
            rows = range(committed)
            alone = draft_extend(
                heads, recipe.chained, tokens[: committed + 1], hidden, rows, [None] * len(heads), proposals=follow
            )
            for layer in range(min(len(heads), LENGTH - committed)):
                assert (ours[layer] - alone[layer].logits[-1]).abs().max() < SAME
            seen.append(committed)
    assert seen == list(range(1, LENGTH))
