"""What `compare` makes of one SGLang, the ledger and its searches: exit code, summary, annotations. No engine."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.check.argument import error
from eagletwin.harness.cli.main import typed
from eagletwin.harness.commands.compare.groups import EQUAL, SideResult
from eagletwin.harness.commands.compare.one import base_of, decide, stand_of
from eagletwin.harness.commands.compare.one_report import (
    FamilySearch,
    OneJob,
    Stand,
    Standing,
    annotations_of,
    document_of,
    facts_of,
)
from eagletwin.harness.commands.fuzz.tally import FindingFacts
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.differs import Changes, Differs
from eagletwin.harness.core.errors import EXIT_EQUAL, EXIT_UNKNOWN, InputError
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.core.signature import Signature
from eagletwin.harness.page.render import markdown_of as comment_of
from eagletwin.harness.page.render import text_of as rendered

from .test_source import commit, git

HOSTILE = "a|b `c` <script>alert(1)</script> @all\n::error::no"


def text_of(one: OneJob) -> str:
    return rendered(document_of(one, Path("runs")), 200)


def markdown_of(one: OneJob) -> str:
    return comment_of(document_of(one, Path("runs")))


def standing(stand: Stand, line: str = "", bug: str = "26329") -> Standing:
    entry = LEDGER[bug]
    return Standing(bug, entry.title, stand, line, f"eagletwin check {bug}", view=entry.red.view)


def finding(status: str, rule: str, stage: str = "", **more: Any) -> FindingFacts:
    until = {"cases": 1, "seconds": 1.0, "shrink_looks": 1, "shrink_seconds": 1.0}
    return FindingFacts(signature=Signature(rule=rule, stage=stage), status=status, **{**until, **more})


def searched(code: int, *findings: tuple[str, str]) -> FamilySearch:
    found = [finding(status, "draft.kv", folder="folder", known=known) for status, known in findings]
    return FamilySearch("llama-mtp", "said", code, 12, found, ("multi-layer-chunk-tail-2",))


def job(*standings: Standing, searches: tuple[FamilySearch, ...] = (), **more: Any) -> OneJob:
    return OneJob(
        sglang="tree",
        version="1a2b3c4d5e",
        standings=list(standings),
        searches=list(searches),
        folder="runs/compare",
        command="eagletwin compare",
        seconds=1.0,
        **more,
    )


def changed(*ran: bool) -> Changes:
    """What entries ran of a tree in which one function was changed."""
    function, changes = "sglang.srt.speculative.eagle_utils.f", Changes()
    for each in ran:
        changes.add(Differs(base="0.5.23", functions=(function,), ran=(function,) * each))
    return changes


NEWS, KNOWN, CRASH = ("diverged", ""), ("diverged", "row-overflow"), ("unknown", "")
JOBS: dict[str, tuple[OneJob, int]] = {
    "each fix holds": (job(standing("holds")), 0),
    "a live bug shows": (job(standing("holds"), standing("live")), 0),
    "a live bug is gone": (job(standing("gone")), 0),
    "a search finds nothing": (job(searches=(searched(0),)), 0),
    "a fixed bug shows": (job(standing("lacks"), standing("unknown")), 1),
    "a case of the ledger is wrong in another way": (job(standing("holds"), standing("wrong")), 1),
    "nothing ran of what was changed": (job(standing("holds"), entries=changed(False)), 125),
    "something ran of what was changed": (job(standing("holds"), standing("holds"), entries=changed(False, True)), 0),
    "a search finds a wrong number": (job(standing("holds"), searches=(searched(1, NEWS),)), 1),
    "a search finds a known bug and another": (job(searches=(searched(1, KNOWN, NEWS),)), 1),
    "a search ends at a known bug": (job(searches=(searched(1, KNOWN),)), 125),
    "a search finds a crash": (job(searches=(searched(125, CRASH),)), 125),
    "an entry is unknown": (job(standing("holds"), standing("unknown")), 125),
    "a search ran too few cases": (job(standing("holds"), searches=(searched(125),)), 125),
    "SGLang cannot be imported": (job(failed="SyntaxError"), 125),
    "it was interrupted": (job(standing("holds"), interrupted=True), 125),
    "nothing was asked": (job(), 125),
}


@pytest.mark.parametrize("what", JOBS)
def test_the_exit_code_and_what_is_said_of_it(what: str) -> None:
    one, code = JOBS[what]
    assert one.exit_code == code
    assert facts_of(one)["exit_code"] == code
    headline = {0: "nothing found", 1: "wrong numbers", 125: "cannot tell"}[code]
    assert markdown_of(one).startswith(f"## eagletwin: {headline}\n")
    assert text_of(one).startswith(headline.upper())
    silent = ("it was interrupted", "nothing was asked")
    assert bool(list(annotations_of(one))) == (code != 0 and what not in silent)


def test_what_others_wrote_stays_text_in_the_summary_and_ends_no_annotation() -> None:
    one = job(standing("lacks", HOSTILE), searches=(searched(1, NEWS),), failed=HOSTILE)
    text = markdown_of(one)
    assert "<script>" not in text
    assert "@all" not in text
    [row] = [line for line in text.splitlines() if line.startswith("| lacks | `26329` |")]
    assert row.count("|") == 5
    for line in annotations_of(one):
        assert line.startswith("::error ")
        assert len(line.splitlines()) == 1


def test_a_case_that_is_wrong_in_another_way_blames_no_fix() -> None:
    one = job(standing("wrong"))
    [line] = annotations_of(one)
    assert line.startswith("::error title=eagletwin%3A the case of 26329 is wrong::")
    assert "chunked-prefill" not in line
    for rule, stand in (("draft.input_ids", "lacks"), ("draft.hidden_in", "wrong")):
        assert stand_of(LEDGER["26329"], SideResult("broken", "", Signature(rule=rule))) == stand


def test_the_summary_begins_with_the_finding_and_its_case_and_has_no_path() -> None:
    found = finding(
        "diverged",
        "draft.kv",
        "draft.decode",
        folder="/a/path/minimal",
        place="draft.kv at draft.decode, round 0, row 1: 2 instead of 1",
        case=msgspec.to_builtins(LEDGER["25015"].case),
        changes=["--remedy", "8409"],
        ran=["sglang.m.f"],
    )
    search = FamilySearch("", "1 FOUND", 1, 12, [found], ("8409",), "/a/path", left_out=("trees (--only trees)",))
    standings = [standing("live", "a crash", bug) for bug in ("8409", "row-overflow")]
    one = replace(
        job(*standings, searches=(search,)),
        base="0.5.23",
        command="eagletwin compare /a/tree --base /a/base",
        run=RunSpec(sglang="TREE"),
        again="eagletwin compare TREE --base BASE",
    )
    text = markdown_of(one)
    lines = text.splitlines()
    assert lines[:6] == [
        "## eagletwin: wrong numbers",
        "",
        "**diverged: draft.kv (draft.decode); ledger: 2 live; 12 cases searched.**",
        "",
        "### diverged: draft.kv (draft.decode)",
        "",
    ]
    assert lines[6] == "draft.kv at draft.decode, round 0, row 1: 2 instead of 1."
    assert lines[7] == "Changed functions that it runs: sglang.m.f."
    [case] = re.findall("\n```json\n(.*?)\n```\n", text, re.DOTALL)
    assert msgspec.json.decode(case, type=Case) == LEDGER["25015"].case
    assert "As `case.json`: `eagletwin check case.json --remedy 8409 --sglang TREE`" in text
    assert "/a/" not in text
    assert [line for line in lines if "8409" in line and "check" not in line] == []
    assert "2 known live bugs of SGLang showed; the page names them." in text
    assert "a crash" not in text
    assert "* trees (--only trees)" in text
    assert "* a change of: 0.5.23" in text
    assert facts_of(one)["base"] == "0.5.23"


def test_the_base_of_a_job_is_a_release_a_folder_or_a_revision_of_the_checkout(tmp_path: Path) -> None:
    checkout = tmp_path / "repository" / "python"
    (checkout / "sglang").mkdir(parents=True)
    (checkout / "sglang" / "m.py").write_text("old\n")
    commit(tmp_path / "repository")
    (checkout / "sglang" / "m.py").write_text("new\n")
    git(tmp_path / "repository", "commit", "-qam", "the change")
    for base in ("", "0.5.20", str(tmp_path)):
        with base_of(base, str(checkout)) as there:
            assert there == base
    with base_of("HEAD^", str(checkout)) as there:
        assert (Path(there) / "sglang" / "m.py").read_text() == "old\n"
        assert (checkout / "sglang" / "m.py").read_text() == "new\n"
    assert not Path(there).exists()
    assert len(git(tmp_path / "repository", "worktree", "list").splitlines()) == 1
    with pytest.raises(InputError, match="has no commit 'nothing'"), base_of("nothing", str(checkout)):
        pass
    with pytest.raises(InputError, match="--base HEAD is neither a release nor a folder"), base_of("HEAD", "0.5.23"):
        pass


def test_a_base_that_differs_in_too_much_is_said_to() -> None:
    text = text_of(replace(job(standing("holds")), base="0.5.20"))
    assert "It differs from 0.5.20 in too many files to say which of its functions ran" in text
    assert "its changes are committed" not in text


def test_what_was_changed_is_said_with_what_ran_of_it() -> None:
    one = job(standing("holds"), standing("holds"), entries=changed(True, False))
    assert "eagle_utils.f in 1 of 2 cases" in text_of(one)
    assert "eagle_utils.f in 1 of 2 cases" in markdown_of(one)
    silent = job(standing("holds"), entries=changed(False))
    assert "No case ran any of that, so this job says nothing about it." in text_of(silent)
    assert "says nothing about it" in " ".join(facts_of(silent)["changes"])
    committed = job(standing("holds"))  # a tree whose changes are all committed
    assert "it is not known what" in text_of(committed)
    assert (committed.exit_code, replace(committed, run=RunSpec(strict=True)).exit_code) == (EXIT_EQUAL, EXIT_UNKNOWN)


def test_an_annotation_is_escaped_as_github_reads_it() -> None:
    assert error("50%\r\nof: a, b", "x,y: 1%", "tests/a,b.py", 7) == (
        "::error file=tests/a%2Cb.py,line=7,title=x%2Cy%3A 1%25::50%25%0D%0Aof: a, b"
    )
    assert error("m", "t") == "::error title=t::m"


@pytest.mark.parametrize(
    ("bug", "version", "shown", "stand"),
    [
        ("multi-layer-chunk-tail-2", "0.5.23", "draft.input_ids", "live"),
        ("multi-layer-chunk-tail-2", "0.5.23+dirty.1", "", "gone"),
        ("multi-layer-chunk-tail-2", "0.5.23+dirty.1", "engine.crash", "unknown"),
        ("multi-layer-chunk-tail-2", "1a2b3c4d5e", "draft.slots", "unknown"),
        ("boundary-kv", "0.5.12", "draft.runner", "live"),  # 22954, which was fixed in 0.5.13, shows there first
        ("boundary-kv", "0.5.23", "draft.runner", "unknown"),
        ("row-overflow", "0.5.11", "draft.positions", "unknown"),  # 25015, which was fixed in 0.5.12, shows there first
        ("26329", "0.5.23", "", "holds"),
    ],
)
def test_a_known_bug_is_live_where_it_shows_as_itself(bug: str, version: str, shown: str, stand: Stand) -> None:
    said = SideResult("broken", shown, Signature(rule=shown)) if shown else EQUAL
    one = decide(LEDGER[bug], said, version, "eagletwin check")
    assert one is not None
    assert one.stand == stand


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23+dirty.1", "1a2b3c4d5e", "tree-1"])
def test_a_fixed_bug_that_shows_is_to_be_confirmed(version: str) -> None:
    assert decide(LEDGER["26329"], SideResult("broken", "", Signature(rule="draft.input_ids")), version, "") is None


def test_a_file_that_cannot_be_written_ends_a_job_before_it_begins(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"--history .* cannot be written"):
        typed(["compare", "--ledger", "26329", "--minutes", "0", "--history", str(tmp_path / "file" / "h.jsonl")])


def test_a_job_that_was_ended_says_so() -> None:
    assert "interrupted" in text_of(job(standing("holds"), interrupted=True))
