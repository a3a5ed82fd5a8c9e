"""Each finding that upstream can take is red on the release and green with its patch, and what it is not is said."""

import ast
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.errors import InputError
from tests import ledger

from ..rows import long
from .attempt import FINDINGS, Process, attempt, changed, folders, take_out

INDEX = FINDINGS.parent / "index.md"
# Red and green takes two imports of SGLang a folder: a grave one here, and all by `make findings`.
IN_THE_SUITE = ("row-overflow",)
MAY_IMPORT = {"sglang", "torch", *sys.stdlib_module_names}


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
    take_out(folder / "fix.patch", tmp_path / "checkout")
    assert all((tmp_path / "checkout" / file).is_file() for file in changed(folder / "fix.patch"))


@pytest.mark.parametrize("folder", folders(), ids=lambda folder: folder.name)
def test_a_finding_needs_sglang_and_torch_alone_and_is_registered_for_ci(folder: Path) -> None:
    [test] = folder.glob("test_*.py")
    source = test.read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(source)))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in imported} <= MAY_IMPORT
    assert 'suite="base-a-test-cpu")' in source
    assert all(len(line) <= 88 for line in source.splitlines() if "http" not in line and '"""' not in line)


@pytest.mark.parametrize("folder", folders(), ids=lambda folder: folder.name)
def test_a_report_has_the_parts_of_the_template_and_is_linked(folder: Path) -> None:
    report = (folder / "report.md").read_text(encoding="utf-8")
    heads = [line for line in report.splitlines() if line.startswith("#")]
    assert heads[1:] == ["## Describe the bug", "## Reproduction", "## Environment"]
    assert f"findings/{folder.name}/report.md" in INDEX.read_text(encoding="utf-8")


def test_every_live_bug_with_a_candidate_fix_for_a_cpu_has_its_folder() -> None:
    assert ledger.wanted().keys() == {folder.name for folder in folders()}, f"run: {ledger.COMMAND}"


@pytest.mark.slow
def test_a_patch_that_is_the_candidate_fix_is_made_of_it() -> None:
    assert not ledger.stale(ledger.findings()), f"run: {ledger.COMMAND}"


def test_a_patch_is_compared_by_what_it_does(tmp_path: Path) -> None:
    bug, patch = LEDGER["pipeline-mixed"], tmp_path / "fix.patch"
    patch.write_text(ledger.fix_of(bug).replace("# Each of them is given", "# Each row is given"))
    assert ledger.says_the_same(bug, patch)
    patch.write_text(ledger.fix_of(bug).replace("last_prefill_chunk = True", "last_prefill_chunk = False"))
    assert not ledger.says_the_same(bug, patch)


@pytest.fixture
def finding(tmp_path: Path) -> Path:
    folder = tmp_path / "row-overflow"
    shutil.copytree(FINDINGS / "row-overflow", folder)
    return folder


@pytest.mark.parametrize("file", ["report.md", "fix.patch", "test_row_overflow.py"])
def test_a_folder_without_one_of_its_files_is_refused(process: Process, finding: Path, file: str) -> None:
    (finding / file).unlink()
    with pytest.raises(InputError, match=rf"{file} is not there\n  so:  upstream cannot take the finding\n  try: add the file"):
        attempt(finding, process)


def test_a_patch_that_does_not_apply_is_refused(process: Process, finding: Path) -> None:
    patch = finding / "fix.patch"
    patch.write_text(patch.read_text().replace("-        if page_size > 1", "-        if page_size > 2"))
    with pytest.raises(InputError, match=r"(?s)does not apply to the installed SGLang: error: patch failed.*\n  so:  its test"):
        attempt(finding, process)


def test_a_patch_of_other_files_is_refused(finding: Path) -> None:
    patch = finding / "fix.patch"
    patch.write_text("--- a/README.md\n+++ b/README.md\n@@ -1 +1 @@\n-a\n+b\n")
    with pytest.raises(InputError, match=r"changes README\.md\n  so:  it cannot be applied"):
        changed(patch)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        *long(
            (
                "import sglang.srt.mem_cache.allocation_sizing; self.fail('always')",
                r"does not pass with fix\.patch: 1 ran; failures",
            )
        ),
        ("pass", r"imports no file that the patch changes"),
        (
            "import sglang.srt.mem_cache.allocation_sizing",
            r"does not fail by an assertion on the release: 1 ran; all pass",
        ),
        ("self.absent", r"does not fail by an assertion on the release: 1 ran; errors"),
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
