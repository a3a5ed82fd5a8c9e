"""The laboratory's command line, and its pages: the benchmark, branches that cases reach, faults and mutants."""

import ast
import difflib
import gc
from pathlib import Path
from subprocess import CompletedProcess

import msgspec
import pytest
import torch
import typer
from typer.testing import CliRunner

from eagletwin.cases.blocks import LONG
from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.cli.main import MOVED, run_command
from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.core.errors import HarnessError, InputError
from eagletwin.harness.core.records import Ending, EngineInfo
from eagletwin.harness.core.trace import Recorder, Trace, new_header
from eagletwin.harness.engines.blocks import Block
from eagletwin.harness.engines.source import INSTALLED
from eagletwin.harness.judge import bounds

from . import faults
from .__main__ import app, run
from .bench import searches
from .bench.reached import ReachedCode, branches_of, lines_of
from .bench.report import RECORD, BenchRecord, Search, Speed, Stamp, in_turn_lines, page, read_record, write_record
from .bench.searches import Hit, Searched, why_not
from .bench.speed import Share, Spread, StepTimes, spread
from .mutants import oracle
from .mutants.command import ORACLE, WORKER
from .mutants.corpus import Known, gather
from .mutants.draw import Mutant, mutants_of
from .mutants.hunt import Hunted
from .mutants.oracle import Change, DrawnChange, changed
from .mutants.page import Examined, examined, rate, read_examined, survivors
from .mutants.page import page as mutants_page

# The benchmark's page: written from what was measured, part by part.


MONDAY, TUESDAY = (Stamp(f"2026-01-{day}", "a machine", "versions") for day in ("05", "06"))
ONE = Spread(1.0, 0.5, 2.0, 5)
STEP = StepTimes(Spread(0.01, 0.009, 0.02, 3), Spread(0.25, 0.2, 0.3, 3), Spread(25.0, 20.0, 30.0, 3))
SHARES = {1: Share(0.06, 0.006, 0.003)}
SPEED = Speed(MONDAY, {1: ONE, 3: ONE}, SHARES, {3: STEP}, ONE, ONE, ONE, {"topk": {1: ONE, 16: ONE}}, ONE)


def searched(entry: str, *seconds: float, seeds: int) -> Searched:
    return Searched(entry, "", seeds, tuple(Hit(3, taken, 20, 2.0, "num_steps 1", False) for taken in seconds))


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    record = BenchRecord(speed=SPEED, searches={"25015": Search(MONDAY, 2, searched("25015", 1.0, seeds=1))})
    write_record(tmp_path / "docs", record)
    assert read_record(tmp_path / "docs") == record
    assert read_record(tmp_path) == BenchRecord()
    (tmp_path / RECORD).write_text("{")
    with pytest.raises(InputError, match="written over"):
        read_record(tmp_path)


def test_the_page_says_how_many_bugs_were_found_and_how_soon_and_no_size_of_what_was_not_shrunk() -> None:
    unshrunk = tuple(Hit(12, seconds, 0, 0.0, "", False) for seconds in (20.0, 30.0, 40.0))
    record = BenchRecord(
        searches={
            "25015": Search(MONDAY, 2, searched("25015", 1.0, 2.0, 9.0, seeds=3)),
            "26329": Search(MONDAY, 2, searched("26329", seeds=3)),
            "certain-node": Search(MONDAY, 2, Searched("certain-node", "", 4, unshrunk)),
            "small-tree": Search(MONDAY, 2, searched("small-tree", 15.0, seeds=1)),
        },
    )
    text = page(record)
    assert f"| certain-node | - | 3 of 4 | 12 (12-12) | {spread([20.0, 30.0, 40.0])} | - | - |  |" in text
    assert "Of 4 bugs 3 were found, 2 of them by every search." in text
    assert (
        "The median of their medians is 15.0 s. One search finds 2.0 in 15 s, 2.5 in 30 s, 2.8 in 60 s, 2.8 in 300 s:" in text
    )


def test_a_search_whose_process_fails_costs_the_others_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], **_: object) -> CompletedProcess[bytes]:
        entry = command[-3]
        said = msgspec.json.encode(searched(entry, 1.0, seeds=1))
        return CompletedProcess(command, int(entry == "26329"), said, b"no weights")

    monkeypatch.setattr(searches.subprocess, "run", run)
    seen = searches.search_all([LEDGER[name] for name in ("26329", "25015", "small-tree")], 1, 1, 2)
    assert [next(seen).entry, next(seen).entry] == ["25015", "small-tree"]
    with pytest.raises(HarnessError, match="26329 ended with exit code 1: no weights"):
        next(seen)


def test_a_rate_is_told_as_a_share_of_the_one_beside_it() -> None:
    lines = in_turn_lines("slow", "quick", Share(0.12, 0.01, 0.02), Share(0.06, 0.01, 0.02))
    assert [line.split(":")[0] for line in lines[:2]] == ["quick", "slow"]
    assert lines[1].endswith("120.0 ms a case; engine 90.0, trace 10.0, judge 20.0")
    assert lines[2] == "0.50 of the rate of quick"


