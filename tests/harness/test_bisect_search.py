"""The search for a change, against looking at everything: any row, any change, whatever cannot be decided."""

from math import ceil, log2

from hypothesis import given, settings
from hypothesis import strategies as st

from eagletwin.harness.commands.bisect.state import Found, Mark, conclude, next_between, next_end

ROWS = st.integers(1, 40).flatmap(lambda count: st.tuples(*[st.sampled_from(("good", "bad", "skip"))] * count))


@st.composite
def monotone(draw: st.DrawFn) -> tuple[Mark, ...]:
    """A row with at most one change, parts of which cannot be decided."""
    before, after = draw(st.sampled_from((("good", "bad"), ("bad", "good"), ("good", "good"), ("bad", "bad"))))
    row = [before] * draw(st.integers(0, 20)) + [after] * draw(st.integers(1, 20))
    for begin, length in draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6)), max_size=4)):
        row[begin : begin + length] = ["skip"] * len(row[begin : begin + length])
    return tuple(row)


def search(row: tuple[Mark, ...]) -> tuple[Found, list[int]]:
    """The result of the search, and what it looked at, in order."""
    known: dict[int, Mark] = {}
    looked: list[int] = []
    for choose in (next_end, next_between):
        while (index := choose(len(row), known)) is not None:
            looked.append(index)
            known[index] = row[index]
    return conclude(len(row), known), looked


def everything(row: tuple[Mark, ...]) -> Found:
    """The same by looking at all of them."""
    return conclude(len(row), dict(enumerate(row)))


@settings(deadline=None)
@given(monotone())
def test_a_search_finds_what_looking_at_everything_finds(row: tuple[Mark, ...]) -> None:
    found, looked = search(row)
    assert found == everything(row)
    assert len(set(looked)) == len(looked)


@settings(deadline=None)
@given(monotone())
def test_a_first_version_is_named_only_if_its_neighbour_was_decided(row: tuple[Mark, ...]) -> None:
    found, _ = search(row)
    decided = [index for index, mark in enumerate(row) if mark != "skip"]
    if len(decided) < 2 or row[decided[0]] == row[decided[-1]]:
        assert found.came is None
        assert not found.exact
        return
    change = next(index for index in decided if row[index] != row[decided[0]])
    assert found.new == change
    assert found.came == (row[change] == "bad")
    assert found.exact == (row[change - 1] != "skip")
    assert found.between == tuple(range(max(index for index in decided if index < change) + 1, change))


@settings(deadline=None)
@given(ROWS)
def test_the_two_sides_that_are_named_were_looked_at_and_differ_even_in_a_row_of_many_changes(row: tuple[Mark, ...]) -> None:
    found, looked = search(row)
    assert len(set(looked)) == len(looked)
    decided = [mark for mark in row if mark != "skip"]
    assert (found.came is None) == (len(decided) < 2 or decided[0] == decided[-1])
    if found.came is not None:
        assert found.old is not None
        assert found.new is not None
        assert {row[found.old], row[found.new]} == {"good", "bad"}
        assert found.came == (row[found.new] == "bad")
        assert {found.old, found.new, *found.between} <= set(looked)
        assert all(row[index] == "skip" for index in found.between)


@settings(deadline=None)
@given(st.integers(2, 400), st.data())
def test_where_all_can_be_decided_a_search_halves(count: int, data: st.DataObject) -> None:
    change = data.draw(st.integers(1, count - 1))
    found, looked = search(("bad",) * change + ("good",) * (count - change))
    assert (found.old, found.new, found.came, found.exact) == (change - 1, change, False, True)
    assert len(looked) <= 2 + ceil(log2(count - 1))


@settings(deadline=None)
@given(monotone(), st.data())
def test_a_search_that_is_taken_up_again_has_the_same_result(row: tuple[Mark, ...], data: st.DataObject) -> None:
    found, looked = search(row)
    known = {index: row[index] for index in looked[: data.draw(st.integers(0, len(looked)))]}
    for choose in (next_end, next_between):
        while (index := choose(len(row), known)) is not None:
            assert index in looked
            known[index] = row[index]
    assert conclude(len(row), known) == found


def test_what_cannot_be_decided_is_left_alone_if_the_change_lies_elsewhere() -> None:
    row: list[Mark] = ["good"] * 5 + ["bad"] * 36
    row[15:27] = ["skip"] * 12
    _, looked = search(tuple(row))
    assert sum(row[index] == "skip" for index in looked) == 1
