"""Choices, layouts, commits, cuts, windows of rows, steps, penalties and grammars, against results worked out by hand."""

import itertools
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagletwin.harness.core.case import Grammar
from eagletwin.harness.core.grammar import rules_of
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.weights import model_pair
from eagletwin.reference import layout
from eagletwin.reference.adaptive import Knobs, Policy, Tier
from eagletwin.reference.chain import Recent, committed_rows, draft_chain
from eagletwin.reference.cuts import rounding_of, targets_of_float32
from eagletwin.reference.draft_heads import DraftRows
from eagletwin.reference.eagle import draft_rows
from eagletwin.reference.grammar import Automaton
from eagletwin.reference.growth import draft_tree
from eagletwin.reference.layout import draft_columns, draft_reads, physical_slot
from eagletwin.reference.llama import target_rows
from eagletwin.reference.rounds import committed_side_by_side, draft_rounds
from eagletwin.reference.sampling import apply_penalties, held_back, keep_min_p, keep_top_k, keep_top_p
from eagletwin.reference.sizes import branch_pages
from eagletwin.reference.tree import (
    accept_row,
    as_good,
    best,
    bonus_token,
    child_scores,
    committed_tokens,
    continued_rows,
    first_frontier,
    frontier_numbers,
    kv_moves,
    last_row,
    move_rows,
    packed_bytes,
    rerank,
    rotate_ids,
    tracked_place,
)

# Choosing, by hand; and which columns draft decode reads.


NAN = float("nan")


def test_the_best_of_a_row() -> None:
    assert best([1.0, 3.0, 3.0, 2.0], 3) == [1, 2, 3]
    assert best([NAN, -5.0, NAN], 2) == [1, 0]
    assert best([1.0], 4) == [0]


def test_a_tie_may_go_either_way_and_nothing_else_may() -> None:
    values = [1.0, 3.0, 3.0, 2.0]
    assert as_good(values, [2, 1])
    assert not as_good(values, [1, 1])
    assert not as_good(values, [1, 3])
    assert not as_good(values, [3, 1])
    assert not as_good(values, [1, 4])
    assert not as_good(values, [-2, 1])


def test_one_step_of_growth() -> None:
    scores = child_scores(torch.tensor([0.5, 0.25]), torch.tensor([[0.5, 0.25], [1.0, 0.0]]))
    assert scores.tolist() == [[0.25, 0.125], [0.25, 0.0]]
    assert frontier_numbers(1, 2, [0, 2]) == [2, 4]
    assert frontier_numbers(2, 2, [3]) == [9]
    assert continued_rows([0, 2, 3], 2) == [0, 1, 1]
    assert first_frontier(2).tolist() == [-1, 0, 1]


def test_candidates_are_verified_in_the_order_of_their_numbers() -> None:
    assert rerank([0.2, 0.9, 0.1, 0.8], 4) == [0, 1, 3]


def test_a_branch_reads_the_prefix_and_its_own_columns() -> None:
    assert draft_reads(5, 1, 2, 2, 3, 1, 0, 0).tolist() == [0, 1, 2, 3, 4, 8, 9]
    assert draft_reads(5, 1, 2, 2, 3, 1, 2, 1).tolist() == [0, 3, 4, 8, 9]
    assert draft_reads(3, 0, 1, 1, 3, 1, 2, 1).tolist() == [0, 1, 2, 3]
    assert draft_reads(5, 1, 1, 2, 3, 4, 0, 0).tolist() == [0, 1, 2, 3, 4, int(draft_columns(5, 2, 3, 4)[0, 1])]


def test_a_slot_of_no_page_is_the_padding_slot() -> None:
    assert physical_slot(9, [5, 3, 7], 4) == 29
    assert physical_slot(9, [5, 3, -1], 4) == 0
    assert physical_slot(13, [5, 3, 7], 4) == 0
    assert physical_slot(-1, [5, 3, 7], 4) == 0


