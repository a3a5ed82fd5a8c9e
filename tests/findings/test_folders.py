"""Each finding that upstream can take is red on the release and green with its patch, and what it is not is said."""

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.run_spec import ENGINES, Engine
from tests import ledger

from ..rows import long
from . import change, counters
from .attempt import FINDINGS, REPORT, Attempt, Process, attempt, changed, engine_of, folders, take_out

INDEX = FINDINGS / "README.md"
# Red and green takes two imports of SGLang a folder: a grave one here, and all by `make findings`.
IN_THE_SUITE = ("row-overflow",)
PARTS = ("Harm.", "Symptom.", "Who is hit.", "Cause.", "Since when.", "Fix.", "Reported before?")
MAY_IMPORT: dict[Engine, set[str]] = {
    "sglang": {"sglang", "torch", *sys.stdlib_module_names},
    "vllm": {"vllm", "torch", "pytest", *sys.stdlib_module_names},
}
# How each project's CI finds a test for machines without a GPU.
REGISTERED: dict[Engine, str] = {"sglang": 'suite="base-a-test-cpu")', "vllm": "pytestmark = pytest.mark.cpu_test"}


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    with Process() as process:
        yield process


@pytest.mark.long
@pytest.mark.parametrize("name", IN_THE_SUITE)
@pytest.mark.slow
def test_the_test_is_red_on_the_release_and_green_with_the_patch(process: Process, name: str) -> None:
    assert attempt(FINDINGS / name, process).red


@pytest.mark.parametrize("folder", folders(), ids=lambda folder: folder.name)
def test_the_patch_applies_to_the_installed_release(folder: Path, tmp_path: Path) -> None:
    take_out(folder / REPORT, tmp_path / "checkout")
    assert all((tmp_path / "checkout" / file).is_file() for file in changed(folder / REPORT))


@pytest.mark.parametrize("folder", folders(), ids=lambda folder: folder.name)
def test_a_finding_needs_its_engine_and_torch_alone_and_is_registered_for_ci(folder: Path) -> None:
    [test], engine = folder.glob("test_*.py"), engine_of(folder / REPORT)
    source = test.read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(source)))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in imported} <= MAY_IMPORT[engine]
    assert REGISTERED[engine] in source
    assert all(len(line) <= 88 for line in source.splitlines() if "http" not in line and '"""' not in line)


@pytest.mark.parametrize("folder", folders(), ids=lambda folder: folder.name)
def test_a_report_has_the_parts_of_the_template_and_is_linked(folder: Path) -> None:
    report = (folder / "report.md").read_text(encoding="utf-8")
    heads = [line for line in report.splitlines() if line.startswith("#")]
    assert heads[1:] == ["## Describe the bug", "## Reproduction", "## Environment", "## Patch"]
    parts = [report.find(f"\n**{part}**") for part in PARTS]
    assert -1 not in parts
    assert parts == sorted(parts)
    assert "\nSearched on 20" in report[parts[-1] :]
    assert ENGINES[engine_of(folder / REPORT)].launch in report or "No public " in report
    assert f"]({folder.name}/report.md)" in INDEX.read_text(encoding="utf-8")


def test_every_live_bug_with_a_candidate_fix_for_a_cpu_has_its_folder() -> None:
    assert ledger.wanted().keys() == {folder.name for folder in folders()}, f"run: {ledger.COMMAND}"


@pytest.mark.slow
def test_a_patch_that_is_the_candidate_fix_is_made_of_it() -> None:
    assert not ledger.stale(ledger.findings()), f"run: {ledger.COMMAND}"


def test_a_patch_is_compared_by_what_it_does(tmp_path: Path) -> None:
    bug, patch = LEDGER["pipeline-mixed"], tmp_path / REPORT
    patch.write_text(ledger.fix_of(bug).replace("# Each of them gets", "# Each row gets"))
    assert ledger.says_the_same(bug, patch)
    patch.write_text(ledger.fix_of(bug).replace("last_prefill_chunk = True", "last_prefill_chunk = False"))
    assert not ledger.says_the_same(bug, patch)


@pytest.fixture
def finding(tmp_path: Path) -> Path:
    folder = tmp_path / "row-overflow"
    shutil.copytree(FINDINGS / "row-overflow", folder)
    return folder


@pytest.mark.parametrize("file", ["report.md", "test_row_overflow.py"])
def test_a_folder_without_one_of_its_files_is_refused(process: Process, finding: Path, file: str) -> None:
    (finding / file).unlink()
    with pytest.raises(InputError, match=rf"{file} is not there\n  so:  upstream cannot take the finding\n  try: add the file"):
        attempt(finding, process)


