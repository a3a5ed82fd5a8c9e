"""Which of the bugs that a case may show are tried first, and how many runs that takes."""

from types import SimpleNamespace
from typing import Any

import pytest

from eagletwin.harness.check.known import Suspected


class Case:
    """Right with the remedies of all of `needed`; it breaks the rule of bugs a to d. runs: what it ran with, once each."""

    def __init__(self, needed: str, told: tuple[str, ...] = ()) -> None:
        self.needed, self.runs = set(needed), list[str]()
        apt: list[Any] = [
            SimpleNamespace(id=name, remedy=f"mends {name}", rule="r" if name <= "d" else "other") for name in "abcdefgh"
        ]
        self.suspected = Suspected(apt, "r", self.look, told)

    def look(self, entries: Any) -> Any:
        names = "".join(entry.id for entry in entries)
        if names not in self.runs:
            self.runs.append(names)
        return SimpleNamespace(clean=set(names) >= self.needed)


def test_what_explained_the_case_before_is_tried_first() -> None:
    case = Case("c", ("c",))
    assert case.suspected.alone() == ("c",)
    assert case.runs == ["c"]


@pytest.mark.parametrize("told", [("a",), ("h",), ("a", "b"), ("unknown",)])
def test_what_explained_another_case_hides_nothing(told: tuple[str, ...]) -> None:
    assert Case("c", told).suspected.alone() == ("c",)
    assert Case("bg", told).suspected.alone() == ()
    assert Case("bg", told).suspected.again() == ()
    assert Case("bg", told).suspected.together() == ("b", "g")


def test_several_that_explained_the_case_before_are_tried_before_all() -> None:
    case = Case("bd", ("b", "d"))
    assert case.suspected.alone() == ()
    assert case.suspected.again() == ("b", "d")
    assert case.runs == ["a", "b", "c", "d", "bd"]


def test_of_several_that_are_enough_none_is_named_that_is_not_needed() -> None:
    assert Case("be", ("b", "e", "g")).suspected.again() == ("b", "e")
