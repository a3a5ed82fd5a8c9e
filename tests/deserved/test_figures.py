"""Shares by depth, by length and by place, worked out by hand."""

import numpy as np
import pytest

from eagletwin.harness.deserved.follow import Followed
from eagletwin.harness.deserved.statistics import Text, figures


def text(*accepted: int, begin: int = 1, steps: int = 2) -> Text:
    """A text at whose positions M = begin, begin + 1, .. so many drafts are accepted; the last one is its last token."""
    rows = [[0] * steps] * begin + [[1] * count + [0] * (steps - count) for count in accepted]
    return Text(range(len(rows)), begin, Followed(np.array(rows), np.array(rows)))


def test_shares_are_over_all_positions_that_go_on() -> None:
    """Position 1 accepts 2, 2 accepts 1 of its 2, 3 none of its 1; 4 is the last token."""
    found = figures([text(2, 1, 0, 0)], 2)
    first, second = found.depths
    assert (first.reached, first.conditional.value, first.cumulative.value) == (3, pytest.approx(2 / 3), pytest.approx(2 / 3))
    assert (second.reached, second.conditional.value, second.cumulative.value) == (2, 0.5, 0.5)
    assert (found.rounds, found.tokens, found.accept_length.value) == (1, 4, 4.0)


def test_an_interval_is_a_point_where_all_texts_are_alike_and_wide_where_they_differ() -> None:
    alike = figures([text(1, 0, 1, 0, 0)] * 8, 2).accept_length
    assert alike.low == alike.value == alike.high
    differ = figures([text(0, 0, 0, 0, 0), text(2, 2, 2, 1, 0)] * 4, 2).accept_length
    assert differ.low < differ.value < differ.high


def test_parts_are_ranges_that_double() -> None:
    found = figures([text(1, 0, 0), text(2, 0, 0, begin=5)], 2)
    assert [(part.begin, part.end, part.count, part.accepted) for part in found.by_prompt_length] == [
        (1, 2, 2, 0.5),
        (4, 8, 2, 1.0),
    ]
    assert [(part.begin, part.count, part.accepted) for part in found.by_place] == [(0, 2, 1.5), (1, 2, 0.0)]