def test_a_patch_that_does_not_apply_is_refused(process: Process, finding: Path) -> None:
    patch = finding / REPORT
    patch.write_text(patch.read_text().replace("-        if page_size > 1", "-        if page_size > 2"))
    with pytest.raises(InputError, match=r"(?s)does not apply to the release: error: patch failed.*\n  so:  its test"):
        attempt(finding, process)


def test_a_patch_of_other_files_is_refused(finding: Path) -> None:
    patch = finding / REPORT
    patch.write_text("--- a/README.md\n+++ b/README.md\n@@ -1 +1 @@\n-a\n+b\n")
    with pytest.raises(InputError, match=r"changes README\.md\n  so:  it cannot be applied"):
        changed(patch)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        *long(
            (
                "import sglang.srt.mem_cache.allocation_sizing; self.fail('always')",
                r"does not pass with the patch: 1 ran; failures",
            )
        ),
        ("pass", r"imports no file that the patch changes"),
        (
            "import sglang.srt.mem_cache.allocation_sizing",
            r"does not fail by an assertion on the release: 1 ran; all pass",
        ),
        *long(("self.absent", r"does not fail by an assertion on the release: 1 ran; errors")),
        ("import eagletwin", r"does not fail by an assertion on the release: 1 ran; errors"),
    ],
)
@pytest.mark.slow
def test_a_test_that_does_not_show_the_bug_is_refused(process: Process, finding: Path, body: str, said: str) -> None:
    lines = ["import unittest", "class One(unittest.TestCase):", "    def test_it(self):", f"        {body}"]
    (finding / "test_row_overflow.py").write_text("\n".join(lines))
    with pytest.raises(InputError, match=said):
        attempt(finding, process)


@pytest.mark.slow
def test_a_test_that_cannot_be_imported_is_refused(process: Process, finding: Path) -> None:
    (finding / "test_row_overflow.py").write_text("import eagletwin")
    with pytest.raises(InputError, match=r"(?s)cannot be run:.*ModuleNotFoundError.*\n  so:  it shows nothing"):
        attempt(finding, process)


# change.py: what a patch breaks and costs.


@pytest.mark.parametrize(
    ("reached", "undecided", "prefix_cache", "plain", "code"),
    [(4, 0, 1, 0, 1), (4, 0, 0, 125, 0), (4, 0, 125, 125, 0), (3, 0, 0, 125, 125), (4, 3, 0, 125, 125), (12, 0, 0, 125, 125)],
)
def test_each_search_is_a_command_and_one_that_diverges_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    reached: int,
    undecided: int,
    prefix_cache: int,
    plain: int,
    code: int,
) -> None:
    said = tmp_path / "said"
    command = tmp_path / "eagletwin"
    tally = {"cases": 20, "reached": reached, "undecided": undecided, "gaps": 0}
    facts = {"folder": "f", "summary": {"headline": "H", "tally": tally, "known": [{"id": "k", "cases": 1}]}}
    codes = f"case $* in *host*) exit {prefix_cache};; *plain*) exit {plain};; esac"
    command.write_text(f"#!/bin/sh\necho $* >> {said}\necho '{json.dumps(facts)}'\n{codes}\n")
    command.chmod(0o755)
    monkeypatch.setattr(change, "EAGLETWIN", (str(command),))
    monkeypatch.setattr(change, "attempt", lambda *_: Attempt("it", 2, ["one"], (1.0, 2.0)))
    monkeypatch.setattr(change, "costs", lambda *_: {"usual": ({"DECODE": [10, 2, 3, 4]}, {"DECODE": [13, 2, 2, 4]})})
    assert change.main(["--minutes", "0.5", "penalties"]) == code
    out = capsys.readouterr().out
    assert "cost, usual case, decode: lines +3 of 10, launches +0 of 2, waits -1 of 3, bytes +0 of 4\n" in out
    assert "search, guided by the patch: nothing new: H; known bugs: k\n" in out
    seldom = plain == 125 and reached < 10 and not undecided
    assert f"search, plain decode: {'nothing new' if seldom else change.FOUND[plain]}: H" in out
    assert f"\n  {3 * reached} cases ran the patch\n" in out
    ran = said.read_text().splitlines()
    assert len(ran) == len(change.SEARCHES)
    assert all(f"fuzz --patch {FINDINGS}/penalties/report.md --minutes 0.5" in line for line in ran)


