"""The fewest remedies that a case needs, and how many runs it takes to tell."""

from collections.abc import Sequence
from itertools import combinations

import pytest

from eagletwin.harness.check.known import fewest

EIGHT = tuple("abcdefgh")


class Case:
    """Right with all of `needed`, or all of one of several. runs: the different questions that were asked."""

    def __init__(self, *needed: str) -> None:
        self.needed = [frozenset(one) for one in needed]
        self.runs = set[frozenset[str]]()

    def clean(self, parts: Sequence[str]) -> bool:
        self.runs.add(frozenset(parts))
        return any(one <= set(parts) for one in self.needed)


@pytest.mark.parametrize("parts", [EIGHT[:count] for count in range(1, 9)])
def test_what_is_needed_is_found_whatever_it_is(parts: tuple[str, ...]) -> None:
    for size in range(1, len(parts) + 1):
        for needed in combinations(parts, size):
            assert fewest(parts, Case("".join(needed)).clean) == needed


def test_one_of_eight_takes_few_runs() -> None:
    for part in EIGHT:
        case = Case(part)
        fewest(EIGHT, case.clean)
        assert len(case.runs) <= 6


def test_of_two_that_do_the_same_the_first_is_named() -> None:
    assert fewest(EIGHT, Case("b", "g").clean) == ("b",)


def test_none_of_those_named_can_be_left_out() -> None:
    for first in combinations(EIGHT[:5], 2):
        for second in combinations(EIGHT[:5], 3):
            case = Case("".join(first), "".join(second))
            found = fewest(EIGHT[:5], case.clean)
            assert case.clean(found)
            assert not any(case.clean([one for one in found if one != part]) for part in found)


def test_what_is_wrong_with_more_than_it_needs_is_named_by_what_makes_it_right() -> None:
    """Two remedies that do each other harm: halves mislead, and one after the other is taken away."""

    def clean(parts: Sequence[str]) -> bool:
        return set(parts) in ({"a", "b", "c", "d"}, {"a", "b", "d"}, {"b", "d"})

    found = fewest("abcd", clean)
    assert clean(found)
    assert found == ("b", "d")
