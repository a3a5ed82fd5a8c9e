"""Where a search for what a change breaks begins: the cases that ran a changed statement, by the measurement of a release."""

from fnmatch import fnmatch
from itertools import islice
from pathlib import Path

import pytest

from eagletwin.cases.blocks import BLOCK
from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.commands.fuzz import coverage
from eagletwin.harness.commands.fuzz.coverage import UNMEASURED, Coverage, Measured, change_in, measured_of
from eagletwin.harness.commands.fuzz.options import SearchOptions
from eagletwin.harness.commands.fuzz.steering import Steering
from eagletwin.harness.core.files import installed_version
from eagletwin.harness.engines.blocks import Block
from eagletwin.harness.engines.difference import File, difference, watch_of
from eagletwin.harness.engines.source import INSTALLED, Source
from eagletwin.harness.families import RECIPES

from ..lab.coverage import coverage_of

FILE = "sglang/srt/speculative/steps.py"
SOURCE = """\
def advance(batch, pages):
    if pages > 1:
        batch.add(pages)
    else:
        batch.add(1)
    helper(batch)


def start(batch):
    launch[(1,)](batch)


@triton.jit
def launch(batch):
    pass
"""
CASES = [LEDGER[name].case for name in ("25015", "8409", "26329")]
# All three cases call `advance`, one of them with pages; the last one alone calls `start`.
RAN = [
    {FILE: [Block(2, "advance", ""), Block(3, "advance", "if pages > 1")]},
    {FILE: [Block(2, "advance", ""), Block(5, "advance", "not (pages > 1)")]},
    {FILE: [Block(2, "advance", ""), Block(10, "start", "")]},
]


@pytest.fixture(autouse=True)
def measurement(monkeypatch: pytest.MonkeyPatch) -> Coverage:
    found = coverage_of("0.0", zip(CASES, RAN, strict=True))
    monkeypatch.setattr(coverage, "read_coverage", lambda: found)
    return found


def measured(root: Path, old: str, new: str) -> dict[str, int]:
    """Of a tree in which `new` stands in place of `old`."""
    file = root / FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text := SOURCE.replace(old, new))
    assert text != SOURCE
    return dict(measured_of(root, watch_of("0.0", [File(FILE, SOURCE.encode(), text.encode())])).ran)


@pytest.mark.parametrize(
    ("old", "new", "ran"),
    [
        ("batch.add(pages)", "batch.add(pages + 1)", {f"{FILE}:3": 0b001}),
        ("batch.add(1)", "batch.add(2)", {f"{FILE}:5": 0b010}),
        ("    helper(batch)", "    helper(batch, 1)", {f"{FILE}:6": 0b111}),
        ("if pages > 1:", "if pages > 2:", {f"{FILE}:2": 0b111}),
        ("    pass", "    return", {f"{FILE}:15": 0b100}),  # a kernel: `start` launches it
    ],
)
def test_a_changed_statement_has_the_cases_that_ran_its_block(tmp_path: Path, old: str, new: str, ran: dict[str, int]) -> None:
    assert measured(tmp_path, old, new) == ran


def test_a_new_function_has_the_cases_of_its_callers(tmp_path: Path) -> None:
    more = "\n\ndef extra(batch):\n    batch.add(3)\n"
    found = measured(tmp_path, "    helper(batch)\n", f"    helper(batch)\n    extra(batch)\n{more}")
    assert set(found.values()) == {0b111}
    assert any(place.startswith(f"{FILE}:11") for place in found)


def test_a_function_that_a_patch_edits_is_looked_up_by_its_name(tmp_path: Path) -> None:
    measured(tmp_path, "batch.add(1)", "batch.add(2)")
    name = "sglang.srt.speculative.steps.start"
    assert measured_of(tmp_path, None, [name]).ran == {name: 0b100}


def test_nothing_is_measured_of_no_change_or_of_an_unknown_function(tmp_path: Path) -> None:
    assert measured_of(tmp_path, None) == Measured()
    assert measured(tmp_path, "    pass\n", "    pass\n\n\ndef unused():\n    return 1\n") == {}


