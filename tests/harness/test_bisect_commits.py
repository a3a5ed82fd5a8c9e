"""`git bisect` on a scratch worktree: git is real; a look reads a word in the tree instead of an engine."""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from eagletwin.harness.commands.bisect.commits import bisect_commits, ends_of
from eagletwin.harness.commands.bisect.report import VersionsOutcome, version_report
from eagletwin.harness.commands.bisect.state import BisectionPlan, Looked, Sighting, Subject, open_run
from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.core.errors import HarnessError, InputError, interrupt_on_sigterm

CASE = Case(name="x", model="llama-tiny", num_steps=1, requests=(Request(id="a", prompt=(1,), max_new_tokens=1),))


def git(repository: Path, *words: str) -> str:
    who = {
        "GIT_AUTHOR_NAME": "t",
        "GIT_AUTHOR_EMAIL": "t@localhost",
        "GIT_COMMITTER_NAME": "t",
        "GIT_COMMITTER_EMAIL": "t@localhost",
    }
    done = subprocess.run(
        ["git", "-C", str(repository), *words], env=os.environ | who, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "tmp").mkdir()


def history(tmp_path: Path, *words: str) -> Path:
    """A repository with one commit for each word: what its look will say. "note": one that changes nothing in python/."""
    repository = tmp_path / "repository"
    package = repository / "python" / "sglang"
    package.mkdir(parents=True)
    git(repository, "init", "--quiet", "--initial-branch=main")
    for number, word in enumerate(words):
        file = repository / "note" if word == "note" else package / "__init__.py"
        file.write_text(f"{word} {number}\n")
        git(repository, "add", ".")
        git(repository, "commit", "--quiet", "-m", f"{number} {word}")
    hook = repository / ".git" / "hooks" / "post-checkout"
    hook.write_text(f"#!/bin/sh\ntouch {tmp_path}/a-hook-ran\n")
    hook.chmod(0o755)
    return repository


def bisect(tmp_path: Path, repository: Path, *, full: bool = True) -> tuple[VersionsOutcome, str, list[str]]:
    """All of the history: outcome, report, and the words that were looked at between the ends, in order.

    full: whether the disk is, so that a look at "fail" fails. A look at "wait" goes on for a minute.
    """
    asked = []

    def look(commit: str, tree: Path) -> Looked:
        word = (tree / "python/sglang/__init__.py").read_text().split()[0]
        asked.append(word)
        if word == "fail" and full:
            raise HarnessError("the disk is full", consequence="no trace", remedy="make room")
        if word == "wait":
            (tmp_path / "waits").touch()
            time.sleep(60)
        seen = {"bad": Sighting(status="diverged", rule="draft.slots", place="x")}
        seen |= dict.fromkeys(("good", "fail"), Sighting(status="equal"))
        return Looked(version=commit, sightings=(seen.get(word, Sighting(status="unknown", why="it does not import")),))

    ends = ends_of(repository, git(repository, "rev-list", "--max-parents=0", "main"), "main")
    with open_run(tmp_path / "runs", BisectionPlan(subject=Subject(case=CASE), versions=ends, checkout=str(repository))) as run:
        resumed = run.resumed
        outcome = bisect_commits(run, look)
        report = version_report(outcome, CASE, run, lambda commit: f"look at {commit[:7]}")
        return outcome, report, asked[0 if resumed else 2 :]


def name(repository: Path, revision: str) -> str:
    return git(repository, "log", "-1", "--format=%h %s", revision)


@pytest.mark.slow
def test_the_first_bad_commit_is_named_and_the_user_s_checkout_and_bisection_are_left_alone(tmp_path: Path) -> None:
    repository = history(tmp_path, "good", "good", "note", "bad", "note", "bad")
    (repository / "python" / "sglang" / "__init__.py").write_text("edited, not staged\n")
    (repository / "staged").write_text("staged\n")
    git(repository, "add", "staged")
    git(repository, "bisect", "start")
    git(repository, "bisect", "bad", "main")
    watched = [("status", "--porcelain"), ("bisect", "log"), ("rev-parse", "HEAD"), ("worktree", "list"), ("for-each-ref",)]
    before = [git(repository, *words) for words in watched]
    outcome, report, asked = bisect(tmp_path, repository)
    assert outcome.answered
    assert report.startswith(f"CAME WITH {name(repository, 'main~2')}  x: draft.slots at x")
    assert f"good: look at {git(repository, 'rev-parse', '--short=7', 'main~4')}" in report
    assert sorted(asked) == ["bad", "good"]  # commits that change nothing in python/ are not looked at
    assert [git(repository, *words) for words in watched] == before
    assert not list((tmp_path / "tmp").iterdir())
    assert not (tmp_path / "a-hook-ran").exists()