# Where rows lie, against layouts written out by hand.


def test_a_chain_lies_behind_the_committed_rows() -> None:
    assert layout.draft_columns(10, 1, 3, 1).tolist() == [[10], [11], [12]]
    assert layout.draft_columns(10, 1, 3, 4).tolist() == [[10], [11], [12]]


def test_branches_without_pages_lie_one_after_the_other() -> None:
    assert layout.draft_columns(10, 2, 3, 1).tolist() == [[10, 13], [11, 14], [12, 15]]


def test_branches_with_pages_share_none() -> None:
    """M = 10 and pages of 4: the page of columns 8..11 holds two committed rows, and three more rows need a second page.

    Branch 0 has columns 8..15 (8, 9 committed), branch 1 16..23 (16, 17 are holes), branch 2 24..31.
    """
    assert branch_pages(10, 3, 4) == 2
    assert layout.draft_columns(10, 3, 3, 4).tolist() == [[10, 18, 26], [11, 19, 27], [12, 20, 28]]
    assert layout.hole_columns(10, 3, 3, 4).tolist() == [[16, 17], [24, 25]]


def test_a_prefix_of_whole_pages_leaves_no_holes() -> None:
    assert layout.draft_columns(8, 2, 3, 4).tolist() == [[8, 12], [9, 13], [10, 14]]
    assert layout.hole_columns(8, 2, 3, 4).shape == (1, 0)
    assert layout.hole_columns(9, 1, 3, 4).shape == (0, 0)
    assert layout.hole_columns(9, 3, 3, 1).shape == (2, 0)


def test_nodes_lie_in_their_own_order() -> None:
    assert layout.verify_columns(10, 4).tolist() == [10, 11, 12, 13]


# What a verified tree commits, by hand.


def test_tokens_of_a_path() -> None:
    assert committed_tokens([7, 8, 9, 6], [0, 2, 3]) == [7, 9, 6]
    assert bonus_token([7, 8, 9, 6], [0, 2, 3]) == 6
    assert accept_row([0, 2], 8, 4) == [8, 10, -1, -1]


def test_rows_of_a_path_move_at_once() -> None:
    moves = kv_moves([0, 2, 3], [40, 41, 42, 43])
    assert moves == [(40, 40), (42, 41), (43, 42)]
    assert move_rows(torch.arange(50), moves)[40:44].tolist() == [40, 42, 43, 43]
    assert move_rows(torch.arange(3), [(0, 1), (1, 0)]).tolist() == [1, 0, 2]
    assert move_rows(torch.arange(3), []).tolist() == [0, 1, 2]


def test_the_row_that_is_drafted_from_and_the_place_that_is_tracked() -> None:
    assert last_row(2, 3, 4) == 10
    assert tracked_place(6, 3, 4) == 1  # lengths 7, 8, 9: the second new token makes 8
    assert tracked_place(8, 3, 4) is None
    assert tracked_place(7, 9, 4) == 8  # the last multiple, 16
    assert tracked_place(0, 1, 1) == 0


def test_rotation_of_nothing_is_nothing() -> None:
    assert rotate_ids([1, 2, 3], 9) == [2, 3, 9]
    assert rotate_ids([], 9) == []


def test_cells_are_packed_from_the_lowest_bit_on() -> None:
    assert packed_bytes(torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1]], dtype=torch.bool)) == [0b11000101, 0b1]
    assert packed_bytes(torch.empty(0, 4)) == []


# Which tokens an engine may have kept that cut in float32: by its own logits hardly any cut is in doubt.


TEMPERATURES = st.sampled_from([0.3, 0.7, 1.0, 1.6, 3.0])


def some_logits(seed: int, vocabulary: int = 96, spread: float = 4.0) -> Tensor:
    return torch.randn(vocabulary, generator=torch.Generator().manual_seed(seed)) * spread


