"""`fuzz --watch` on a tree: the search after a save begins with the cases that ran the change before it."""

from pathlib import Path

import pytest

from eagletwin.harness.commands.fuzz import corpus
from eagletwin.harness.commands.fuzz.command import search
from eagletwin.harness.commands.fuzz.options import SearchOptions
from eagletwin.harness.commands.fuzz.watching import WatchedSearch, search_again
from eagletwin.harness.core.run_spec import RunSpec

from .planted_trees import WORKER, change, plant


def test_a_fault_that_is_saved_is_seen_in_the_first_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "corpus").mkdir()
    monkeypatch.setattr(corpus, "cache_folder", lambda part: tmp_path / part)
    tree, rounds = plant(tmp_path / "tree", WORKER), list[WatchedSearch]()
    options = SearchOptions(
        run=RunSpec(sglang=str(tree)),
        only=("llama-tiny", "topk=1"),
        left_out=("sampling",),
        max_cases=4,
        processes=1,
        shrink_minutes=0,
        out=tmp_path / "runs",
    )

    def search_once(one: WatchedSearch) -> None:
        rounds.append(one)
        search(options, watched=one)
        if len(rounds) == 2:
            raise KeyboardInterrupt
        change(tree, WORKER[0], "        self = self\n", "        spec_info.topk_index = (spec_info.topk_index + 1) % 7\n")

    assert search_again(tree, search_once) == 1
    first, second = (line for line in capsys.readouterr().out.splitlines() if " ran it (" in line)
    assert first.startswith("EQUAL  draft_forward: ")
    assert second.startswith("DIVERGED  draft_forward: 1 of 1 case ran it (1 of 1 statement); ")
    assert second.endswith(" s after eagle_worker_v2.py was saved")
