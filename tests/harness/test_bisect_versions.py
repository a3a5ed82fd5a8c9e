"""Bisection without an engine: over versions, the search for a change, and the smallest set against trying all subsets."""

from collections.abc import Callable, Mapping
from itertools import combinations
from math import ceil, log2
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagletwin.harness.commands.bisect.measure import smallest
from eagletwin.harness.commands.bisect.report import VersionsOutcome, bisect_releases, version_report
from eagletwin.harness.commands.bisect.state import (
    LOOKS,
    MAX_LOOKS,
    BisectionPlan,
    Found,
    Looked,
    Mark,
    Sighting,
    Subject,
    Unclear,
    conclude,
    fault_of,
    is_settled,
    next_between,
    next_end,
    open_run,
)
from eagletwin.harness.core.case import Case, Request

# Bisection over versions without an engine: what is looked at, what is said, and what an interruption leaves behind.


CASE = Case(name="x", model="llama-tiny", num_steps=1, requests=(Request(id="a", prompt=(1,), max_new_tokens=1),))
GOOD = Sighting(status="equal")
BAD = Sighting(status="diverged", rule="draft.slots", place="request a, round 0, draft.extend")
ELSEWHERE = Sighting(status="diverged", rule="draft.slots", place="request a, round 1, draft.extend")
OTHER = Sighting(status="diverged", rule="draft.kv", place="request a, round 0, prefill")
CRASH = Sighting(status="unknown", rule="engine.crash", why="RuntimeError: boo")
ABSENT = Sighting(status="unknown", why="SGLang cannot be imported: no", ran=False)


def looks(*sightings: Sighting) -> tuple[Sighting, ...]:
    """What is seen when a version is looked at until it is settled, going through `sightings` again and again."""
    seen: list[Sighting] = []
    while not is_settled(seen):
        seen.append(sightings[len(seen) % len(sightings)])
    return tuple(seen)


def search(
    tmp_path: Path, row: Mapping[str, Sighting | tuple[Sighting, ...]], *, rule: str = "", expected: str = ""
) -> tuple[VersionsOutcome, list[str], str]:
    """The outcome, the versions in the order in which they were looked at, and the report."""
    asked: list[str] = []

    def look(version: str) -> Looked:
        asked.append(version)
        seen = row[version]
        return Looked(version=version, sightings=looks(*(seen if isinstance(seen, tuple) else (seen,))))

    with open_run(
        tmp_path, BisectionPlan(subject=Subject(case=CASE), versions=tuple(row), rule=rule, expected=expected)
    ) as run:
        outcome = bisect_releases(run, look)
        report = version_report(outcome, CASE, run, lambda version: f"eagletwin check x --sglang {version}")
        return outcome, asked, report


def unfolded(report: str) -> str:
    return " ".join(report.split())


def test_a_fix_is_named_and_so_is_the_way_to_see_both_sides(tmp_path: Path) -> None:
    outcome, asked, report = search(tmp_path, {"1": BAD, "2": BAD, "3": BAD, "4": GOOD, "5": GOOD, "6": GOOD})
    assert outcome.answered
    assert asked[:2] == ["1", "6"]
    assert len(asked) == 4
    assert report.startswith("FIXED WITH 4  x: draft.slots at request a, round 0, draft.extend\n")
    assert "3 shows it, and 4 no longer does: the first good release is 4." in report
    assert "bad:  eagletwin check x --sglang 3\n  good: eagletwin check x --sglang 4\n" in report
    assert f"4 of 6 releases looked at, the case run {4 * LOOKS} times" in report


def test_a_bug_that_came_is_named(tmp_path: Path) -> None:
    outcome, _, report = search(tmp_path, {"1": GOOD, "2": BAD, "3": BAD})
    assert outcome.answered
    assert report.startswith("CAME WITH 2 ")
    assert "the first bad release is 2." in report


def test_no_first_release_is_named_when_its_neighbour_cannot_be_decided(tmp_path: Path) -> None:
    outcome, asked, report = search(tmp_path, {"1": BAD, "2": CRASH, "3": ABSENT, "4": GOOD, "5": GOOD})
    assert not outcome.answered
    assert set(asked) == {"1", "2", "3", "4", "5"}
    assert report.startswith("FIXED AFTER 1, UP TO 4 ")
    assert "Between them 2, 3 cannot be decided, so the first good release is one of these, or 4." in unfolded(report)
    assert "2  skipped: RuntimeError: boo" in report
    assert "3  skipped: SGLang cannot be imported: no" in report