def test_a_search_says_first_what_is_changed_and_where_it_begins(tmp_path: Path) -> None:
    (tmp_path / FILE).parent.mkdir(parents=True)
    gated = SOURCE.replace("    launch[", "    if batch.is_cuda:\n        batch.wait()\n    launch[")
    for text, said in {
        SOURCE.replace("batch.add(1)", "batch.add(2)"): "1 function (advance); 1 statement; the search begins with trees",
        gated: f"1 function (start); 2 statements; the search begins with *; --device cuda alone runs {FILE}:11",
        SOURCE + "LIMIT = 3\n": "sglang.srt.speculative.steps; no measured case is known to run it",
    }.items():
        (tmp_path / FILE).write_text(text)
        found = difference("0.0", [File(FILE, SOURCE.encode(), text.encode())])
        measured = change_in(Source(str(tmp_path), (tmp_path,), "0.0+dirty", found))
        assert fnmatch(measured.text, f"changed: {said}*"), measured.text
    backend, text = "sglang/srt/layers/attention/flashinfer_backend.py", SOURCE.replace("batch.add(1)", "batch.add(2)")
    (tmp_path / backend).parent.mkdir(parents=True)
    (tmp_path / backend).write_text(text)
    found = difference("0.0", [File(backend, SOURCE.encode(), text.encode())])
    said = change_in(Source(str(tmp_path), (tmp_path,), "0.0+dirty", found)).text
    assert "no measured case" in said
    assert f"--device cuda --dtype bfloat16 --attention flashinfer alone runs {backend}:" in said
    assert change_in(Source()).text == ""


@pytest.mark.parametrize(
    ("ran", "beside", "dtype"),
    [
        ({"a": 0b0001}, (), "float32"),  # a model that each search draws
        ({"a": 0b0011}, (), "float32"),  # it runs this, too
        ({"a": 0b0010, "b": 0b0001}, ("deepseek-dsa",), "float32"),
        ({"a": 0b1010}, (), "float32"),  # FlashAttention, which each search draws
        ({"a": 0b0100}, ("deepseek-v4",), "bfloat16"),
        ({"a": 0b0100, "b": 0b0001}, (), "float32"),  # one search has one data type
    ],
)
def test_a_search_draws_what_it_has_only_where_asked_for_if_nothing_else_runs_a_changed_statement(
    ran: dict[str, int], beside: tuple[str, ...], dtype: str
) -> None:
    models = [[("model", name)] for name in ("llama-tiny", "deepseek-dsa", "deepseek-v4")]
    found = Measured([*models, [("model", "llama-tiny"), ("attention_backend", "fa3")]], ran)
    options = SearchOptions().for_change(found)
    assert (options.beside, options.run.mode.dtype) == (beside, dtype)
    assert all(name in options.drawn_too for name in (*beside, *([dtype] if dtype != "float32" else [])))
    assert bool(options.drawn_too) == bool(beside)
    probes = [block.probe for block in islice(Steering(0, options.constraints, found).blocks(), 60 if beside else 0)]
    drawn = {name for probe in probes for name in (probe.model, probe.engine.sglang.attention_backend)}
    assert drawn >= {*beside}
    assert len(drawn) > 5 or not beside


def test_settings_that_all_cases_have_are_left_out(measurement: Coverage) -> None:
    assert measurement.settings
    each = measurement.settings_by_case()
    assert not set(each[0]).intersection(*each[1:])
    assert all({*its} < {*coverage.settings_of(case)} for its, case in zip(each, CASES, strict=True))
    assert measurement.settings.keys() > {"topk", "topic"}


def test_the_measurement_is_of_this_release_and_sends_a_search_to_what_keeps_states(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    assert coverage.read_coverage().sglang == installed_version("sglang"), "make it anew: python -m tests.lab coverage"
    name = "sglang.kernels.ops.mamba.mamba_state_scatter_triton._fused_commit_track_indices_kernel"
    steering = Steering(0, SearchOptions().constraints, measured_of(INSTALLED.root, None, [name]))
    first = [RECIPES[block.focus.model].target.states > 0 for block in islice(steering.blocks(), 20)]
    assert sum(first) >= 12  # two of twenty by their numbers


@pytest.mark.parametrize("known", [False, True])
def test_a_search_stays_where_a_rare_statement_runs(known: bool) -> None:
    measurement = Measured([[("model", "llama-mtp")], *[[("model", "llama-tiny")]] * 9], {"rare": 1}) if known else UNMEASURED
    steering, ran = Steering(0, SearchOptions().constraints, measurement), list[bool]()
    for block in islice(steering.blocks(), 60):
        ran.append(block.focus.model == "llama-mtp")
        for case in [block.probe] * BLOCK:
            steering.add(case, ["rare"] if ran[-1] else [], block.number)
    assert sum(ran[20:]) >= 0.6 * len(ran[20:])  # one of eleven by their numbers, and half at most where its own blocks count
    assert not all(ran[20:])
    assert ran[0] or not known


@pytest.mark.parametrize(("ran", "often"), [({}, True), ({"a": 0b11, "b": 0b101}, True), ({"a": 0b11, "b": 0b1}, False)])
def test_a_change_runs_often_if_every_second_measured_case_ran_some_of_it(ran: dict[str, int], *, often: bool) -> None:
    assert Measured([[]] * 5, ran).often == often