def in_float32(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """What an engine makes of float32 logits [V], each number of it a float32."""
    chances = (logits / torch.tensor(temperature)).softmax(-1)
    chances = keep_top_p(keep_top_k(chances, torch.tensor(top_k)), torch.tensor(top_p))
    return keep_min_p(chances, torch.tensor(min_p))


def kept(row: Tensor) -> list[int]:
    return [int(token) for token in row.nonzero()]


@settings(deadline=None, max_examples=200)
@given(
    seed=st.integers(0, 10**6),
    temperature=TEMPERATURES,
    top_k=st.sampled_from([1, 5, 40, 1 << 30]),
    top_p=st.sampled_from([0.5, 0.9, 0.99, 1.0]),
    min_p=st.sampled_from([0.0, 0.05]),
    grid=st.sampled_from([0.0, 0.5, 2.0**-6]),
)
def test_what_float32_makes_of_logits_is_possible(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, grid: float
) -> None:
    """grid: logits are multiples of it, so that many tie, as those of bfloat16 do."""
    logits = some_logits(seed)
    logits = (logits / grid).round() * grid if grid else logits
    logits[seed % 96] = -torch.inf
    engine = in_float32(logits, temperature, top_k, top_p, min_p)
    possible = {tuple(kept(row)): row for row in targets_of_float32(logits, temperature, top_k, top_p, min_p)}
    row = possible[tuple(kept(engine))]
    assert row.dtype == torch.float64
    assert float((engine.double().log() - row.log())[row > 0].abs().max()) <= rounding_of(logits, temperature).sum


def test_hardly_any_cut_is_in_doubt() -> None:
    """Of flat distributions."""
    rows = [some_logits(seed, spread=5.0) for seed in range(400)]
    doubt = sum(len(targets_of_float32(row, 3.0, 96, 0.9)) > 1 for row in rows)
    assert doubt <= 4


@pytest.mark.parametrize(("top_k", "top_p"), [(20, 1.0), (96, 0.9)])
def test_one_token_more_and_one_less_are_impossible(top_k: int, top_p: float) -> None:
    for seed in range(50):
        logits = some_logits(seed)
        possible = {frozenset(kept(row)) for row in targets_of_float32(logits, 1.6, top_k, top_p)}
        if len(possible) > 1:
            continue
        (own,) = possible
        order = logits.argsort(descending=True).tolist()
        assert own == frozenset(order[: len(own)])
        assert frozenset(order[: len(own) + 1]) not in possible


def test_equal_logits_are_kept_together() -> None:
    """Nine of them: where each could be kept by itself, nothing could be told."""
    logits = torch.tensor([3.0, *[1.0] * 9, 0.0])
    assert [kept(row) for row in targets_of_float32(logits, 1.0, 4, 1.0)] == [list(range(10))]
    assert [kept(row) for row in targets_of_float32(logits, 1.0, 11, 0.8)] == [list(range(10))]
    assert [kept(row) for row in targets_of_float32(logits, 1.0, 11, 1.0, 0.1)] == [list(range(10))]


def test_of_a_row_without_a_finite_logit_nothing_can_be_drawn() -> None:
    logits = torch.full((5,), -torch.inf)
    for top_k, top_p, min_p in itertools.product((2, 5), (1.0, 0.9), (0.0, 0.5)):
        with pytest.raises(ValueError, match="no logit is finite"):
            targets_of_float32(logits, 1.0, top_k, top_p, min_p)


def test_what_ties_in_float32_is_in_doubt() -> None:
    """The two logits next to each other have one probability in float32, or two."""
    logits = torch.tensor([3.0, 2.0, 2.0 + 2.0**-22, 1.0])
    assert [kept(row) for row in targets_of_float32(logits, 1.0, 2, 1.0)] == [[0, 2], [0, 1], [0, 1, 2]]


def test_roundings_by_hand() -> None:
    """Largest exponent 8 / 2: (9 * 4 + 8) roundings of an entry; of a sum, twice that and twice four tokens."""
    rounding = rounding_of(torch.tensor([1.0, -8.0, 2.0, -torch.inf]), 2.0)
    assert rounding.entry == 44 * 2.0**-24
    assert rounding.sum == pytest.approx((88 + 8) * 2.0**-24, rel=1e-5)
    assert rounding_of(torch.tensor([3e38, 0.0]), 1.0).entry == 1.0


# What draft decode reads of the committed rows, against a head that is run by hand with fewer of them.


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
    head = pair.reference_heads(recipe)[0]
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
    head, tokens = pair.reference_heads(recipe)[0], torch.arange(5, 18)
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


# The choice of draft steps, by hand.


AT_ONCE = Knobs(alpha=1.0, interval=1, warmup=0)


def test_it_goes_up_and_down_by_the_average() -> None:
    tier = Tier(AT_ONCE, [1, 3, 5], 1)
    assert [tier.tell([drafts]) or tier.steps for drafts in (1, 3, 3)] == [True, True, 5]
    assert tier.tell([0, 1])  # a half is too low for 5 steps and for what leads to 3, and too high to go on to 1
    assert tier.steps == 3
    assert tier.tell([0, 0])
    assert tier.steps == 1


def test_it_looks_now_and_then_behind_its_warm_up() -> None:
    tier = Tier(Knobs(alpha=1.0, interval=2, warmup=3), [1, 3], 1)
    assert [tier.tell([1]) for _ in range(5)] == [False, False, False, False, True]


def test_the_average_keeps_a_share_of_what_was_before() -> None:
    tier = Tier(Knobs(alpha=0.5, interval=100), [3], 3)
    tier.tell([0, 1])
    assert tier.average == 0.5 * 2 + 0.5 * 0.5


def test_rounds_without_drafts_tell_nothing_and_drafts_are_tried_again() -> None:
    tier = Tier(AT_ONCE, [0, 2, 4], 2)
    tier.tell([0])
    assert (tier.steps, tier.average) == (0, 0.0)
    tier.tell([0])
    assert (tier.steps, tier.average) == (2, 0.0)
    fresh = Tier(AT_ONCE, [0, 3], 0)
    fresh.tell([0])
    assert (fresh.steps, fresh.average) == (3, 2.0)


def test_a_ceiling_holds_down_and_never_keeps_from_going_up() -> None:
    tier = Tier(Knobs(alpha=1.0, interval=1, warmup=0, down=-16.0, ceiling=1.0), [1, 2, 4], 4)
    tier.tell([2])
    assert tier.steps == 2
    tier.tell([2])
    assert tier.steps == 4


def test_each_size_of_a_batch_has_its_tier() -> None:
    policy = Policy(2, {2: (1, 2), 4: (0, 1, 3)}, AT_ONCE)
    assert [policy.of(size).steps for size in (1, 2, 3, 4, 9)] == [2, 2, 2, 1, 1]
    assert policy.of(1) is policy.of(3)


# Penalties by hand, and as transformers has them.


LOGITS = torch.tensor([3.0, -1.0, 2.0, 0.5], dtype=torch.float64)


def test_each_time_once_and_scaled() -> None:
    assert apply_penalties(LOGITS, [0, 0, 1], 0.5, 0.0, 1.0).tolist() == [2.0, -1.5, 2.0, 0.5]
    assert apply_penalties(LOGITS, [0, 0, 1], 0.0, -0.5, 1.0).tolist() == [3.5, -0.5, 2.0, 0.5]
    assert apply_penalties(LOGITS, [0, 0, 1], 1.0, 1.5, 2.0).tolist() == [-1.0, -7.0, 2.0, 0.5]
    assert torch.equal(apply_penalties(LOGITS, [], 1.0, 1.0, 2.0), LOGITS)
    # vLLM: repetition first, also of the prompt's token 2
    assert apply_penalties(LOGITS, [0, 0, 1], 1.0, 1.5, 2.0, [2]).tolist() == [-2.0, -4.5, 1.0, 0.5]


def test_repetition_is_that_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    emitted = [3, 1, 3]
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([emitted]), LOGITS[None].clone())
    torch.testing.assert_close(apply_penalties(LOGITS, emitted, 0.0, 0.0, 1.3), theirs[0])


