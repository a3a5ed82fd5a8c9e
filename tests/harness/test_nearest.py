"""The remedy for a name that is not known."""

import pytest

from eagletwin.harness.core.terminal import nearest

MANY = [f"name-{letter}" for letter in "abcdefghijklmnop"] + ["states"]


@pytest.mark.parametrize(
    ("name", "known", "listed", "remedy"),
    [
        ("stat", MANY, "", "did you mean states?"),
        ("stat", MANY, "`list`", "did you mean states? `list` lists all"),
        ("zzz", MANY, "`list`", "`list` lists them"),
        ("zzz", MANY, "", f"use one of {', '.join(MANY)}"),
        (5, [1, 2, 4], "`list`", "use one of 1, 2, 4"),
    ],
)
def test_the_nearest_names_come_first_and_all_are_within_reach(
    name: object, known: list[object], listed: str, remedy: str
) -> None:
    assert nearest(name, known, listed) == remedy
