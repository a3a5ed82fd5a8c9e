"""When floats are equal, and when a choice is a tie."""

import numpy as np
import pytest

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.families import RECIPES
from eagletwin.harness.judge.bounds import FLOAT32, bounds_of


def ties(logits: Array) -> list[object]:
    found: list[object] = FLOAT32.best(logits, 1)[1].tolist()
    return found


def test_the_bound_scales_with_each_row() -> None:
    expected = np.array([[1.0, 0.0], [1000.0, 0.0]])
    actual = expected + np.array([[0.0, 0.5 * FLOAT32.relative], [0.0, 500 * FLOAT32.relative]])
    assert FLOAT32.error_of(expected, actual.astype(np.float32)).tolist() == pytest.approx([0.5, 0.5], rel=0.01)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_never_equal(value: float) -> None:
    assert FLOAT32.error_of(np.ones((1, 2)), np.array([[1.0, value]])).tolist() == [np.inf]


def test_two_logits_closer_than_twice_the_bound_are_a_tie() -> None:
    logits = np.array([0.0, 10.0, 10.0 - 1.9 * FLOAT32.relative * 10, 5.0])
    assert ties(logits) == [True]
    assert FLOAT32.undecided(logits, 1, 2)
    assert not FLOAT32.undecided(logits, 1, 3)
    apart = np.array([0.0, 10.0, 10.0 - 2.1 * FLOAT32.relative * 10, 5.0])
    assert ties(apart) == [False]
    assert ties(np.stack([apart, logits, apart])) == [[False], [True], [False]]


def test_a_token_that_cannot_be_proposed_is_no_magnitude_and_never_undecided() -> None:
    logits = np.array([-np.inf, 10.0, 10.0 - 1.9 * FLOAT32.relative * 10, 5.0, -np.inf])
    assert ties(logits) == [True]
    assert FLOAT32.undecided(logits, 1, 2)
    assert not FLOAT32.undecided(logits, 1, 3)
    assert not FLOAT32.undecided(logits, 1, 0)
    alone = np.array([-np.inf, 2.0, -np.inf])
    assert ties(alone) == [False]


def test_the_bounds_of_bfloat16_are_a_recipes_own() -> None:
    unit = 2.0**-8
    relative = {name: round(bounds_of("bfloat16", name).relative / unit, 1) for name in ("llama-tiny", "llama-gqa", "step-3.5")}
    assert relative == {"llama-tiny": 10.6, "llama-gqa": 9.0, "step-3.5": 24.5}
    for name in RECIPES:
        bounds = bounds_of("bfloat16", name)
        assert bounds_of("float32", name) is FLOAT32
        assert bounds.tie < bounds.relative < 0.1