def test_ends_that_cannot_be_decided_are_left_out_and_named(tmp_path: Path) -> None:
    outcome, _, report = search(tmp_path, {"1": ABSENT, "2": BAD, "3": GOOD, "4": CRASH})
    assert outcome.answered
    assert "the first good release is 3. What lies beyond them cannot be decided: 1, 4." in unfolded(report)


def test_nothing_is_named_where_less_than_two_can_be_decided(tmp_path: Path) -> None:
    outcome, _, report = search(tmp_path, {"1": ABSENT, "2": BAD, "3": CRASH})
    assert not outcome.answered
    assert report.startswith("CANNOT TELL")


@pytest.mark.parametrize(("seen", "says"), [(GOOD, "1 is equal, and so is 3"), (BAD, "1 shows it, and so does 3")])
def test_without_a_change_only_the_ends_are_looked_at(tmp_path: Path, seen: Sighting, says: str) -> None:
    outcome, asked, report = search(tmp_path, {"1": seen, "2": seen, "3": seen})
    assert not outcome.answered
    assert asked == ["1", "3"]
    assert report.startswith("NO CHANGE")
    assert says in report


@pytest.mark.parametrize("other", [OTHER, ELSEWHERE], ids=["another rule", "another place"])
def test_another_divergence_is_neither_good_nor_bad(tmp_path: Path, other: Sighting) -> None:
    outcome, _, report = search(tmp_path, {"1": BAD, "2": other, "3": GOOD})
    assert not outcome.answered
    assert outcome.found.between == (1,)
    assert f"2  skipped: it diverged otherwise, by {other.rule} at {other.place}" in report


def test_a_rule_that_was_asked_for_counts_wherever_it_shows(tmp_path: Path) -> None:
    outcome, _, report = search(tmp_path, {"1": BAD, "2": ELSEWHERE, "3": GOOD}, rule="draft.slots")
    assert outcome.answered
    assert report.startswith("FIXED WITH 3  x: draft.slots, wherever it shows")


def test_a_crash_can_be_asked_for(tmp_path: Path) -> None:
    outcome, _, report = search(tmp_path, {"1": GOOD, "2": CRASH, "3": CRASH}, rule="engine.crash")
    assert outcome.answered
    assert report.startswith("CAME WITH 2 ")


def test_the_rule_that_an_entry_is_known_for_is_not_confused_with_a_live_bug(tmp_path: Path) -> None:
    row = {"1": OTHER, "2": BAD, "3": BAD, "4": GOOD, "5": OTHER}
    outcome, _, report = search(tmp_path, row, expected="draft.slots")
    assert outcome.answered
    assert report.startswith("FIXED WITH 4 ")
    assert "1  skipped: it diverged otherwise, by draft.kv" in report


def test_of_two_neighbours_nothing_is_between(tmp_path: Path) -> None:
    for seen, said in ((GOOD, "1 is equal, and so is 2."), (BAD, "1 shows it, and so does 2. It came with 1 or before it.")):
        folder = tmp_path / seen.status
        folder.mkdir()
        _, _, report = search(folder, {"1": seen, "2": seen})
        assert said in unfolded(report)
        assert "between" not in report
    _, _, report = search(tmp_path, {"1": GOOD, "2": GOOD, "3": GOOD})
    assert "1 is equal, and so is 3; what is between was not looked at." in unfolded(report)


def test_ends_that_diverge_each_in_its_own_way_say_nothing_about_which_is_meant(tmp_path: Path) -> None:
    outcome, asked, report = search(tmp_path, {"1": BAD, "2": BAD, "3": OTHER})
    assert not outcome.answered
    assert asked == ["1", "3"]
    assert report.startswith("CANNOT TELL")
    assert "both ends diverge, and not alike" in unfolded(report)
    with pytest.raises(Unclear):
        fault_of(Looked(version="1", sightings=(BAD,)), Looked(version="2", sightings=(ELSEWHERE,)), anywhere=False)


def test_flaky_runs_are_repeated_and_the_majority_counts_unless_it_would_hide_the_fault(tmp_path: Path) -> None:
    outcome, _, _ = search(tmp_path, {"1": BAD, "2": (BAD, BAD, GOOD), "3": GOOD, "4": GOOD})
    assert outcome.answered
    assert len(outcome.looked["2"].sightings) == MAX_LOOKS
    outcome, _, report = search(tmp_path, {"1": BAD, "2": (GOOD, GOOD, BAD), "3": GOOD, "4": GOOD})
    assert not outcome.answered
    assert "2  skipped: it showed in 2 of 7 looks, and not in the others" in report
    outcome, _, _ = search(tmp_path, {"1": BAD, "2": (GOOD, GOOD, CRASH), "3": GOOD, "4": GOOD})
    assert outcome.answered  # the fault did not show once, and most looks finished


