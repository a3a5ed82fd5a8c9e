"""Pages of what commands keep as JSON: comparisons, proofs, campaigns, what a pair deserves, CI jobs. Each is made again,
links to the pages of its runs, and shows what others wrote as text."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.commands.acceptance.report import Deserved, conclude
from eagletwin.harness.commands.compare.groups import EQUAL, ComparedCase, Result, SharedCase, SideResult
from eagletwin.harness.commands.compare.one_report import JOB as CI_JOB
from eagletwin.harness.commands.compare.one_report import FamilySearch, OneJob, Stand, Standing, keep_job
from eagletwin.harness.commands.compare.report import RECORD, CompareReport, facts_of
from eagletwin.harness.commands.fuzz.tally import FindingFacts
from eagletwin.harness.commands.prove.report import PROOFS, keep_proofs
from eagletwin.harness.commands.report import write_report
from eagletwin.harness.commands.result import AcceptedFacts, ProofFacts, ProveFacts
from eagletwin.harness.core.differs import Changes, Differs
from eagletwin.harness.core.errors import EXIT_EQUAL, InputError
from eagletwin.harness.core.run_spec import CPU, Mode
from eagletwin.harness.core.signature import Signature
from eagletwin.harness.deserved.follow import Shape
from eagletwin.harness.deserved.statistics import Depth, Interval, Span
from eagletwin.harness.families.dimensions import FEATURES
from eagletwin.harness.page.render import NAME

from ..lab.gpu.command import gpu_page
from ..lab.gpu.job import JOB, RESULTS, Beside, CampaignFacts, CaseResult, Job, JobResult, MustShow
from ..lab.gpu.summary import CAMPAIGN, keep_campaign
from .conftest import Opened, serious
from .planted import ENGINE, HOSTILE

CASE = LEDGER["25015"].case
WRONG = SideResult("broken", f"wrong{HOSTILE}", Signature(rule="draft.positions", stage="draft.decode"))
OTHER = SideResult("broken", "other", Signature(rule="draft.kv", stage="draft.extend"))
UNDECIDED = SideResult("unknown", "3 of 7 choices are ties")


def paged(folder: Path) -> Path:
    """A run folder with a page, which others link to."""
    folder.mkdir(parents=True)
    (folder / NAME).touch()
    return folder


def compared(folder: Path) -> Path:
    """What a comparison leaves that breaks one thing, fixes one, and costs acceptance."""
    place = paged(folder / "broken-one")

    def answered(name: str, base: SideResult, head: SideResult, **more: Any) -> ComparedCase:
        return ComparedCase(SharedCase(name, CASE), base, head, **more)

    answers = [
        answered("one", EQUAL, WRONG, again=f"again{HOSTILE}", folder=place, ran=(f"sglang.m.f{HOSTILE}",)),
        answered("two", EQUAL, WRONG, ran=(f"sglang.m.f{HOSTILE}",)),
        answered("repaired", WRONG, EQUAL),
        answered("old", OTHER, OTHER, known="8409"),
        answered("moved", WRONG, OTHER),
        answered("open", EQUAL, UNDECIDED),
        answered("same", EQUAL, EQUAL),
    ]
    differs = Differs(base="0.5.23", functions=(f"sglang.m.f{HOSTILE}", "sglang.m.idle"), ran=(f"sglang.m.f{HOSTILE}",))
    accepted = [AcceptedFacts("llama-tiny", "chain"), AcceptedFacts("llama-mtp", "tree")]
    accepted[0].add((2, 6), (3, 6))
    accepted[1].add((2, 6), (2, 6))
    one = CompareReport(
        result=Result(answers),
        names=("0.5.23", f"tree{HOSTILE}"),
        versions=("0.5.23", "1a2b3c"),
        command=f"eagletwin compare 0.5.23 tree{HOSTILE}",
        folder=folder,
        seconds=1.5,
        changes=(Changes(), Changes(differs, {f"sglang.m.f{HOSTILE}": 2}, 3)),
        mutual=True,
        accepted=accepted,
        left=4,
        unreached=("context-end-reads",),
    )
    (folder / RECORD).write_bytes(msgspec.json.encode(facts_of(one)))
    return folder


def proved(folder: Path) -> Path:
    """What three proofs leave: one holds, one fails, and a side of one did not run."""
    green, red = paged(folder / "25015-green"), paged(folder / "25015-red")
    more = {"title": f"title{HOSTILE}", "state": "in 0.5.9"}
    holds = ProofFacts(entry="25015", holds=True, exit_code=0, green="equal", red="diverged draft.positions", **more)
    proofs = [
        replace(holds, green_folder=str(green), red_folder=str(red)),
        ProofFacts(entry="8409", holds=False, exit_code=1, green="diverged draft.kv", red="equal", why=f"why{HOSTILE}", **more),
        ProofFacts(entry="26329", holds=False, exit_code=125, green="", red="", why="it would not start", **more),
    ]
    command = "eagletwin prove all"
    keep_proofs(ProveFacts(proofs=proofs, not_reached=["context-end"], seconds=2.0, sglang="0.5.23", command=command), folder)
    return folder / "prove"


GPU = Mode(device="cuda", graphs=(1, 2, 4), overlap=True)


def campaign(folder: Path) -> Path:
    """What a campaign of a few jobs leaves: equal, new, known and undecided cases, a proof, a fault, and a job that fell."""
    equal = CaseResult(
        case="one", status="equal", engine=2.0, judge=1.0, trace=0.5, choices=9, ties=1, compared=40, exercised=("rejection",)
    )
    seen = (
        replace(equal, paths={"2 exact": 5, "3 padded": 1}, unseen={"draft.mask": 2}),
        replace(equal, case=f"two{HOSTILE}", status="diverged", rule="draft.kv", where=f"draft, row 3{HOSTILE}"),
        replace(equal, case="three", status="diverged", rule="draft.kv", known="33758"),
        replace(equal, case="four", status="unknown", reason="too many ties"),
    )
    beside = Beside(same=False, compared=9, largest=0.1, differs="draft")
    red = CaseResult(case="x", status="diverged", rule="draft.positions")
    jobs = [
        JobResult(name="generated-graphs-000", mode=GPU, start=20.0, seconds=30.0, engine=ENGINE, seen=seen, beside=beside),
        JobResult(name="25015/graphs/green", mode=GPU, seen=(replace(equal, case="x"),)),
        JobResult(name="25015/graphs/red", mode=GPU, seen=(red,), expected=MustShow(rule="draft.positions")),
        JobResult(name="faults/llama-topk1-graphs/late", mode=GPU, seen=(equal,), expected=MustShow()),
        JobResult(name="sampling-target-000", mode=CPU, error=f"it fell{HOSTILE}"),
    ]
    (folder / RESULTS).write_bytes(b"".join(msgspec.json.encode(job) + b"\n" for job in jobs))
    asked = folder / "job-000"
    asked.mkdir()
    (asked / JOB).write_bytes(msgspec.json.encode(Job(name=jobs[0].name, mode=GPU, cases=(CASE,) * 4)))
    keep_campaign(CampaignFacts(jobs=5, cases=7, statuses={}, seconds=14.0, folder=str(folder), report=""), folder)
    return folder


def deserved(folder: Path) -> Path:
    """What a pair deserves on two texts."""
    share = Interval(0.5, 0.25, 0.75)
    found = Deserved(
        texts=2,
        tokens=30,
        rounds=10,
        fewest=9,
        most=11,
        accept_length=Interval(2.5, 2.0, 3.0),
        positions=30,
        doubtful=0.125,
        depths=(Depth(depth=1, reached=30, conditional=share, cumulative=share),),
        by_prompt_length=(Span(begin=0, end=8, count=30, accepted=1.5),),
        by_place=(Span(begin=3, end=4, count=2, accepted=1.25),),
        pair=(f"target{HOSTILE}", "draft"),
        shape=Shape(3, 4, 8),
        off_target=5,
        better_read_as=[],
        rounds_in_sglang=12,
    )
    conclude(found, folder, as_json=False)
    return folder


def ci_job(folder: Path) -> Path:
    """What a CI job leaves: a fix that is lacking, one that holds, and a search with a finding."""

    def standing(stand: Stand, bug: str, **more: Any) -> Standing:
        return Standing(bug, LEDGER[bug].title, stand, again=f"eagletwin check {bug}", **more)

    place = paged(folder / "search" / "fuzz-0")
    until = {"cases": 1, "seconds": 1.0, "shrink_looks": 1, "shrink_seconds": 1.0}
    minimal = str(paged(place / "finding-1" / "minimal"))
    finding = FindingFacts(signature=Signature(rule="draft.kv"), status="diverged", folder=minimal, **until)  # type: ignore[arg-type]
    search = FamilySearch("llama-mtp", f"1 FOUND{HOSTILE}", 1, 12, [finding], ("multi-layer-chunk-tail-2",), str(place))
    lacks = standing("lacks", "26329", line=f"draft.input_ids{HOSTILE}", folder=str(paged(folder / "lacks-26329")))
    job = OneJob(
        named="tree",
        version=f"tree-1{HOSTILE}",
        standings=[standing("holds", "25015"), lacks],
        searches=[search],
        folder=str(folder),
        command="eagletwin compare tree",
        seconds=3.0,
    )
    keep_job(job)
    return folder


KINDS = {"compare": compared, "prove": proved, "gpu run": campaign, "acceptance": deserved, "ci": ci_job}
RECORDS = {"compare": RECORD, "prove": PROOFS, "gpu run": RESULTS, "ci": CI_JOB}
AGAIN = dict.fromkeys(KINDS, write_report) | {"gpu run": gpu_page}
SAID = {
    "compare": (
        "NEWLY BROKEN · ",
        'href="broken-one/report.html">draft.positions (draft.decode), 2 cases: one, two',
        '<h2 id="section-2">Newly fixed</h2>',
        "8409",
        "Diverged otherwise",
        "3 of 7 choices are ties",
        "2 of 3",
        "sglang.m.idle",
        "-33.3%",
        "same",
        "context-end-reads",
        "4 more of the ledger did not run",
    ),
    "prove": (
        "FAILS · 1 of 3 proven in 2.0 s",
        'href="../25015-green/report.html">equal',
        'href="../25015-red/report.html">diverged draft.positions',
        "it would not start",
        "title&lt;/script&gt;",
        "context-end",
        "eagletwin prove all",
    ),
    "gpu run": (
        "DIVERGED · Campaign",
        "0.50 cases/s, all engines together",
        'data-tags="new"><th scope="row">two',
        'data-tags="known"><th scope="row">three',
        "Known bugs that explain a case",
        "33758",
        "too many ties",
        "DIFFERENT: draft",
        f"num_steps {CASE.num_steps}, topk 1, page_size",
        "rejection",
        "<caption>Never happened</caption>",
        FEATURES["abort_in_step"],
        "draft.mask",
        "25015 graphs",
        "proven",
        "faults/llama-topk1-graphs/late",
        "it fell",
    ),
    "acceptance": (
        "DESERVED · accept length 2.500 (2.000 to 3.000)",
        "Tokens a round that draft deserves on target",
        "10 rounds of trees of 3 steps, topk 4, 8 nodes: 9 to 11, as near ties go",
        "SGLang needs 12 rounds (+20.0%), by the layout",
        "50.0% (25.0% to 75.0%)",
        "0 to 7",
        "5 tokens of the texts are not what the target says greedily",
    ),
    "ci": (
        "WRONG NUMBERS · SGLang tree-1",
        'href="lacks-26329/report.html">26329',
        'href="search/fuzz-0/report.html">llama-mtp',
        'href="search/fuzz-0/finding-1/minimal/report.html"',
        "eagletwin check 26329",
        "multi-layer-chunk-tail-2",
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_has_what_was_kept_and_is_made_again_the_same(kind: str, tmp_path: Path) -> None:
    folder = KINDS[kind](tmp_path)
    text = (folder / NAME).read_text(encoding="utf-8") if kind != "compare" else ""  # two.py writes it, of an engine's run
    assert AGAIN[kind](folder) == EXIT_EQUAL
    again = (folder / NAME).read_text(encoding="utf-8")
    assert text in ("", again)
    assert [said for said in SAID[kind] if said not in again] == []
    assert "<img" not in again
    assert again.count("<script") == 2


@pytest.mark.parametrize("kind", RECORDS)
def test_a_record_of_something_else_is_refused(kind: str, tmp_path: Path) -> None:
    (tmp_path / RECORDS[kind]).write_text('{"schema": 0}')
    with pytest.raises(InputError, match=f"{RECORDS[kind]} cannot be read"):
        AGAIN[kind](tmp_path)


def test_a_page_links_to_no_page_that_is_not_there(tmp_path: Path) -> None:
    folder = proved(tmp_path)
    (tmp_path / "25015-red" / NAME).unlink()
    assert write_report(folder) == EXIT_EQUAL
    text = (folder / NAME).read_text(encoding="utf-8")
    assert "25015-green/report.html" in text
    assert "25015-red/report.html" not in text


def test_results_alone_are_a_page_without_a_rate_of_the_whole(tmp_path: Path) -> None:
    folder = campaign(tmp_path)
    (folder / CAMPAIGN).unlink()
    (folder / "job-000" / JOB).unlink()
    assert gpu_page(folder) == EXIT_EQUAL
    text = (folder / NAME).read_text(encoding="utf-8")
    assert "all engines together" not in text
    assert "their configurations are not known" in text


@pytest.mark.long
@pytest.mark.slow
def test_the_pages_are_quiet_and_can_be_read_by_all(chromium: Any, tmp_path: Path) -> None:
    for kind, made in KINDS.items():
        place = tmp_path / kind.replace(" ", "-")
        place.mkdir()
        folder = made(place)
        AGAIN[kind](folder)
        opened = Opened(chromium, folder / NAME, width=390)
        opened.quiet()
        assert not opened.overflows, kind
        assert serious(opened) == [], kind
