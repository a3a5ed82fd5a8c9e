"""An edit that a fork of the importing process follows comes to what an import comes to, and any other one is imported."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.protocol import Ready, Refused, TooLate
from eagletwin.harness.engines.start import Zygote

from .followed import FOLLOWED, IMPORTED

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def said() -> dict[str, list[Any]]:
    """By edit: what a fork says, and what an import does."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.harness.followed"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("edit", FOLLOWED)
def test_a_fork_that_follows_an_edit_computes_and_stands_as_after_an_import(said: dict[str, list[Any]], edit: str) -> None:
    follows, imports = said[edit]
    assert follows == imports


def test_what_is_followed_differs_from_what_was_imported(said: dict[str, list[Any]]) -> None:
    silent = {"nothing", "a comment", "a docstring", "a body above others"}
    before = said["nothing"][0][0]
    assert {edit for edit in FOLLOWED if said[edit][0][0] == before} <= silent


@pytest.mark.parametrize("edit", IMPORTED)
def test_any_other_edit_is_imported(said: dict[str, list[Any]], edit: str) -> None:
    assert str(said[edit][0]).startswith("imported: ")


def test_changed_statements_are_noted_as_after_an_import(said: dict[str, list[Any]]) -> None:
    follows, imports = said["watched"]
    assert follows == imports
    executed, near = follows
    assert len(executed) == 3
    assert near


@pytest.mark.parametrize(
    ("answers", "follows", "starts"),
    [
        ([Ready("1")], True, []),
        ([TooLate(), Ready("1")], True, [True]),
        ([Refused("it failed", ""), Ready("1")], True, [True]),
        ([TooLate(), TooLate(), Ready("1")], True, [True, False]),
        ([TooLate(), Ready("1")], False, [False]),
    ],
)
def test_what_is_not_followed_is_imported_and_at_last_by_a_process_of_its_own(
    monkeypatch: pytest.MonkeyPatch, answers: list[object], follows: bool, starts: list[bool]
) -> None:
    """starts: whether the process that imports the tree stays."""
    started, left = list[bool](), [*answers]

    def start(zygote: Zygote) -> None:
        zygote.follows = False
        started.append(zygote.edited)

    monkeypatch.setattr(Zygote, "start", start)
    monkeypatch.setattr(Host, "_imported", lambda *_: left.pop(0))
    zygote = Zygote(edited=True)
    zygote.follows = follows
    with Host(zygote) as host:
        host.connection()
        assert (host.version, started, left) == ("1", starts, [])