def test_each_part_of_the_page_has_its_own_day_and_what_is_missing_is_named() -> None:
    record = BenchRecord(
        speed=SPEED,
        searches={
            "25015": Search(MONDAY, 2, searched("25015", 1.0, 2.0, 9.0, seeds=4)),
            "26329": Search(TUESDAY, 8, searched("26329", seeds=3), 2),
        },
    )
    text = page(record)
    assert "Measured on 2026-01-05: a machine; versions. 2 searches at a time, on a core each. (25015)" in text
    assert "Measured on 2026-01-06: a machine; versions. 8 searches at a time, on 2 cores each. (26329)" in text
    assert f"| 25015 | - | 3 of 4 | 3 (3-3) | {spread([1.0, 2.0, 9.0])} |" in text
    assert "| 26329 | - | 0 of 3 | - | - |" in text
    absent = text.partition("Not searched for yet")[2]
    wanted = {name for name, entry in LEDGER.items() if not why_not(entry)}
    assert all(f" {name}," in absent or f" {name}." in absent for name in wanted - {*record.searches})
    assert [name for name in LEDGER if f"Never searched for: {name} is not reached" in text] == [
        "overlap-context-end",
        "multi-layer-topk-parents",
        "grammar-stride",
        "mixed-grammar",
        "retracted-logprobs",
        "retracted-stream",
        "context-end-stores",
        "draft-plan",
        "draft-plan-flashmla",
        "pipeline-tail",
        "pipeline-pause",
        "pipeline-hidden",
        "pipeline-mixed",
        "pipeline-empty",
        "pipeline-zeros",
        "adaptive-bonus",
        "26239-worker",
        "dsv4-draft-reads-worker",
    ]
    assert "25015" not in absent
    assert "topk 1: trace 6.0 ms, judge 3.0 ms | 15.0% |" in text
    assert "topk 3: 10 (9-20) ms, and 250 (200-300) ms in Triton's interpreter | 25 (20-30) times faster |" in text
    assert "Not measured yet" in page(BenchRecord())


# `reached`: what is counted of the branches that cases ran.


CASE = Case(name="x", model="llama-tiny", num_steps=1, requests=(Request(id="a", prompt=(1,), max_new_tokens=1),))
BRANCHES = {"a.py": [Block(1, "f", ""), Block(4, "f", "if x"), Block(9, "g", "")], "b.py": [Block(1, "h", "")]}


def test_branches_are_counted_by_file_and_other_lines_are_not() -> None:
    ran = ({"sglang/a.py": (1, 4)}, {"sglang/a.py": (1, 77), "sglang/c.py": (1,)}, {"sglang/a.py": (1,), "sglang/b.py": (1,)})
    reached = ReachedCode(BRANCHES).count(Known(0, CASE, (), "slot_layout", lines) for lines in ran)
    assert reached.ran == {("a.py", 1): 3, ("a.py", 4): 1, ("b.py", 1): 1}
    assert reached.grew == [(1, 2), (3, 3)]
    assert reached.never() == ["a.py:9\tg\t\t"]
    assert "3 cases ran 3 of 4 branches" in lines_of(reached)


@pytest.mark.long
def test_a_search_reaches_most_branches_and_each_other_has_a_reason() -> None:
    """`lab reached --seed 41 --blocks 110`."""
    reached = ReachedCode(branches_of(INSTALLED)).count(gather(INSTALLED, 41, 110, 0, LONG, modules=()))
    assert len(reached.ran) >= 330, lines_of(reached)
    assert [line for line in reached.never() if line.endswith("\t")] == []


# The laboratory's command line, and what the product says of commands that became part of it.


def commands() -> set[str]:
    return set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


def test_help_names_every_command() -> None:
    shown = CliRunner().invoke(app, ["--help"])
    assert shown.exit_code == 0
    assert all(name in shown.output for name in commands())


@pytest.mark.parametrize("name", MOVED)
@pytest.mark.parametrize("more", [[], ["--help"], ["rate", "--json"]])
def test_the_old_name_of_a_command_says_the_new_one(name: str, more: list[str]) -> None:
    with pytest.raises(InputError) as error:
        run_command([*name.split(), *more])
    assert error.value.exit_code == 128
    assert f"python -m tests.lab {MOVED[name]}, in a checkout" in error.value.remedy
    assert MOVED[name].split()[0] in {*commands(), "--help"}


def test_words_that_no_command_takes_are_a_usage_error() -> None:
    for words in (["frobnicate"], ["rate", "--frobnicate"]):
        with pytest.raises(InputError):
            run(words)


# `faults`: which one-place faults are drawn, and that each can be planted.


FILES = ["sglang/srt/speculative/eagle_utils.py", "sglang/srt/mem_cache/allocation.py", "sglang/srt/speculative/spec_utils.py"]


def test_faults_of_files_in_turn_are_planted_in_one_place_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "searched_files", lambda *_: FILES)
    drawn = faults.drawn(9, 0)
    assert [sorted(fault.file for fault in drawn[first : first + 3]) for first in (0, 3, 6)] == [sorted(FILES)] * 3
    for number, fault in enumerate(drawn):
        old = (INSTALLED.root / fault.file).read_text()
        file = tmp_path / f"{number}.py"
        file.write_text(old)
        faults.plant_fault(file, fault)
        compile(new := file.read_text(), str(file), "exec")
        gone = [line for line in difflib.ndiff(old.splitlines(), new.splitlines()) if line[0] == "-"]
        assert 0 < len(gone) <= len(fault.match.splitlines()), fault.name


def test_the_files_are_those_of_the_speculative_path() -> None:
    assert len(found := faults.searched_files()) > 40
    assert set(FILES) <= set(found)


# Mutants: which are drawn, and how the page counts them.


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
    text = mutants_page((outcomes, [reason]), (outcomes, []))
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
