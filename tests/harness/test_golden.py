"""The golden corpus tells a verdict that changed from one that did not, and leaves out what differs between two machines."""

import dataclasses
import json
from argparse import Namespace
from pathlib import Path

import msgspec
import pytest

from eagletwin.harness.core.verdict import Divergence, Verdict
from tests.golden import commands, corpus
from tests.golden.__main__ import differences, run

FIRST = Divergence(
    rule="draft.kv", request="a", round=1, stage="extend", step=2, iteration=7, index="row 3", expected="1", actual="2"
)
DIVERGED = Verdict(status="diverged", rule="draft.kv", first=FIRST, checked={"draft.kv": 4}, headroom=0.5)
ITEM = next(item for item in corpus.ledger() if item.run.patches)
SAME_RUN = dataclasses.replace(ITEM, run=msgspec.structs.replace(ITEM.run, changes=()))  # these are words for people


def line(verdict: Verdict, item: corpus.Item = ITEM) -> dict[str, object]:
    """As it is read from a file."""
    stored: dict[str, object] = json.loads(
        json.dumps(corpus.line_of(item, corpus.verdict_of(verdict, "draft.kv (extend)", False)))
    )
    return stored


def changed(**fields: object) -> Verdict:
    return msgspec.structs.replace(DIVERGED, **fields)


def test_a_verdict_that_stands_is_no_difference_whatever_a_float_bound_was_used_to() -> None:
    assert differences([line(DIVERGED)], [line(changed(headroom=0.6))]) == {True: {}, False: {}}


@pytest.mark.parametrize(
    "verdict",
    [
        changed(status="unknown"),
        changed(rule="draft.slots"),
        changed(first=msgspec.structs.replace(FIRST, index="row 4")),
        changed(first=msgspec.structs.replace(FIRST, round=0)),
        changed(first=None),
        changed(vacuous=True),
        changed(undecided=True),
    ],
    ids=["status", "rule", "index", "round", "nowhere", "vacuous", "undecided"],
)
def test_another_status_rule_or_place_is_a_verdict_that_changed(verdict: Verdict) -> None:
    found = differences([line(DIVERGED)], [line(verdict)])
    assert list(found[True].values()) == [[ITEM.id]] * len(found[True]) != []


@pytest.mark.parametrize(
    ("verdict", "named"),
    [
        (changed(checked={"draft.kv": 5}), "checked.draft.kv"),
        (changed(exercised=("rejection",)), "exercised: [] -> ['rejection']"),
        (changed(first=msgspec.structs.replace(FIRST, actual="3")), "first.actual: '2' -> '3'"),
    ],
    ids=["checked", "exercised", "numbers"],
)
def test_counts_and_numbers_are_listed_apart(verdict: Verdict, named: str) -> None:
    assert differences([line(DIVERGED)], [line(verdict)]) == {True: {}, False: {named: [ITEM.id]}}


def test_a_case_that_is_missing_or_another_is_a_change_and_a_new_one_is_none() -> None:
    old, other = line(DIVERGED), {**line(DIVERGED), "digest": "other"}
    assert differences([old], [])[True] == {"missing in NEW": [ITEM.id]}
    assert differences([], [old]) == {True: {}, False: {"only in NEW": [ITEM.id]}}
    assert differences([old], [other])[True] == {"digest: another case": [ITEM.id]}


@pytest.mark.parametrize(("verdict", "code"), [(changed(choices=9), 0), (changed(status="equal"), 1)], ids=["counts", "status"])
def test_the_exit_code_of_compare_is_that_of_verdicts(
    verdict: Verdict, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, said in (("old", DIVERGED), ("new", verdict)):
        corpus.save(tmp_path / name, [line(said)])
    assert run(Namespace(verb="compare", old=tmp_path / "old", new=tmp_path / "new")) == code
    assert ITEM.id in capsys.readouterr().out


def test_a_stored_line_is_the_same_run_again(tmp_path: Path) -> None:
    file = tmp_path / "golden.jsonl"
    patches = {f"patch/{corpus.digest(msgspec.to_builtins(patch))}": patch for patch in ITEM.run.patches}
    corpus.save(file, [*({"id": name, "patch": msgspec.to_builtins(patch)} for name, patch in patches.items()), line(DIVERGED)])
    [again] = corpus.stored(corpus.read(file))
    assert again == SAME_RUN
    assert corpus.line_of(again, {})["digest"] == line(DIVERGED)["digest"]


def test_a_whole_number_in_a_case_is_the_number_that_is_read_again() -> None:
    [sampled] = {item.case for item in corpus.ledger() if item.id == "ledger/min-p/red"}
    item = dataclasses.replace(ITEM, case=sampled)
    patches = [{"id": name, "patch": {}} for name in line(DIVERGED)["patches"]]  # type: ignore[attr-defined]
    [again] = corpus.stored([*patches, line(DIVERGED, item)])
    assert line(DIVERGED, again) == line(DIVERGED, item)


def test_a_verdict_names_no_folder_of_this_machine() -> None:
    first = msgspec.structs.replace(FIRST, actual="OutOfBounds at /home/me/.venv/lib/python3.11/site-packages/sglang/x.py:3")
    assert corpus.verdict_of(changed(first=first), "", False)["first"]["actual"] == "OutOfBounds at sglang/x.py:3"


def test_patches_of_another_form_are_those_of_the_ledger(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [{"id": name, "patch": {"diff": "…"}} for name in line(DIVERGED)["patches"]]  # type: ignore[attr-defined]
    [again] = corpus.stored([*lines, line(DIVERGED)])
    assert again == SAME_RUN
    assert ITEM.id in capsys.readouterr().err


def test_a_line_that_was_cut_off_is_run_again(tmp_path: Path) -> None:
    file = tmp_path / "golden.jsonl"
    corpus.save(file, [line(DIVERGED)])
    with file.open("a") as out:
        out.write('{"id": "drawn/')
    corpus.sort(file)
    assert [one["id"] for one in corpus.read(file)] == [ITEM.id]
    assert file.read_text().endswith("}\n")


def test_each_process_has_whole_blocks_and_all_of_them_are_run() -> None:
    names = [item.id for item in corpus.ledger()]
    assert {corpus.belongs_to(name) for name in names} == set(range(corpus.PROCESSES))
    assert all(corpus.belongs_to(f"{block}/00") == corpus.belongs_to(f"{block}/11") for block in names)


def test_what_differs_between_machines_is_not_stored_of_a_command(tmp_path: Path) -> None:
    printed = '{"folder": "%s/eagletwin-runs/a", "seconds": 3.25, "exit_code": 1, "verdict": {"headroom": 0.1, "ties": 2}}'
    assert commands.stable(printed % tmp_path, str(tmp_path)) == {
        "folder": "FOLDER/eagletwin-runs/a",
        "seconds": "VOLATILE",
        "exit_code": 1,
        "verdict": {"headroom": "VOLATILE", "ties": 2},
    }
    assert commands.stable(f"2 cases in 3.1 s, see {tmp_path}/x", str(tmp_path)) == "2 cases in N s, see FOLDER/x"
