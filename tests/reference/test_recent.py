"""What draft decode reads of the committed rows, against a head that is run by hand with fewer of them."""

import pytest
import torch

from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference.chain import Recent, committed_rows, draft_chain
from eagletwin.reference.draft_heads import DraftRows
from eagletwin.reference.eagle import draft_rows
from eagletwin.reference.growth import draft_tree
from eagletwin.reference.layout import draft_reads
from eagletwin.reference.llama import target_rows
from eagletwin.reference.rounds import committed_side_by_side, draft_rounds

SAME = 1e-11  # the same float64 sums in another order; rows are of size 1 to 10
READS = Recent(window=3, sink=2)


def test_of_a_prefix_the_first_rows_and_the_last_are_read() -> None:
    assert READS.of(torch.arange(9), 8).int().tolist() == [1, 1, 0, 0, 0, 1, 1, 1, 0]
    assert READS.of(torch.arange(5), 4).int().tolist() == [1, 1, 1, 1, 0]
    assert Recent().of(torch.arange(4), 3).int().tolist() == [1, 1, 1, 0]


@pytest.mark.parametrize("committed", [1, 4, 5, 6, 12])
def test_the_columns_that_the_kernels_list_are_these_rows(committed: int) -> None:
    listed = draft_reads(committed, 0, 1, 1, 3, 1, READS.window, READS.sink)[:-1]
    assert READS.of(torch.arange(committed), committed).nonzero().flatten().tolist() == listed.tolist()


def test_a_step_sees_the_rows_of_its_own_round_and_no_more_of_the_prefix() -> None:
    """The head is run over the rows that are read and nothing else, as if no other row had ever been there."""
    recipe, pair = RECIPES["llama-tiny"], model_pair("llama-tiny")
    head = pair.reference_head(recipe)
    tokens = torch.arange(3, 16)
    hidden = target_rows(pair.reference_target(), recipe.target, tokens).hidden
    chain = draft_chain(head, tokens, hidden, 3, reads=READS)
    rows = committed_rows(head, tokens, hidden)
    committed = len(tokens) - 1
    kept = READS.of(torch.arange(committed), committed).nonzero().flatten()
    before = DraftRows(rows.hidden, rows.logits, rows.keys[:, kept], rows.values[:, kept])
    sees = torch.ones(1, len(kept) + 1, dtype=torch.bool)
    one = draft_rows(head, chain.drafted[:1], rows.hidden[-1:], torch.tensor([committed]), sees, before)
    assert float((one.logits[0] - chain.logits[1]).abs().max()) < SAME
    whole = draft_chain(head, tokens, hidden, 3, drafted=chain.drafted.tolist())
    assert float((whole.logits[0] - chain.logits[0]).abs().max()) < SAME  # the last committed row sees everything
    assert float((whole.logits[1] - chain.logits[1]).abs().max()) > 1e-3


@pytest.mark.parametrize("topk", [1, 3])
def test_all_rounds_at_once_read_what_one_at_a_time_does(topk: int) -> None:
    recipe, pair = RECIPES["llama-tiny"], model_pair("llama-tiny")
    head, tokens = pair.reference_head(recipe), torch.arange(5, 18)
    hidden = target_rows(pair.reference_target(), recipe.target, tokens).hidden
    rows = committed_side_by_side(head, [tokens], hidden[:-1])
    ends = (4, 9, len(tokens) - 1)
    naive = [draft_tree(head, tokens[: end + 1], hidden, topk, 4, reads=READS) for end in ends]
    together = draft_rounds(
        head,
        rows,
        [len(tokens) - 1],
        [(0, end) for end in ends],
        torch.stack([one.tokens for one in naive]),
        torch.stack([one.expanded for one in naive]),
        "true_tree",
        READS,
    )
    for n, one in enumerate(naive):
        assert float((together.logits[n] - one.logits).abs().max()) < SAME
        assert float((together.keys[n] - one.keys).abs().max()) < SAME
