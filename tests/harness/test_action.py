"""action.yml and its scripts, as far as they can be tried without GitHub and without an engine.

tests/upstream/test_upstream.py runs them on trees.
"""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from eagletwin.harness.families import RECIPES

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / ".github" / "eagletwin"
RUN = SCRIPTS / "run.sh"


def loaded(file: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))
    return found


ACTION, NIGHTLY = loaded("action.yml"), loaded(".github/workflows/nightly.yml")
STEPS = ACTION["runs"]["steps"]


def test_each_input_is_declared_with_a_default_and_each_declared_one_is_used() -> None:
    used = set(re.findall(r"\binputs\.([\w-]+)", json.dumps([STEPS, ACTION["outputs"]])))
    assert used == set(ACTION["inputs"])
    assert all(set(one) == {"description", "default"} for one in ACTION["inputs"].values())


def test_each_step_names_a_script_that_exists_or_an_action_by_its_version() -> None:
    steps = [*STEPS, *NIGHTLY["jobs"]["main"]["steps"]]
    for step in steps:
        assert ("run" in step) != ("uses" in step)
        if "uses" in step:
            assert step["uses"] == "./" or re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"])
        else:
            [script] = re.findall(r"\.github/eagletwin/\w+\.sh", step["run"])
            assert os.access(ROOT / script, os.X_OK)
    assert all(step["shell"] == "bash" for step in STEPS if "run" in step)  # a composite action has no default


def test_inputs_reach_the_script_as_variables_and_never_as_its_text() -> None:
    """A branch's name may be a command."""
    given = {name for step in STEPS for name in step.get("env", {})}
    assert given == set(re.findall(r"\$\{(IN_[A-Z]+)", RUN.read_text()))
    assert not [step for step in STEPS if "${{" in step.get("run", "")]


def test_outputs_and_the_nightly_job_name_what_there_is() -> None:
    ids = {step["id"] for step in STEPS if "id" in step}
    assert set(re.findall(r"steps\.(\w+)\.outputs", json.dumps(ACTION))) <= ids
    [job] = [step["with"] for step in NIGHTLY["jobs"]["main"]["steps"] if step.get("uses") == "./"]
    assert set(job) <= set(ACTION["inputs"])
    assert set(job["families"].split()) <= set(RECIPES)


def script(file: Path, *words: str, cwd: Path, **env: str) -> "subprocess.CompletedProcess[str]":
    environment = {"PATH": os.environ["PATH"], "HOME": str(cwd), "LANG": "C.UTF-8", **env}
    return subprocess.run([file, *words], cwd=cwd, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("word", ["", "rnu"])
def test_a_step_that_does_not_exist_is_a_usage_error(word: str, tmp_path: Path) -> None:
    done = script(RUN, *([word] if word else []), cwd=tmp_path)
    assert done.returncode == 128
    assert done.stderr == (
        f"error: run.sh takes key, setup or run, and not '{word}'\n  so:  nothing was run\n  try: run.sh setup && run.sh run\n"
    )


def test_the_cache_has_another_key_when_what_is_installed_changes(tmp_path: Path) -> None:
    root = tmp_path / "check out"
    (root / ".github").mkdir(parents=True)
    shutil.copytree(SCRIPTS, root / ".github" / "eagletwin")
    shutil.copytree(ROOT / "requirements", root / "requirements")
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, root)

    def key(**env: str) -> str:
        done = script(root / ".github/eagletwin/run.sh", "key", cwd=tmp_path, IN_PYTHON="python3", **env)
        assert done.returncode == 0, done
        return done.stdout.strip()

    first = key(GITHUB_OUTPUT=str(tmp_path / "output"))
    assert (tmp_path / "output").read_text() == f"key={first}\n"
    assert re.fullmatch(r"[0-9a-f]{16}", first)
    assert key() == first
    assert key(IN_TORCH="/a/wheel") != first
    with (root / "requirements/engine.lock").open("a") as lock:
        lock.write("# more\n")
    assert key() != first


def test_there_is_no_key_without_the_python_it_names(tmp_path: Path) -> None:
    done = script(RUN, "key", cwd=tmp_path, IN_PYTHON="no-such-python", GITHUB_OUTPUT=str(tmp_path / "output"))
    assert done.returncode == 127
    assert done.stdout == ""
    assert not (tmp_path / "output").exists()


def test_each_input_reaches_the_command(tmp_path: Path) -> None:
    shutil.copytree(SCRIPTS, tmp_path / ".github" / "eagletwin")
    eagletwin = tmp_path / ".venv" / "bin" / "eagletwin"
    eagletwin.parent.mkdir(parents=True)
    eagletwin.write_text('#!/bin/sh\necho "$@"\nexit 125\n')
    eagletwin.chmod(0o755)
    done = script(tmp_path / ".github/eagletwin/run.sh", "run", cwd=tmp_path, IN_SGLANG=".", IN_BASE="HEAD^1")
    assert done.stdout == "compare . --minutes 10 --seed 0 --base HEAD^1 --ledger all\n"
    assert done.returncode == 125
    done = script(tmp_path / ".github/eagletwin/run.sh", "run", cwd=tmp_path, IN_VLLM="my tree", IN_MINUTES="3")
    assert done.stdout == "compare my tree --engine vllm --minutes 3 --seed 0 --ledger all\n"
    done = script(tmp_path / ".github/eagletwin/run.sh", "run", cwd=tmp_path, IN_VLLM=".", IN_SGLANG=".")
    assert (done.returncode, done.stdout) == (128, "")
    assert "one engine runs" in done.stderr


def test_history_grows_on_a_branch_of_its_own(tmp_path: Path) -> None:
    def git(*words: str, at: str = "clone") -> str:
        done = subprocess.run(["git", "-C", str(tmp_path / at), *words], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    subprocess.run(["git", "init", "--quiet", "--bare", str(tmp_path / "origin")], check=True)
    subprocess.run(
        ["git", "clone", "--quiet", str(tmp_path / "origin"), str(tmp_path / "clone")], check=True, capture_output=True
    )
    (tmp_path / "clone" / "code.py").write_text("1\n")
    git("add", "code.py")
    git("-c", "user.name=t", "-c", "user.email=t@localhost", "commit", "--quiet", "--message", "code")
    for night in (1, 2):
        (tmp_path / "tonight.jsonl").write_text(json.dumps({"night": night}) + "\n")
        done = script(SCRIPTS / "keep.sh", "clone", "tonight.jsonl", cwd=tmp_path)
        assert done.returncode == 0, done
    assert git("ls-tree", "--name-only", "history", at="origin") == "history.jsonl"
    lines = git("show", "history:history.jsonl", at="origin").splitlines()
    assert [json.loads(line)["night"] for line in lines] == [1, 2]
    assert git("rev-list", "--count", "history", at="origin") == "2"
    assert (tmp_path / "clone" / "code.py").is_file()
    assert len(git("worktree", "list").splitlines()) == 1
