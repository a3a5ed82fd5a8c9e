"""What `compare` makes of one SGLang, of two trees that differ, and of the base of a change. No engine."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.check import trials
from eagletwin.harness.check.argument import error
from eagletwin.harness.check.trials import base_of as two_trees_base_of
from eagletwin.harness.cli.main import run_command
from eagletwin.harness.commands.compare.groups import EQUAL, SideResult
from eagletwin.harness.commands.compare.numbers import _doubts
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
from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.core.differs import Changes, Differs, Watch
from eagletwin.harness.core.errors import EXIT_EQUAL, EXIT_UNKNOWN, InputError
from eagletwin.harness.core.files import installed_version
from eagletwin.harness.core.records import Ending, EngineInfo
from eagletwin.harness.core.run_spec import CPU, DEFAULT_RUN, RunSpec
from eagletwin.harness.core.signature import Signature
from eagletwin.harness.core.trace import Trace, new_header
from eagletwin.harness.engines import source
from eagletwin.harness.engines.provision import NotFetched
from eagletwin.harness.engines.source import INSTALLED, Source, TooMany, as_change, at_hand, between, resolve
from eagletwin.harness.engines.start import Zygote
from eagletwin.harness.page.render import markdown_of as comment_of
from eagletwin.harness.page.render import text_of as rendered

from .test_source import commit, git

# What `compare` makes of one SGLang, the ledger and its searches: exit code, summary, annotations. No engine.


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
        named="tree",
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
        run=RunSpec(release="TREE"),
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
    for named in ("", "0.5.20", str(tmp_path)):
        with base_of(named, str(checkout)) as there:
            assert there == named
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
        run_command(["compare", "--ledger", "26329", "--minutes", "0", "--history", str(tmp_path / "file" / "h.jsonl")])


def test_a_job_that_was_ended_says_so() -> None:
    assert "interrupted" in text_of(job(standing("holds"), interrupted=True))


# In what two SGLangs differ: by content, from both sides, and whatever git says of either.


BASE = "def same(): return 1\ndef changed(): return 1\ndef gone(): return 1\n"
NEW = "def same(): return 1\ndef changed(): return 2\ndef added(): return 1\n"


def tree(root: Path, **files: str) -> Path:
    (root / "sglang").mkdir(parents=True)
    for name, text in {"__init__": "", **files}.items():
        (root / "sglang" / f"{name}.py").write_text(text)
    return root


def source_at(root: Path) -> Source:
    return resolve(str(root))


def test_each_is_told_what_it_has_otherwise_than_the_other(tmp_path: Path) -> None:
    base, branch = tree(tmp_path / "base", m=BASE), tree(tmp_path / "branch", m=BASE)
    commit(branch)
    (branch / "sglang" / "m.py").write_text(NEW)
    git(branch, "commit", "-qam", "the change")  # to git, nothing is changed
    assert source_at(branch).difference is None
    found = between(source_at(base), source_at(branch))
    assert found is not None
    left, right = (watch.differs for watch in found)
    assert (left.functions, left.removed) == (("sglang.m.changed", "sglang.m.gone"), ("sglang.m.added",))
    assert (right.functions, right.removed) == (("sglang.m.changed", "sglang.m.added"), ("sglang.m.gone",))
    assert (left.base, right.base) == (source_at(branch).version, source_at(base).version)


def test_a_branch_is_a_change_of_the_base_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base, branch = tree(tmp_path / "base", m=BASE), tree(tmp_path / "branch", m=NEW)
    commit(branch)
    found = as_change(source_at(branch), str(base))
    assert found.difference is not None
    assert found.base == source_at(base)
    assert found.difference.watch.differs.functions == ("sglang.m.changed", "sglang.m.added")
    assert "+def changed(): return 2" in found.difference.patch
    host: Any = SimpleNamespace(source=found, mode=CPU, beside=lambda other: SimpleNamespace(source=other, mode=CPU))
    beside = two_trees_base_of(host, DEFAULT_RUN)  # what is wrong without the change as well is not the change's
    assert beside is not None
    assert beside.run.release == str(base)
    assert as_change(source_at(branch), "") == source_at(branch)
    same = as_change(source_at(branch), str(branch)).difference
    assert same is not None
    assert same.watch.differs == Differs(base=source_at(branch).called)
    monkeypatch.setattr(source, "MOST", 0)
    far = as_change(source_at(branch), str(base))
    assert (far.difference, far.base) == (None, source_at(base))


def test_copies_do_not_differ_and_releases_differ_in_too_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (source_at(tree(tmp_path / name, m=BASE, n=BASE)) for name in "ab")
    assert between(one, other) is None
    (tmp_path / "b" / "sglang" / "m.py").write_text(NEW)
    monkeypatch.setattr(source, "MOST", 0)
    with pytest.raises(TooMany, match="they differ in 1 files"):
        between(one, other)


@pytest.mark.slow
def test_the_installed_one_can_be_watched_too(tmp_path: Path) -> None:
    """What was changed in it is nothing, and in what it differs from another is not."""
    with Zygote(INSTALLED) as plain, Zygote(INSTALLED, watch=Watch(Differs(base="1"), {})) as watched:
        assert plain._source_arguments() == []
        watched._scratch = str(tmp_path / "scratch")
        (tmp_path / "scratch").mkdir()
        assert watched._source_arguments() == [
            INSTALLED.called,
            str(INSTALLED.root),
            str(tmp_path / "scratch" / "changes.json"),
        ]


F, G, M = ("m.f",), ("m.g",), ("m",)
# Of two SGLangs whose traces are the same: in what each differs, and whether that says anything about the difference.
SAYS = {
    "the function ran on both": (Differs(base="2", functions=F, ran=F), Differs(base="1", functions=F, ran=F), True),
    "it ran on neither": (Differs(base="2", functions=F), Differs(base="1", functions=F), False),
    "one of two functions ran, on one": (Differs(base="2", functions=F + G, ran=G), Differs(base="1", functions=F), True),
    "a function was added and did not run": (
        Differs(base="2", removed=F, modules=M, imported=M),
        Differs(base="1", functions=F, modules=M, imported=M),
        False,
    ),
    "a constant that no function of its module reads": (
        Differs(base="2", modules=M, imported=M),
        Differs(base="1", modules=M, imported=M),
        False,
    ),
    "a kernel in C++ that one has": (Differs(base="2"), Differs(base="1", files=("a.cu",)), False),
    "comments": (Differs(base="2"), Differs(base="1"), True),
    "each by itself, and one ran nothing": (Differs(base="0", functions=F, ran=F), Differs(base="0", functions=G), False),
}


@pytest.mark.parametrize("what", SAYS)
def test_that_two_traces_are_the_same_says_something_if_a_difference_ran(what: str) -> None:
    *each, says = SAYS[what]
    traces = [trace(version, differs) for version, differs in zip("12", each, strict=True)]
    assert (not _doubts(traces)) == says


def trace(version: str, differs: Differs) -> Trace:
    case = Case(name="x", model="llama-tiny", num_steps=1, requests=(Request(id="a", prompt=(1,), max_new_tokens=1),))
    engine = EngineInfo(name="none", version=version, device="cpu", kernels="none", torch="0", triton="0")
    header = new_header(case, "", engine, Ending(kind="finished"), ())
    return Trace(replace(header, differs=differs), {})


# With which SGLang a changed one is compared, so that a remedy hides nothing of the change.


def of(version: str) -> trials.Base | None:
    def beside(source: Source) -> Any:
        return SimpleNamespace(source=source, mode=CPU)

    host: Any = SimpleNamespace(source=Source("/a/tree", version=version), mode=CPU, beside=beside)
    return trials.base_of(host, DEFAULT_RUN)


@pytest.mark.parametrize(
    "version", [f"{installed_version('sglang')}+dirty.12345678", "1a2b3c4d5e", "1a2b3c4d5e+dirty.1", "tree-0"]
)
def test_a_changed_tree_is_compared_with_its_release_or_with_the_installed_one(version: str) -> None:
    found = of(version)
    assert found is not None
    assert found.called == f"SGLang {installed_version('sglang')}"
    assert found.run.release == ""


def test_a_copy_of_a_release_is_that_release() -> None:
    assert of(installed_version("sglang")) is None


def test_a_release_that_is_not_at_hand_or_damaged_is_asked_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(*_: str) -> Source:
        raise NotFetched("cause", consequence="c", remedy="r")

    monkeypatch.setattr(trials, "at_hand", lambda *_: None)
    assert of("0.5.22+dirty.1") is None
    monkeypatch.setattr(trials, "at_hand", damaged)
    assert of("0.5.22+dirty.1") is None


def test_the_installed_release_is_at_hand_and_an_unknown_one_is_not() -> None:
    assert at_hand(installed_version("sglang")) == INSTALLED
    assert at_hand("0.0.1") is None
