"""Multi-layer drafts in the reference: what each row of each layer consumes, and what provisional rows become."""

import pytest
import torch
from torch import Tensor

from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference.eagle import DraftRows, draft_rows
from eagletwin.reference.llama import causal, target_rows
from eagletwin.reference.mtp import consumed, draft_extend, is_provisional

BOTH = pytest.mark.parametrize("name", ["llama-mtp", "llama-mtp-chain"])
X = torch.arange(10, 20)  # x[0..9]: the prompt of ten


@pytest.mark.parametrize(
    ("known", "rows", "expected"),
    [
        # the prompt is over, and x[9] is the token that the target chose: rows 0..8, K = M = 9
        (9, range(6, 9), [[17, 18, 19], [18, 19, 91], [19, 91, 92]]),
        # a chunk of rows 2..4 in the middle: all is known
        (9, range(2, 5), [[13, 14, 15], [14, 15, 16], [15, 16, 17]]),
        # a chunk that ends at 8: the window of layer 2 ends behind the prompt, and its last token is what layer 1 proposed
        (9, range(6, 8), [[17, 18], [18, 19], [19, 92]]),
        # one row, and a window longer than it
        (3, range(2, 3), [[13], [91], [92]]),
    ],
)
def test_row_i_of_layer_k_consumes_token_i_1_k_and_past_what_is_known_the_drafts(
    known: int, rows: range, expected: list[list[int]]
) -> None:
    found = [consumed(X[: known + 1], [91, 92, 93], layer, rows).tolist() for layer in range(3)]
    assert found == expected
    for layer, tokens in enumerate(found):
        assert [token > 90 for token in tokens] == [is_provisional(row, layer, known) for row in rows]


def _model(name: str) -> tuple[tuple, bool, Tensor, Tensor]:  # type: ignore[type-arg]
    recipe, pair = RECIPES[name], model_pair(name)
    tokens = torch.randint(0, 96, (14,), generator=torch.Generator().manual_seed(3))
    hidden = target_rows(pair.reference_target(), recipe.target, tokens).hidden
    return pair.reference_heads(recipe), recipe.chained, tokens, hidden


@BOTH
def test_a_layer_is_the_head_over_its_tokens_and_the_targets_state_or_the_layer_belows(name: str) -> None:
    heads, chained, tokens, hidden = _model(name)
    layers = draft_extend(heads, chained, tokens, hidden, range(9), [None] * 4, [1, 2, 3, 4])  # all is known
    state = hidden[:9]
    for layer, (head, rows) in enumerate(zip(heads, layers, strict=True)):
        by_hand = draft_rows(head, tokens[1 + layer : 10 + layer], state, torch.arange(9), causal(9))
        assert torch.equal(rows.hidden, by_hand.hidden)
        assert torch.equal(rows.keys, by_hand.keys)
        state = by_hand.hidden if chained else state


@BOTH
def test_the_layers_draft_on_from_each_others_proposals(name: str) -> None:
    heads, chained, tokens, hidden = _model(name)
    layers = draft_extend(heads, chained, tokens, hidden, range(13), [None] * 4)
    drafted = [int(layer.logits[-1].argmax()) for layer in layers]
    followed = draft_extend(heads, chained, tokens, hidden, range(13), [None] * 4, drafted)
    assert all(torch.equal(one.logits, other.logits) for one, other in zip(layers, followed, strict=True))
    other = draft_extend(heads, chained, tokens, hidden, range(13), [None] * 4, [(drafted[0] + 1) % 96, *drafted[1:]])
    assert torch.equal(other[0].logits, layers[0].logits)
    assert not torch.equal(other[1].logits[-1], layers[1].logits[-1])  # layer 1 consumed it


@BOTH
def test_rows_in_two_extends_are_the_same_if_all_was_known_and_keep_a_draft_if_it_was_not(name: str) -> None:
    heads, chained, tokens, hidden = _model(name)
    whole = draft_extend(heads, chained, tokens, hidden, range(13), [None] * 4, [5, 6, 7, 8])
    for known, same in ((13, True), (6, False)):  # rows 0..5 when x[0..known] is known, then rows 6..12
        first = draft_extend(heads, chained, tokens[: known + 1], hidden, range(6), [None] * 4, [5, 6, 7, 8])
        second = draft_extend(heads, chained, tokens, hidden, range(6, 13), first, [5, 6, 7, 8])
        for layer in range(4):
            joined = torch.cat([first[layer].keys, second[layer].keys], 1)
            wrong = ((joined - whole[layer].keys).abs().amax((0, 2, 3)) > 1e-9).nonzero().flatten().tolist()
            stale = [] if same else [row for row in range(6) if is_provisional(row, layer, known)]
            if chained and stale:  # what attends to a stale row is off, too, and handed to the layer above
                assert wrong[: len(stale)] == stale
            else:
                assert wrong == stale
    assert isinstance(second[0], DraftRows)