def test_the_first_good_commit_is_named_whichever_end_is_given_first(tmp_path: Path) -> None:
    repository = history(tmp_path, "bad", "note", "good", "note")
    first = git(repository, "rev-parse", "main~3")
    assert ends_of(repository, "main", first) == ends_of(repository, first, "main")
    outcome, report, asked = bisect(tmp_path, repository)
    assert outcome.answered
    assert report.startswith(f"FIXED WITH {name(repository, 'main~1')} ")
    assert asked == []  # the two ends say it all


@pytest.mark.slow
def test_commits_that_cannot_be_decided_are_skipped_and_a_range_is_named_if_one_of_them_may_be_it(tmp_path: Path) -> None:
    repository = history(tmp_path, "bad", "skip", "skip", "good")
    outcome, report, asked = bisect(tmp_path, repository)
    assert not outcome.answered
    between = [git(repository, "rev-parse", f"main~{back}") for back in (2, 1)]
    assert [outcome.versions[index] for index in outcome.found.between] == between
    assert report.startswith(f"FIXED AFTER {name(repository, 'main~3')}, UP TO {name(repository, 'main')} ")
    assert "skipped: it does not import" in report
    assert asked == ["skip", "skip"]


def test_an_end_that_does_not_import_is_no_answer_and_no_question_of_rules(tmp_path: Path) -> None:
    repository = history(tmp_path, "good", "bad")
    git(repository, "tag", "--annotate", "--message=x", "v1", "main~1")
    ends = ends_of(repository, "main", "v1")
    assert ends == (git(repository, "rev-parse", "v1^{commit}"), git(repository, "rev-parse", "main"))
    absent = Sighting(status="unknown", why="it does not import", ran=False)
    with open_run(tmp_path / "runs", BisectionPlan(subject=Subject(case=CASE), versions=ends, checkout=str(repository))) as run:
        outcome = bisect_commits(run, lambda commit, _: Looked(version=commit, sightings=(absent,)))
        report = version_report(outcome, CASE, run, str)
    assert not outcome.answered
    assert report.count("skipped: it does not import") == 2
    assert "No answer: an end cannot be decided.\n" in report


@pytest.mark.slow
def test_a_look_that_fails_ends_the_bisection_which_is_taken_up_again(tmp_path: Path) -> None:
    repository = history(tmp_path, "good", "fail", "bad")
    with pytest.raises(HarnessError, match="the disk is full"):
        bisect(tmp_path, repository)
    assert not list((tmp_path / "tmp").iterdir())
    assert len(git(repository, "worktree", "list").splitlines()) == 1
    outcome, _, asked = bisect(tmp_path, repository, full=False)
    assert outcome.answered
    assert asked == ["fail"]  # the ends are known
    assert len(list((tmp_path / "runs").iterdir())) == 1


@pytest.fixture(params=[signal.SIGTERM, signal.SIGHUP])
def number(request: pytest.FixtureRequest) -> Iterator[int]:
    """A signal that ends a process, also where the suite runs under nohup: what is ignored there stays ignored."""
    before = signal.signal(request.param, signal.SIG_DFL)
    yield request.param
    signal.signal(request.param, before)


@pytest.mark.slow
def test_an_interruption_leaves_nothing_behind(tmp_path: Path, number: int) -> None:
    repository = history(tmp_path, "good", "wait", "bad")

    def interrupt() -> None:
        while not (tmp_path / "waits").exists():
            time.sleep(0.05)
        os.kill(os.getpid(), number)

    threading.Thread(target=interrupt, daemon=True).start()
    with interrupt_on_sigterm(), pytest.raises(KeyboardInterrupt):
        bisect(tmp_path, repository)
    assert not list((tmp_path / "tmp").iterdir())
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_what_is_no_repository_and_what_is_no_commit_is_refused(tmp_path: Path) -> None:
    repository = history(tmp_path, "good", "bad")
    with pytest.raises(InputError, match="has no commit 'nothing'"):
        ends_of(repository, "nothing", "main")
    with pytest.raises(InputError, match="has no commit"):
        ends_of(repository, "--help", "main")
    with pytest.raises(InputError, match="one commit"):
        ends_of(repository, "main", "HEAD")
    (tmp_path / "plain").mkdir()
    for folder, word in (("plain", "not a git repository"), ("nowhere", "No such file or directory")):
        with pytest.raises(InputError, match=f"git rev-parse in {tmp_path / folder}: .*{word}"):
            ends_of(tmp_path / folder, "main", "main~1")