def test_what_ends_a_text_is_impossible_until_it_is_long_enough() -> None:
    assert held_back(LOGITS, 2, 3, [0, 3]).tolist() == [-torch.inf, -1.0, 2.0, -torch.inf]
    assert torch.equal(held_back(LOGITS, 3, 3, [0, 3]), LOGITS)


def test_a_least_length_is_that_of_transformers() -> None:
    from transformers import MinNewTokensLengthLogitsProcessor

    theirs = MinNewTokensLengthLogitsProcessor(1, 2, eos_token_id=[0], device="cpu")
    for emitted in range(4):
        text = torch.ones(1, 1 + emitted, dtype=torch.int64)
        torch.testing.assert_close(held_back(LOGITS, emitted, 2, [0]), theirs(text, LOGITS[None].clone())[0])


# Earley's recognizer against Python's regular expressions, and against texts that are counted out by hand.


TEXTS = ["".join(letters) for length in range(6) for letters in itertools.product("abc", repeat=length)]


@pytest.mark.parametrize("pattern", ["(ab|c)*a", "((a)*)*b?", "()", "(a|)(b+c)*", "a(b|c(a|b)+)?", "(a?b?)+c"])
def test_a_regular_expression_is_read_as_python_reads_it(pattern: str) -> None:
    automaton, sentences = (
        Automaton(rules_of(Grammar(rules=(pattern,)))),
        [text for text in TEXTS if re.fullmatch(pattern, text)],
    )
    assert [text for text in TEXTS if automaton.is_sentence(text)] == sentences
    short = [text for text in TEXTS if len(text) < 4]  # each of them that begins a sentence begins one of five letters
    assert [text for text in short if automaton.begins(text)] == [
        text for text in short if any(sentence.startswith(text) for sentence in sentences)
    ]