class Broken(Exception):
    """What ends a bisection in the middle."""


def test_what_was_interrupted_goes_on_where_it_stood_and_looks_again_at_what_could_not_be_decided(tmp_path: Path) -> None:
    plan = BisectionPlan(subject=Subject(case=CASE), versions=tuple("123456789"))
    asked: list[str] = []

    def look_until(count: int) -> Callable[[str], Looked]:
        def look(version: str) -> Looked:
            if len(asked) == count:
                raise Broken
            asked.append(version)
            seen = ABSENT if version == "5" and count == 3 else BAD if int(version) < 7 else GOOD
            return Looked(version=version, sightings=looks(seen))

        return look

    with pytest.raises(Broken), open_run(tmp_path, plan) as run:
        bisect_releases(run, look_until(3))
    assert asked == ["1", "9", "5"]
    with open_run(tmp_path, plan) as run:
        assert run.resumed == 2
        assert bisect_releases(run, look_until(99)).answered
        assert run.folder == tmp_path / "bisect-x"
    assert asked[3:] == ["5", "7", "6"]
    with open_run(tmp_path, plan) as run:  # a finished one is not gone on with, and nothing is overwritten
        assert run.resumed == 0
        assert run.folder == tmp_path / "bisect-x-2"


def test_another_bisection_and_one_that_is_still_running_are_left_alone(tmp_path: Path) -> None:
    plan = BisectionPlan(subject=Subject(case=CASE), versions=tuple("123"))
    with open_run(tmp_path, plan) as first:
        first.add(Looked(version="1", sightings=looks(BAD)))
        with open_run(tmp_path, plan) as second:
            assert second.folder != first.folder
            assert second.resumed == 0
    with open_run(tmp_path, BisectionPlan(subject=Subject(case=CASE), versions=tuple("123"), rule="draft.kv")) as third:
        assert third.resumed == 0
    (tmp_path / "bisect-x-3" / "bisect.json").write_text("{")
    folders = {path.name for path in tmp_path.iterdir()}
    with open_run(tmp_path, plan) as run:
        assert run.folder.name in folders  # one of the unfinished two


# The search for a change, against looking at everything: any row, any change, whatever cannot be decided.


ROWS = st.integers(1, 40).flatmap(lambda count: st.tuples(*[st.sampled_from(("good", "bad", "skip"))] * count))


@st.composite
def monotone(draw: st.DrawFn) -> tuple[Mark, ...]:
    """A row with at most one change, parts of which cannot be decided."""
    before, after = draw(st.sampled_from((("good", "bad"), ("bad", "good"), ("good", "good"), ("bad", "bad"))))
    row = [before] * draw(st.integers(0, 20)) + [after] * draw(st.integers(1, 20))
    for begin, length in draw(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6)), max_size=4)):
        row[begin : begin + length] = ["skip"] * len(row[begin : begin + length])
    return tuple(row)


def bisect_search_search(row: tuple[Mark, ...]) -> tuple[Found, list[int]]:
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
    found, looked = bisect_search_search(row)
    assert found == everything(row)
    assert len(set(looked)) == len(looked)


@settings(deadline=None)
@given(monotone())
def test_a_first_version_is_named_only_if_its_neighbour_was_decided(row: tuple[Mark, ...]) -> None:
    found, _ = bisect_search_search(row)
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
    found, looked = bisect_search_search(row)
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
    found, looked = bisect_search_search(("bad",) * change + ("good",) * (count - change))
    assert (found.old, found.new, found.came, found.exact) == (change - 1, change, False, True)
    assert len(looked) <= 2 + ceil(log2(count - 1))


@settings(deadline=None)
@given(monotone(), st.data())
def test_a_search_that_is_taken_up_again_has_the_same_result(row: tuple[Mark, ...], data: st.DataObject) -> None:
    found, looked = bisect_search_search(row)
    known = {index: row[index] for index in looked[: data.draw(st.integers(0, len(looked)))]}
    for choose in (next_end, next_between):
        while (index := choose(len(row), known)) is not None:
            assert index in looked
            known[index] = row[index]
    assert conclude(len(row), known) == found


def test_what_cannot_be_decided_is_left_alone_if_the_change_lies_elsewhere() -> None:
    row: list[Mark] = ["good"] * 5 + ["bad"] * 36
    row[15:27] = ["skip"] * 12
    _, looked = bisect_search_search(tuple(row))
    assert sum(row[index] == "skip" for index in looked) == 1


# The smallest set, against trying all subsets.


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
