"""Mutants: which are drawn, and how the page counts them."""

import ast
import gc
from pathlib import Path

import pytest
import torch

from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.records import Ending, EngineInfo
from eagletwin.harness.core.trace import Recorder, Trace, new_header
from eagletwin.harness.judge import bounds

from .mutants import oracle
from .mutants.changes import Change, DrawnChange, changed
from .mutants.command import ORACLE, WORKER
from .mutants.draw import Mutant, mutants_of
from .mutants.examined import Examined, examined, read_examined
from .mutants.hunt import Hunted
from .mutants.page import page, rate, survivors

SOURCE = '''
class Worker:
    """A docstring with 1 + 1."""

    @staticmethod
    def step(rows: "list[1]", at=7):
        """Another: 2 + 2."""
        if rows and not at == 3:
            logger.debug("at %s", at + 1)
            assert len(rows) > 5
            return rows[at:8]
        x = move(rows, at) - 4
        x = move(rows, at) - 4  # the same line again
        if at:
            raise ValueError(f"{at + 6}")
        return x is None

    @property
    def size(self):
        return 1 + 1

@triton.jit
def kernel(x):
    return x + 1
'''


def found() -> list[Mutant]:
    return list(mutants_of(SOURCE, "package.module", "package/module.py"))


def test_each_kind_is_drawn_and_nothing_else() -> None:
    kinds = {one.kind for one in found()}
    assert kinds == {"comparison", "arithmetic", "constant", "slice", "arguments", "boolean", "condition"}
    assert {one.target for one in found()} == {"package.module.Worker.step"}  # no property, no kernel
    changed = {line for one in found() for line in one.change[:1]}
    assert not [line for line in changed if any(word in line for word in ("logger", "assert", "raise", "Another", "def "))]


def test_each_mutant_is_one_edit_that_fits_and_makes_another_program() -> None:
    function = SOURCE[SOURCE.index("    @staticmethod") : SOURCE.index("    @property")]
    dedented = "".join(line[4:] if line.strip() else line for line in function.splitlines(keepends=True))
    programs = set()
    for one in found():
        assert dedented.count(one.match) == 1, one
        programs.add(ast.dump(ast.parse(dedented.replace(one.match, one.replacement))))
    assert len(programs) == len(found())
    assert ast.dump(ast.parse(dedented)) not in programs


def test_a_mutant_knows_the_block_that_holds_it() -> None:
    lines = SOURCE.splitlines()
    inside = next(one for one in found() if one.before == "8")
    assert "logger" in lines[inside.block - 1]
    assert "rows[at:8]" in lines[inside.line - 1]


def hunted(number: int, outcome: str) -> Hunted:
    return Hunted(mutant=found()[number], outcome=outcome, by="draft.kv" if outcome == "rule" else "")


def test_what_is_equivalent_or_out_of_reach_does_not_count_and_what_is_not_examined_does() -> None:
    outcomes = [hunted(0, "rule"), hunted(1, "crash"), hunted(2, "survived"), hunted(3, "survived"), hunted(4, "survived")]
    outcomes.append(hunted(5, "not run"))
    assert rate(outcomes, []) == (2, 5)
    reasons = [
        Examined(is_="equivalent", why="It commutes.", mutants=(outcomes[2].mutant.name,)),
        Examined(is_="missed", why="No rule looks.", mutants=(outcomes[3].mutant.name,)),
    ]
    assert rate(outcomes, reasons) == (2, 4)
    text = "\n".join(survivors(outcomes, reasons))
    assert "### Missed: 1\n\n* No rule looks." in text
    assert "### Not examined yet: 1" in text


def test_one_mutant_has_one_reason(tmp_path: Path) -> None:
    path = tmp_path / "examined.json"
    path.write_text('[{"is": "missed", "why": "a", "mutants": ["m"]}, {"is": "equivalent", "why": "b", "mutants": ["m"]}]')
    with pytest.raises(InputError, match="m is named twice"):
        read_examined(path)
    path.write_text('[{"is": "lost", "why": "a", "mutants": []}]')
    with pytest.raises(InputError, match="no page was written"):
        read_examined(path)


def test_the_page_has_both_parts_and_counts_by_the_reasons_of_survivors() -> None:
    outcomes = [hunted(0, "rule"), hunted(1, "survived")]
    reason = Examined(is_="equivalent", why="It commutes.", mutants=(outcomes[1].mutant.name,))
    text = page((outcomes, [reason]), (outcomes, []))
    assert "**1 of 1 mutants that are neither equivalent nor out of reach are killed: 100.0%**" in text
    assert "**1 of 2 mutants that are neither equivalent nor out of reach are killed: 50.0%**" in text
    assert text.count("Not examined yet") == 1


@pytest.mark.parametrize("outcomes", [WORKER, ORACLE])
def test_reasons_of_survivors_are_there_and_name_a_mutant_once(outcomes: str) -> None:
    reasons = examined(outcomes)
    assert {"equivalent", "missed"} <= {one.is_ for one in reasons}
    assert all(one.why and one.mutants for one in reasons)


def a_trace() -> Trace:
    recorder = Recorder()
    for round, coins in enumerate(([0.25, 0.5, 0.75], [0.125, 0.375, 0.625])):
        tensors = {"coins": torch.tensor(coins), "tokens": torch.tensor([1, 2, 3 + round])}
        recorder.add("a", round, "verify", numbers={"aborted": 0, "seq_len": 4 + round}, tensors=tensors)
    case = Case(name="x", model="llama-tiny", num_steps=1, requests=(Request(id="a", prompt=(1,), max_new_tokens=1),))
    engine = EngineInfo(name="none", version="0", device="cpu", kernels="none", torch="0", triton="0")
    return Trace(new_header(case, "", engine, Ending(kind="finished"), recorder.records), dict(recorder.tensors))


def test_a_trace_is_changed_in_one_place() -> None:
    trace = a_trace()
    assert changed(trace, Change(1, "tokens", "next")).integers(1, "tokens") == [1, 3, 4]
    assert changed(trace, Change(1, "tokens", "outside")).integers(1, "tokens")[1] == 1 << 20
    alike = changed(trace, Change(1, "coins", "alike")).array(1, "coins").tolist()
    assert alike[0] == 0.25
    assert alike[2] == 0.625
    numbers = [changed(trace, Change(1, name, "next")).header.records[1].numbers[name] for name in ("aborted", "seq_len")]
    assert numbers == [1, 6]
    cut = changed(trace, Change(1, "", "cut")).header
    assert (len(cut.records), cut.ending.kind) == (1, "crashed")
    assert trace.integers(1, "tokens") == [1, 2, 4]


def test_what_was_changed_least_is_changed_next() -> None:
    trace, drawn = a_trace(), DrawnChange(0)
    kinds = {(one.name, one.how) for _ in range(3) for one in drawn.of(trace, 4)}
    assert kinds == {
        *((name, how) for name in ("coins", "tokens") for how in ("next", "alike")),
        ("tokens", "outside"),
        ("aborted", "next"),
        ("seq_len", "next"),
        ("", "cut"),
    }


def test_functions_that_remember_are_found() -> None:
    """What they remember would hide a mutant."""
    gc.unfreeze()  # the tests' process has put them out of sight
    try:
        found = [one.__wrapped__ for one in oracle._remembering.__wrapped__()]
    finally:
        gc.freeze()
    assert bounds.bfloat16.__wrapped__ in found