def test_what_no_regular_expression_says() -> None:
    automaton = Automaton(rules_of(Grammar(kind="ebnf", rules=("aAb|c",))))
    assert [text for text in TEXTS if automaton.is_sentence(text)] == ["c", "acb", "aacbb"]
    assert [text for text in ("", "aaa", "aac", "acb", "acbb", "ab") if automaton.begins(text)] == ["", "aaa", "aac", "acb"]


def test_rules_that_begin_with_themselves_and_rules_without_a_text() -> None:
    sums = Automaton(rules_of(Grammar(kind="ebnf", rules=("AbA|a",))))
    assert [text for text in TEXTS if sums.is_sentence(text)] == ["a", "aba", "ababa"]
    endless = Automaton(rules_of(Grammar(kind="ebnf", rules=("a|bB", "cB"))))
    assert [text for text in TEXTS if endless.begins(text)] == ["", "a"]


@pytest.mark.parametrize("pattern", ["abc(a|b)c", "ab?", "(ab)+", "c(ab|abc)a", "(a|b)cab", "()", "a(b|bc)", "(ab|ac)b"])
def test_what_must_follow_is_what_all_sentences_go_on_with(pattern: str) -> None:
    """By enumeration: what is common to all that follow a text in sentences of up to nine letters, up to where one ends."""
    automaton = Automaton(rules_of(Grammar(rules=(pattern,))))
    every = ("".join(letters) for length in range(10) for letters in itertools.product("abc", repeat=length))
    sentences = [text for text in every if re.fullmatch(pattern, text)]
    for text in (text for text in TEXTS[:121] if automaton.begins(text)):
        following = [sentence.removeprefix(text) for sentence in sentences if sentence.startswith(text)]
        common = itertools.takewhile(lambda letters: len({*letters}) == 1, zip(*following, strict=False))
        assert automaton.forced_text(text) == "".join(letter for letter, *_ in common), text
