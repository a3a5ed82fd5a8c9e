"""Delta debugging against trying all subsets."""

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from eagletwin.harness.commands.bisect.measure import smallest

THINGS = tuple("abcdefgh")
SETS = st.frozensets(st.sampled_from(THINGS))


@settings(deadline=None)
@given(st.lists(SETS, min_size=1, max_size=4))
def test_one_of_the_smallest_sets_is_found(needed: list[frozenset[str]]) -> None:
    """It shows with all of any of the `needed` sets, and what else there is does not matter."""
    found = smallest(THINGS, lambda subset: any(need <= set(subset) for need in needed))
    assert frozenset(found) in needed
    assert not any(need < set(found) for need in needed)
    assert list(found) == sorted(found)


@settings(deadline=None)
@given(st.sets(SETS), st.integers(1, len(THINGS)))
def test_without_any_single_member_it_does_not_show_whatever_else_does(shown: set[frozenset[str]], count: int) -> None:
    """Faults need not be monotone: more features can hide one."""
    asked = []

    def shows(subset: tuple[str, ...]) -> bool:
        asked.append(subset)
        return frozenset(subset) in shown or subset == THINGS[:count]

    found = smallest(THINGS[:count], shows)
    assert shows(found)
    assert not any(shows(tuple(other for other in found if other != thing)) for thing in found)
    del asked[-len(found) - 1 :]
    assert len(set(asked)) == len(asked)


def test_of_two_needed_things_exactly_these_are_found() -> None:
    for pair in combinations(THINGS, 2):
        assert smallest(THINGS, lambda subset, pair=pair: set(pair) <= set(subset)) == pair  # type: ignore[misc]


def test_what_needs_nothing_is_asked_once() -> None:
    asked = []
    assert smallest(THINGS, lambda subset: not asked.append(subset)) == ()
    assert asked == [()]
