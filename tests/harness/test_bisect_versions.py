"""Bisection over versions without an engine: what is looked at, what is said, and what an interruption leaves behind."""

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from eagletwin.harness.commands.bisect.report import VersionsOutcome, bisect_releases, version_report
from eagletwin.harness.commands.bisect.state import (
    LOOKS,
    MAX_LOOKS,
    Looked,
    Sighting,
    Subject,
    Unclear,
    fault_of,
    open_run,
    plan_of,
    settled,
)
from eagletwin.harness.core.case import Case, Request

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
    while not settled(seen):
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

    with open_run(tmp_path, plan_of(Subject(case=CASE), tuple(row), rule=rule, expected=expected)) as run:
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
    plan = plan_of(Subject(case=CASE), "123456789")
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
    plan = plan_of(Subject(case=CASE), "123")
    with open_run(tmp_path, plan) as first:
        first.add(Looked(version="1", sightings=looks(BAD)))
        with open_run(tmp_path, plan) as second:
            assert second.folder != first.folder
            assert second.resumed == 0
    with open_run(tmp_path, plan_of(Subject(case=CASE), "123", rule="draft.kv")) as third:
        assert third.resumed == 0
    (tmp_path / "bisect-x-3" / "bisect.json").write_text("{")
    folders = {path.name for path in tmp_path.iterdir()}
    with open_run(tmp_path, plan) as run:
        assert run.folder.name in folders  # one of the unfinished two
