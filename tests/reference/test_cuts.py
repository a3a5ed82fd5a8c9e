"""Which tokens an engine may have kept that cut in float32: by its own logits hardly any cut is in doubt."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagletwin.reference.cuts import possible_targets, rounding_of, targets_of_float32
from eagletwin.reference.sampling import keep_min_p, keep_top_k, keep_top_p

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
    """Of flat distributions; by logits that may be off by a ten-thousandth of the largest, one in ten is."""
    rows = [some_logits(seed, spread=5.0) for seed in range(400)]
    doubt = sum(len(targets_of_float32(row, 3.0, 96, 0.9)) > 1 for row in rows)
    before = sum(len(possible_targets(row, 3.0, 96, 0.9, 1e-4 * float(row.abs().max()))) > 1 for row in rows)
    assert doubt <= 4
    assert before >= 40


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
    with pytest.raises(ValueError, match="tie at a cut"):
        possible_targets(logits, 1.0, 4, 1.0, 1e-6)


def test_of_a_row_without_a_finite_logit_nothing_can_be_drawn() -> None:
    logits = torch.full((5,), -torch.inf)
    for top_k, top_p, min_p in itertools.product((2, 5), (1.0, 0.9), (0.0, 0.5)):
        with pytest.raises(ValueError, match="no logit is finite"):
            targets_of_float32(logits, 1.0, top_k, top_p, min_p)
        with pytest.raises(ValueError, match="no logit is finite"):
            possible_targets(logits, 1.0, top_k, top_p, 1e-6, min_p)


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
