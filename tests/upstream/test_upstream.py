"""The file and the action that SGLang gets: both run on trees, as they are and with one fix undone."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from eagletwin.cases.ledger import LEDGER
from eagletwin.cases.reach import why_unreachable
from eagletwin.harness.page.render import NAME

from ..rows import long
from .attempt import ROOT, TEST, UNDONE, attempt, edits_of, make_tree, name_of_test, package, undo

# The file for SGLang's own CI is as SGLang's tests are, covers the ledger, and is red where a fix is undone.
#
# `make upstream-test` runs all of it in each tree, in an environment of its own.

SOURCE = TEST.read_text(encoding="utf-8")


def test_sglangs_own_collector_takes_it_into_the_suite() -> None:
    from sglang.test.ci.ci_register import HWBackend, collect_tests

    [one] = collect_tests([str(TEST)], sanity_check=True)
    assert (one.backend, one.effective_suite, one.disabled) == (HWBackend.CPU, "base-a-test-cpu", None)
    assert 0 < one.est_time <= 60


def test_it_needs_eagletwin_and_sglang_alone_and_is_written_as_theirs_are() -> None:
    nodes = list(ast.walk(ast.parse(SOURCE, feature_version=(3, 10))))
    imported = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {name.partition(".")[0] for name in imported} <= {"eagletwin", "sglang", *sys.stdlib_module_names}
    assert max(map(len, SOURCE.splitlines())) <= 88


def test_every_fix_of_the_ledger_that_a_cpu_reaches_has_its_test() -> None:
    asked = re.findall(r'self\._assert_fixed\("(.*)"\)', SOURCE)
    assert sorted(asked) == sorted(entry.id for entry in LEDGER.values() if entry.fixed and not why_unreachable(entry))


@pytest.mark.parametrize("bug", UNDONE)
def test_a_fix_is_undone_in_a_tree_and_the_release_stays_as_it_is(bug: str, tmp_path: Path) -> None:
    make_tree(package(), tmp_path, TEST)
    files = {edit.target.split(".")[-2] for edit in edits_of(bug)} | {edit.target.split(".")[-3] for edit in edits_of(bug)}
    diff = undo(tmp_path, bug)
    [changed] = re.findall(r"^\+\+\+ b/python/sglang/(\S+)", diff, re.MULTILINE)
    assert Path(changed).stem in files
    assert (tmp_path / "python/sglang" / changed).read_text() != (package() / changed).read_text()
    assert f'self._assert_fixed("{bug}")' in SOURCE.partition(f"def {name_of_test(bug)}(")[2].partition("def ")[0]


def test_a_tree_that_has_no_such_text_is_an_error(tmp_path: Path) -> None:
    make_tree(package(), tmp_path, TEST)
    undo(tmp_path, "26329")
    with pytest.raises(ValueError, match="occurs 0 times, not once"):
        undo(tmp_path, "26329")


@pytest.mark.long
@pytest.mark.slow
def test_a_test_is_red_where_its_fix_is_undone_and_another_is_green(tmp_path: Path) -> None:
    file = make_tree(package(), tmp_path, TEST)
    undo(tmp_path, "26329")
    done = attempt(tmp_path, file, name_of_test("26329"), name_of_test("33758"))
    assert (done.ran, done.failed, done.errors) == (2, (name_of_test("26329"),), ()), done.output
    assert done.red_by(name_of_test("26329"))
    assert not done.green
    assert "draft.input_ids" in done.output
    assert "again: eagletwin check 26329" in done.output


# The action's script ends as documented, on a tree that holds a fix, on one without it, and on a broken one.


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The script in a root whose .venv runs the command line of this environment."""
    root = tmp_path / "root"
    shutil.copytree(ROOT / ".github", root / ".github")
    command = root / ".venv" / "bin" / "eagletwin"
    command.parent.mkdir(parents=True)
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m eagletwin "$@"\n')
    command.chmod(0o755)
    return root / ".github" / "eagletwin" / "run.sh"


@pytest.mark.parametrize(("tree", "code"), [*long(("fixed", 0), ("reverted", 1)), ("broken", 125)])
@pytest.mark.slow
def test_the_script_ends_as_documented(script: Path, tmp_path: Path, tree: str, code: int) -> None:
    make_tree(package(), tmp_path / "tree", TEST)
    if tree == "reverted":
        undo(tmp_path / "tree", "26329")
    if tree == "broken":
        file = tmp_path / "tree/python/sglang/srt/managers/scheduler.py"
        file.unlink()
        file.write_text("def (:\n")
    names = {"IN_SGLANG": "tree", "IN_LEDGER": "26329", "IN_MINUTES": "0", "IN_HISTORY": "history.jsonl"}
    names |= {"GITHUB_ACTIONS": "true", "GITHUB_OUTPUT": "output", "GITHUB_STEP_SUMMARY": "summary.md"}
    done = subprocess.run([script, "run"], cwd=tmp_path, env=os.environ | names, capture_output=True, text=True, check=False)
    assert done.returncode == code, done
    assert (tmp_path / "output").read_text() == f"exit-code={code}\n"
    said = {0: "nothing found", 1: "wrong numbers", 125: "cannot tell"}[code]
    assert (tmp_path / "summary.md").read_text().startswith(f"## eagletwin: {said}\n")
    [line] = (tmp_path / "history.jsonl").read_text().splitlines()
    night = json.loads(line)
    assert night["exit_code"] == code
    noted = [line for line in done.stdout.splitlines() if line.startswith("::")]
    if code == 0:
        assert night["ledger"]["holds"] == ["26329"]
        assert noted == []
    elif code == 1:
        assert night["ledger"]["lacks"] == ["26329"]
        assert len(noted) == 1
        assert "draft.input_ids" in noted[0]
        assert (tmp_path / "eagletwin-runs/compare/lacks-26329" / NAME).is_file()
    else:
        assert "SyntaxError" in night["failed"]
        assert len(noted) == 1
