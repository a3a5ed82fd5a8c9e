"""`fuzz --watch`: a save interrupts a search or begins one, a line has the verdict, and Ctrl-C ends with its exit code."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.cli.main import run_command
from eagletwin.harness.commands.fuzz import command
from eagletwin.harness.commands.fuzz.tally import Tally
from eagletwin.harness.commands.fuzz.watching import Files, WatchedSearch, search_again
from eagletwin.harness.core.differs import Changes, Differs
from eagletwin.harness.core.errors import EXIT_USAGE, AlreadyReported, InputError, run_guarded

CASE = LEDGER["25015"].case


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "srt" / "__pycache__").mkdir(parents=True)
    (tmp_path / "srt" / "a.py").write_text("1")
    return tmp_path


def looking(*places: str, cases: int = 3, reached: int = 2) -> Any:
    """A search that ran the first of these statements."""
    differs = Differs(base="0.5.23", functions=("m.f",), statements={"m.f": places}, executed=places[:1]) if places else None
    tally = Tally(cases=cases, reached=reached, changes=Changes(differs))
    return SimpleNamespace(tally=tally, corpus=SimpleNamespace(recent=(CASE,) if places else ()))


def ctrl_c(_: WatchedSearch) -> None:
    raise AlreadyReported(130)


def searches(*each: Callable[[WatchedSearch], None]) -> Callable[[WatchedSearch], None]:
    """One after the other; then Ctrl-C."""
    left = [*each, ctrl_c]
    return lambda one: left.pop(0)(one)


def answering(code: int, *places: str, then: Callable[[], object] = lambda: None) -> Callable[[WatchedSearch], None]:
    def search(one: WatchedSearch) -> None:
        one.follow(looking(*places))
        one.answer(code)
        then()

    return search


def test_what_is_saved_made_or_removed_is_seen_and_what_python_writes_is_not(tree: Path) -> None:
    files = Files(tree)
    (tree / "srt" / "__pycache__" / "a.py").write_text("1")
    (tree / "srt" / "notes.md").write_text("1")
    assert files.saved() == []
    (tree / "srt" / "a.py").write_text("12")
    (tree / "b.py").write_text("")
    assert files.saved() == ["a.py", "b.py"]
    files.forget()
    assert files.saved() == []
    (tree / "b.py").unlink()
    assert files.saved() == ["b.py"]


def test_a_save_after_a_search_begins_another_and_ctrl_c_ends_with_the_last_verdict(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def save() -> None:
        (tree / "srt" / "a.py").write_text("two")

    found = answering(1, "f.py:1", "f.py:2", then=save)
    assert search_again(tree, searches(answering(0, then=save), found, ctrl_c)) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("EQUAL  no change: 3 cases; ")
    assert first.endswith(" s after the start")
    assert second.startswith("DIVERGED  f: 2 of 3 cases ran it (1 of 2 statements); ")
    assert second.endswith(" s after a.py was saved")


def test_a_save_while_a_search_runs_ends_it_and_the_next_begins_with_what_ran_the_change(tree: Path) -> None:
    def run_on() -> None:
        (tree / "srt" / "a.py").write_text("two")
        while True:
            time.sleep(0.01)

    rounds = list[WatchedSearch]()
    each = searches(answering(0, "f.py:1", then=run_on), answering(0, then=run_on))

    def search(one: WatchedSearch) -> None:
        rounds.append(one)
        each(one)

    assert search_again(tree, search) == 0
    assert [one.recent for one in rounds] == [(), (CASE,), (CASE,)]
    assert [one.saved for one in rounds] == [[], ["a.py"], ["a.py"]]


def test_ctrl_c_while_nothing_runs_ends_it_too(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda _: os.kill(os.getpid(), signal.SIGINT))
    assert search_again(tree, answering(125, "f.py:1")) == 125


def test_what_keeps_a_search_from_running_is_said_and_the_next_save_is_waited_for(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: WatchedSearch) -> None:
        (tree / "srt" / "a.py").write_text("two")
        raise InputError("the tree holds no sglang", consequence="nothing was run", remedy="name another")

    assert search_again(tree, searches(refuse)) == EXIT_USAGE
    assert "error: the tree holds no sglang" in capsys.readouterr().err


def test_a_verdict_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    one = WatchedSearch([], ())
    one.answer(0)
    one.follow(looking("f.py:1"))
    for code in (0, 0, 1):
        one.answer(code)
    assert [line.partition(" ")[0] for line in capsys.readouterr().out.splitlines()] == ["EQUAL", "DIVERGED"]


@pytest.mark.parametrize(
    "words", [(), ("--sglang", "0.5.23"), ("--sglang", ".", "--resume", "x"), ("--sglang", ".", "--shrink", "x")]
)
def test_it_is_of_a_tree_and_of_a_search_that_begins(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_guarded(lambda: run_command(["fuzz", "--watch", *words])) == EXIT_USAGE
    assert "give --sglang TREE" in capsys.readouterr().err


def test_a_search_on_a_gpu_says_why_no_case_ends(capsys: pytest.CaptureFixture[str]) -> None:
    looking: Any = SimpleNamespace(tally=SimpleNamespace(cases=2), seconds=31.0)
    with command._say_that_kernels_compile(looking, every=0.01):
        while "compiled" not in (said := capsys.readouterr().err):
            time.sleep(0.01)
    assert "2 cases in 31 s: kernels are compiled when they are first used" in said
