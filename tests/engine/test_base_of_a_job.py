"""`compare --base`: a pull request changes what it has otherwise than its base, though all of it is committed."""

from pathlib import Path

import pytest

from eagletwin.harness.core.environment import installed
from eagletwin.harness.engines.source import INSTALLED

from .history import History
from .planted_trees import IDLE_KERNEL, IDLE_NAME
from .test_compare import UNDONE, UNDONE_NAME
from .warm import eagletwin


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> History:
    """The release, then a commit that changes what nothing here runs, then one that undoes the fix of #26329."""
    history = History(tmp_path_factory.mktemp("base") / "checkout")
    package = history.tree_of(INSTALLED.root)
    history.commit("release", package, transformers=installed("transformers"))
    for file, old, new in (IDLE_KERNEL, UNDONE):
        text = (INSTALLED.root / "sglang" / file).read_text()
        package = history.with_file(package, file, text.replace(old, new))
        history.commit(file, package, transformers=installed("transformers"))
    history.git("checkout", "--quiet", "--force", "main")
    return history


@pytest.mark.long
def test_a_job_says_which_of_the_functions_that_differ_from_its_base_ran(checkout: History, tmp_path: Path) -> None:
    words = ("compare", checkout.path, "--minutes", "0", "--ledger", "26329")
    done = eagletwin(*words, "--base", "HEAD^", cwd=tmp_path)
    assert done.returncode == 1, done
    text = " ".join(done.stdout.split())
    assert f"This tree differs from {checkout.commits[1][:10]}. Run: {UNDONE_NAME} in 1 of 1 case." in text
    assert IDLE_NAME not in text
    assert f"eagletwin compare {checkout.path} --minutes 0 --ledger 26329 --base 'HEAD^'" in text
    summary = (tmp_path / "eagletwin-runs" / "compare" / "summary.md").read_text()
    assert f"a change of: {checkout.commits[1][:10]}" in summary
    assert str(checkout.path) not in summary
    assert len(checkout.git("worktree", "list").splitlines()) == 1


def test_a_job_of_which_no_case_runs_what_differs_cannot_tell(checkout: History, tmp_path: Path) -> None:
    checkout.git("checkout", "--quiet", "--force", checkout.commits[1])
    words = ("compare", checkout.path, "--ledger", "25015", "--minutes", "0")
    done = eagletwin(*words, "--base", "HEAD^", cwd=tmp_path)
    assert done.returncode == 125, done
    assert f"Not run: {IDLE_NAME}" in " ".join(done.stdout.split())
    assert "No case ran any of that, so this job says nothing about it." in done.stdout
    without = eagletwin(*words, cwd=tmp_path)
    assert without.returncode == 0, without
    assert "it is not known what" in " ".join(without.stdout.split())
    assert eagletwin(*words, "--strict", cwd=tmp_path).returncode == 125
