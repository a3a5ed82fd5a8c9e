"""When an equal case says nothing about a change, and which part of a change no case ran."""

import pytest
from msgspec.structs import replace

from eagletwin.harness.core.differs import Changes, Differs, merged, needs_cuda, together, unknown_changes, with_executed

TWO = Differs(base="1", functions=("m.f", "m.g"), statements={"m.f": ("m.py:2", "m.py:3"), "m.g": ("m.py:9",)})

SAYS = {
    "comments alone": (Differs(base="1"), True),
    "a statement that ran": (with_executed(TWO, ["m.py:2"]), True),
    "statements that did not run": (TWO, False),
    "a function of an older trace that was called": (Differs(base="1", functions=("m.f",), ran=("m.f",)), True),
    "a function that did not run": (Differs(base="1", functions=("m.f",), modules=("m",), imported=("m",)), False),
    "a module that was imported": (Differs(base="1", modules=("m",), imported=("m",), removed=("m.f",)), False),
    "a module that was not imported": (Differs(base="1", modules=("m",)), False),
    "a file that is gone": (Differs(base="1", removed=("m",)), False),
    "a file that is no Python": (Differs(base="1", files=("m.json",)), False),
    "a file that is gone, and a function that ran": (Differs(base="1", removed=("m",), functions=("n.f",), ran=("n.f",)), True),
    "a patch that did not run": (Differs(base="", patch="p", functions=("m.f",), statements={"m.f": ("m.py:2",)}), False),
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


def test_a_function_ran_if_one_of_its_changed_statements_did() -> None:
    ran = with_executed(TWO, ["m.py:3", "another.py:1"])
    assert (ran.ran, ran.executed, ran.idle, ran.unexecuted) == (("m.f",), ("m.py:3",), ("m.g",), ("m.py:2", "m.py:9"))
    assert ran.headline == "2 of 3 changed statements did not run: m.py:2, m.py:9"
    assert ran.lines() == [
        "This tree differs from 1. Run: m.f.",
        "Not run: m.g.",
        "Changed statements that ran: 1 of 3; not: m.py:2, m.py:9.",
    ]


def test_there_is_no_headline_where_all_ran_or_nothing_did() -> None:
    assert with_executed(TWO, TWO.places).headline == ""
    assert TWO.headline == ""
    assert "(m.py:2, m.py:3, m.py:9)" in TWO.doubt


def test_a_statement_behind_a_condition_on_the_device_names_the_option_that_meets_it() -> None:
    gates = {"m.py:2": "x.is_cuda", "m.py:9": "not (x.is_cuda)"}
    differs = with_executed(Differs(base="1", functions=TWO.functions, statements=TWO.statements, gates=gates), ["m.py:3"])
    assert differs.headline.endswith("m.py:2 (only if x.is_cuda; --device cuda runs it), m.py:9 (only if not (x.is_cuda))")


def test_the_headline_names_what_nothing_here_runs_beside_what_ran() -> None:
    differs = with_executed(replace(TWO, modules=("m", "n"), imported=("m",), files=("hash.cpp",)), TWO.places)
    assert differs.headline == "nothing here runs hash.cpp, n"
    assert replace(differs, executed=("m.py:2",), ran=("m.f",)).headline == (
        "2 of 3 changed statements did not run: m.py:3, m.py:9; nothing here runs hash.cpp, n"
    )


@pytest.mark.parametrize(
    ("gate", "needs"),
    [
        ("x.is_cuda", True),
        ("_is_cuda or _is_hip", True),
        ("not (not _is_cuda)", True),
        ("not _is_cuda", False),
        ("not (x.is_cuda)", False),
        ("x.is_cuda is False", False),
        ("disable_cuda_graph", False),
        ("_is_hip", False),
    ],
)
def test_which_conditions_a_gpu_meets(gate: str, needs: bool) -> None:
    assert needs_cuda(gate) == needs


@pytest.mark.parametrize(
    ("version", "known"),
    [
        ("0.5.23", True),
        ("0", True),
        ("1a2b3c4d5e+dirty.12345678", True),
        ("1a2b3c4d5e", False),
        ("1234567890", False),
        ("tree-12", False),
    ],
)
def test_of_a_commit_it_is_not_known_what_it_changes(version: str, known: bool) -> None:
    assert (unknown_changes(version) == "") == known


def test_cases_are_counted_by_statement() -> None:
    changes = Changes()
    for ran in (["m.py:2"], ["m.py:2", "m.py:9"], []):
        changes.add(with_executed(TWO, ran))
    assert (changes.of, changes.ran, changes.executed) == (3, {"m.f": 2, "m.g": 1}, {"m.py:2": 2, "m.py:9": 1})
    assert changes.headline == "1 of 3 changed statements did not run: m.py:3"
    assert changes.lines[0] == "This tree differs from 1. Run: m.f in 2 of 3 cases, m.g in 1 of 3 cases."


def test_what_a_change_does_to_the_numbers_is_said_where_the_base_was_run() -> None:
    changes = Changes()
    changes.add(with_executed(TWO, TWO.places))
    assert changes.effect == ""
    changes.compared = 4
    assert changes.lines[-1] == "It changed no recorded number in 4 cases that ran it and are right."
    changes.altered = 3
    assert changes.lines[-1] == "It changed recorded numbers in 3 of 4 cases that ran it and are right."


def test_ranks_run_a_change_together_and_a_tree_with_a_patch_is_one_change() -> None:
    both = merged([with_executed(TWO, ["m.py:2"]), with_executed(TWO, ["m.py:9"])])
    assert both.ran == ("m.f", "m.g")
    patch = Differs(base="", patch="p", functions=("n.h",), statements={"n.h": ("n.py:1 (p)",)})
    one = together([both, patch])
    assert one is not None
    assert (one.idle, one.unexecuted) == (("n.h",), ("m.py:3", "n.py:1 (p)"))
    assert together([]) is None
