"""The action's script ends as documented, on a tree that holds a fix, on one without it, and on a broken one."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from eagletwin.harness.page.render import NAME

from ..rows import long
from .attempt import ROOT, TEST, package
from .undo import make_tree, undo


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


@pytest.mark.parametrize(("tree", "code"), [*long(("fixed", 0)), ("reverted", 1), *long(("broken", 125))])
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
