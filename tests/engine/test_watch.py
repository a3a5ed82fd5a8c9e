"""What a search of a tree shows: the effect of a change, and a fault that was saved."""

import io
import time
import unittest
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.check.known import KnownBugMatcher, cases_of_change
from eagletwin.harness.check.trials import Trials
from eagletwin.harness.commands.fuzz import corpus
from eagletwin.harness.commands.fuzz.command import search
from eagletwin.harness.commands.fuzz.effect import Effect
from eagletwin.harness.commands.fuzz.looking import CaseSeen
from eagletwin.harness.commands.fuzz.options import SearchOptions
from eagletwin.harness.commands.fuzz.search import Fuzz
from eagletwin.harness.commands.fuzz.shrinking import size
from eagletwin.harness.commands.fuzz.watching import WatchedSearch, search_again
from eagletwin.harness.core.differs import Differs
from eagletwin.harness.core.records import Header
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.core.verdict import Verdict
from eagletwin.harness.engines import start
from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.source import resolve
from eagletwin.harness.engines.start import Zygote
from eagletwin.harness.families.valid import read_case

from .planted_trees import WORKER, WORKER_NAME, change, plant

ENTRY = LEDGER["penalties"]


def effect(host: Host, entry: str) -> Effect:
    """Of the candidate fix of ENTRY as somebody's own patch, in the case of an entry, with time for a few smaller ones."""
    assert ENTRY.remedy is not None
    matcher = KnownBugMatcher(host, RunSpec(patches=(replace(ENTRY.remedy, name="fix"),)))
    assert matcher.base is not None
    seen = CaseSeen(block=0, case=LEDGER[entry].case, verdict=Verdict(status="equal"))
    return Effect(seen, matcher, matcher.base, until=time.monotonic() + 5)


def test_the_smallest_case_names_the_first_value_that_a_fix_alters_and_is_red_on_the_base(host: Host, tmp_path: Path) -> None:
    of = effect(host, ENTRY.id)
    (tmp_path / "base").mkdir()  # of a search that is resumed
    found = of.explain(tmp_path)
    assert found is not None
    assert ENTRY.rule in found.on_base
    assert found.base != found.tree
    case = read_case(Path(found.case))
    assert size(case) <= size(ENTRY.case)
    base, tree = (trials.look_alone(case).verdict for trials in of._sides.values())
    assert (base.status, base.rule, tree.status) == ("diverged", ENTRY.rule, "equal")
    assert {file.name for file in tmp_path.iterdir()} == {"base", "tree", "case.json", *found.paste}
    assert found.paste == ("entry.py", "test_effect.py")
    entry = _run(tmp_path / "entry.py", "eagletwin.cases.ledger")["ENTRY"]
    assert [edit for edit in entry.remedy.edits if edit in ENTRY.remedy.edits] == [*ENTRY.remedy.edits]
    red, green = (Trials(host, entry.run(side)).look_alone(entry.case).verdict for side in (entry.red, entry.green))
    assert (red.status, red.rule, green.status) == ("diverged", entry.rule, "equal")
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(_run(tmp_path / "test_effect.py", "")["TestEffect"])
    (failed,) = unittest.TextTestRunner(stream=io.StringIO()).run(suite).failures
    assert ENTRY.rule in failed[1]


def _run(file: Path, package: str) -> dict[str, Any]:
    names = {"__package__": package, "__name__": file.stem}
    exec(compile(file.read_text(), file, "exec"), names)
    return names


def test_a_case_in_which_the_base_records_the_same_shows_no_effect(host: Host, tmp_path: Path) -> None:
    assert effect(host, "25015").explain(tmp_path / "effect") is None
    assert not (tmp_path / "effect").exists()


@pytest.mark.parametrize("entry", ["two-chunked", pytest.param("guidance-refused", marks=pytest.mark.long)])
def test_a_search_of_a_live_bug_s_fix_names_the_bug_and_shows_its_effect(host: Host, tmp_path: Path, entry: str) -> None:
    """The second one crashes without the fix."""
    remedy = LEDGER[entry].remedy
    assert remedy is not None
    run = RunSpec(patches=(replace(remedy, name="fix"),))
    first = tuple(cases_of_change(host.source, run))
    options = SearchOptions(max_cases=len(first), shrink_minutes=0.1, run=run, first=first)
    looking = Fuzz(Trials(host, run), tmp_path, options.plan)
    assert [*looking.search()] == []
    looking.compare_with_base(explain=True)
    assert looking.tally.changes.mends == (entry,)
    assert looking.effect is not None
    assert looking.effect.paste == ("entry.py", "test_effect.py")
    assert f"It mends {entry}, " in looking.tally.changes.effect


def test_cases_of_each_configuration_are_compared_and_first_those_that_ran_what_few_ran(host: Host, tmp_path: Path) -> None:
    looking = Fuzz(Trials(host, RunSpec()), tmp_path, SearchOptions().plan)
    case = replace(LEDGER["25015"].case, exercises=(), name="drawn")
    other, own = replace(case, page_size=2), replace(LEDGER["two-chunked"].case, exercises=())
    for one, places in ((case, "a"), (case, "a"), (case, "a"), (other, "a"), (other, "ab"), (own, "a")):
        differs = Differs(base="", functions=("f",), ran=("f",), executed=(*places,))
        looking.count(CaseSeen(block=0, case=one, verdict=Verdict(status="equal"), numbers="1", differs=differs))
    assert [(seen.case, len(seen.differs.executed)) for seen in looking._to_compare() if seen.differs] == [
        (own, 1),
        (other, 2),
        (case, 1),
        (case, 1),
        (other, 1),
        (case, 1),
    ]


@pytest.mark.long
def test_an_edit_is_followed_where_it_can_be_and_leaves_the_trace_that_an_import_leaves(tmp_path: Path) -> None:
    tree, case = plant(tmp_path / "tree"), LEDGER["25015"].case

    def run(name: str, *, edited: bool = True) -> tuple[Header, object]:
        zygote = Zygote(resolve(str(tree)), edited=edited)
        zygote.start()
        (tmp_path / name).mkdir()
        with Host(zygote) as host:
            return host.engine(case).run(case, tmp_path / name).header, start._edited

    before, imported = run("before")
    assert imported is not None
    assert before.differs is UNSET
    change(tree, *WORKER)
    follows, follower = run("follows")
    assert follower is imported
    assert follows == run("imports", edited=False)[0]
    assert isinstance(follows.differs, Differs)
    assert follows.differs.ran == (WORKER_NAME,)
    change(tree, WORKER[0], "import logging\n", "import logging\n\nCONSTANT = 1\n")
    constant, again = run("constant")
    assert again is not imported
    assert isinstance(constant.differs, Differs)
    assert constant.differs.imported == ("sglang.srt.speculative.eagle_worker_v2",)
    undone = run("undone")
    assert undone == (constant, again)


@pytest.mark.long
def test_a_fault_that_is_saved_is_seen_in_the_first_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "corpus").mkdir()
    monkeypatch.setattr(corpus, "cache_folder", lambda part: tmp_path / part)
    tree, rounds = plant(tmp_path / "tree", WORKER), list[WatchedSearch]()
    options = SearchOptions(
        run=RunSpec(release=str(tree)),
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