def test_a_search_that_ends_by_an_error_cannot_tell(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command = tmp_path / "eagletwin"
    command.write_text('#!/bin/sh\necho \'{"error": "no engine"}\'\nexit 125\n')
    command.chmod(0o755)
    monkeypatch.setattr(change, "EAGLETWIN", (str(command),))
    results = list(change.searched(ledger.wanted()["penalties"], tmp_path / REPORT, 0.1))
    assert [code for _, code in results] == [125, 125, 125, 125]
    assert "no engine" in results[0][0]


@pytest.mark.parametrize("broken", ["findings", "unconfirmed", "refused", "lost", ""])
def test_a_search_that_a_patch_breaks_has_not_run_it_too_seldom(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, broken: str
) -> None:
    """Of a crash, and of an engine that does not start, the exit code of a search is 125 too."""
    command = tmp_path / "eagletwin"
    tally = {"cases": 20, "reached": 9, "undecided": 0, "gaps": 0, "lost": ["a block"] * (broken == "lost")}
    facts = {"summary": {"headline": "H", "tally": tally, "known": []} | {broken: ["one"]}}
    command.write_text(f"#!/bin/sh\necho '{json.dumps(facts)}'\nexit 125\n")
    command.chmod(0o755)
    monkeypatch.setattr(change, "EAGLETWIN", (str(command),))
    results = list(change.searched(ledger.wanted()["penalties"], tmp_path / REPORT, 0.1))
    assert [code for _, code in results] == [125 if broken else 0] * len(change.SEARCHES) + [0]


def test_a_fix_that_is_right_in_one_view_is_searched_in_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command = tmp_path / "eagletwin"
    command.write_text('#!/bin/sh\necho {\\"error\\": \\"$*\\"}\nexit 125\n')
    command.chmod(0o755)
    monkeypatch.setattr(change, "EAGLETWIN", (str(command),))
    for name, own in {"standalone-keys": True, "standalone-shift": False}.items():
        lines = [line for line, _ in change.searched(ledger.wanted()[name], tmp_path / REPORT, 0.1)][:-1]
        assert ["--view shifted" in line for line in lines] == [own] * len(lines)


def test_a_fix_that_no_search_on_a_cpu_reaches_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command = tmp_path / "eagletwin"
    command.write_text('#!/bin/sh\necho {\\"error\\": 1}\nexit 125\n')
    command.chmod(0o755)
    monkeypatch.setattr(change, "EAGLETWIN", (str(command),))
    why = {
        "grammar-stride": ": this code needs --device cuda",
        "dsv4-draft-reads": ": no case runs this code, a probe calls it",
    }
    for name in (*why, "penalties"):
        *_, (line, code) = change.searched(ledger.wanted()[name], tmp_path / REPORT, 0.1)
        assert (line, code) == (f"  0 cases ran the patch{why.get(name, '')}", 125)


def test_a_fix_is_searched_where_its_bug_needs_what_no_search_has_unasked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    command = tmp_path / "eagletwin"
    command.write_text('#!/bin/sh\necho {\\"error\\": \\"$*\\"}\nexit 125\n')
    command.chmod(0o755)
    monkeypatch.setattr(change, "EAGLETWIN", (str(command),))
    asked = {"dp-input-logprobs": "dp-attention", "vllm-33299": "mimo", "vllm-58080": "model-runner=v1", "penalties": ""}
    for name, only in asked.items():
        first, *further = [line for line, _ in change.searched(ledger.wanted()[name], tmp_path / REPORT, 0.1)][:-1]
        assert (f"--only {only}" in first) if only else ("--only" not in first)
        assert not any(f"--only {only}" in line for line in further if only)


@pytest.mark.long
def test_batches_are_counted_in_sglang_alone(tmp_path: Path) -> None:
    module = tmp_path / "sglang" / "srt" / "work.py"
    module.parent.mkdir(parents=True)
    module.write_text("import torch\ndef work(n):\n    for _ in range(n):\n        torch.ones(2).add(1).tolist()\n")
    code = f"""
import sys
sys.path[:0] = [{str(module.parent)!r}, {str(Path(counters.__file__).parent)!r}]
import counters, work
counters.begin("DECODE")
work.work(3)
exec(compile("def patched():\\n    return 1\\npatched()", "<sglang.srt.it, patched>", "exec"))
[1 for _ in range(9)]
counters.begin("EXTEND")
"""
    environment = os.environ | {"EAGLETWIN_COUNTS": str(tmp_path / "counts")}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    [line] = map(json.loads, (tmp_path / "counts").read_text().splitlines())
    assert {name: line[name] for name in ("kind", *counters.KINDS)} == {
        "kind": "DECODE",
        "lines": 10,
        "launches": 6,
        "waits": 3,
        "bytes": 0,
    }
