"""When an equal case says nothing about what a tree changed."""

import pytest

from eagletwin.harness.core.differs import CALLED, Changes, Differs

SAYS = {
    "comments alone": (Differs(base="1"), True),
    "a function that ran": (Differs(base="1", functions=("m.f",), ran=("m.f",)), True),
    "a function that did not run": (Differs(base="1", functions=("m.f",), modules=("m",), imported=("m",)), False),
    "a module that was imported": (Differs(base="1", modules=("m",), imported=("m",), removed=("m.f",)), True),
    "a module that was not imported": (Differs(base="1", modules=("m",)), False),
    "a file that is gone": (Differs(base="1", removed=("m",)), False),
    "a file that is no Python": (Differs(base="1", files=("m.json",)), False),
    "a file that is gone, and a function that ran": (Differs(base="1", removed=("m",), functions=("n.f",), ran=("n.f",)), True),
}


@pytest.mark.parametrize("what", SAYS)
def test_a_case_says_something_about_a_change_that_it_ran(what: str) -> None:
    differs, says = SAYS[what]
    assert differs.reached == says
    assert (differs.doubt == "") == says


def test_the_doubt_names_the_file_that_is_gone() -> None:
    assert Differs(base="0.5.23", removed=("sglang.gone",)).doubt == (
        "this tree differs from 0.5.23 in sglang.gone, and nothing here runs it"
    )


def test_what_ran_is_not_said_to_be_the_changed_lines() -> None:
    """A changed branch of a function that ran may have been passed by."""
    ran = Differs(base="1", functions=("m.f", "m.g"), ran=("m.f",))
    assert ran.lines() == ["This tree differs from 1. Run: m.f.", "Not run: m.g.", CALLED]
    assert Changes(ran, {"m.f": 1}, 2).lines == ["This tree differs from 1. Run: m.f in 1 of 2 cases.", "Not run: m.g.", CALLED]
    assert CALLED not in Differs(base="1", functions=("m.f",)).lines()
