"""One document as text, as a comment and as a page; and which folder has which page."""

import errno
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
import pytest
from msgspec.structs import replace

from eagletwin.harness.check.argument import argue
from eagletwin.harness.commands.acceptance.report import AnswerRounds, ServerAcceptance, conclude
from eagletwin.harness.commands.bisect.report import REPORT
from eagletwin.harness.commands.fuzz.tally import SUMMARY
from eagletwin.harness.commands.report import write_report
from eagletwin.harness.core.case import Event
from eagletwin.harness.core.errors import EXIT_EQUAL, EXIT_HARNESS, InputError
from eagletwin.harness.core.recording import RECORDING, SERVER, RecordedRequest, RecordedServer, RecordingHeader
from eagletwin.harness.core.records import Ending, ServedModel
from eagletwin.harness.core.trace import SCHEMA, Trace, write_trace
from eagletwin.harness.deserved.rounds import Wrong
from eagletwin.harness.deserved.server import Started
from eagletwin.harness.deserved.statistics import Power, Stake
from eagletwin.harness.families.dimensions import FEATURES
from eagletwin.harness.page import render
from eagletwin.harness.page.document import Document, DocumentSection, Item, TableCell, Timeline, row, table
from eagletwin.harness.page.render import MOST_ROWS, NAME, html_of, markdown_of, text_of, write_page
from eagletwin.harness.page.run import run_page
from eagletwin.harness.page.timeline import SCHEDULER, timeline_of

from .planted import DIVERGED, ENGINE, HOSTILE, page, recorded, wrong

# One document as text, as a comment and as a page, and that nothing that goes wrong with a page is more than a note.

# What is on a page, and that nothing that goes wrong with it is more than a note.


class Elements(HTMLParser):
    """Tags of a document, with their attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_a_page_is_one_file_that_loads_nothing() -> None:
    elements = Elements(html_of(page())).tags
    assert not [tag for tag, _ in elements if tag in ("img", "link", "iframe", "object", "embed", "base", "form")]
    assert not [value for _, attributes in elements for name, value in attributes.items() if name in ("src", "action")]
    assert [attributes for tag, attributes in elements if tag == "script"] == [
        {"type": "application/json", "id": "timeline-data"},
        {},
    ]


def test_hostile_texts_add_no_element_and_no_attribute() -> None:
    plain, hostile = (Elements(html_of(page(text))).tags for text in ("x", HOSTILE))
    assert [tag for tag, _ in hostile] == [tag for tag, _ in plain]
    assert [sorted(attributes) for _, attributes in hostile] == [sorted(attributes) for _, attributes in plain]


def test_without_escapes_the_same_texts_do_add_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the test above is known to be able to fail."""
    environment = render._environment()
    monkeypatch.setattr(environment, "autoescape", False)
    environment.cache.clear()
    try:
        assert ("img", {"src": "x", "onerror": "alert(1)"}) in Elements(html_of(page(HOSTILE))).tags
    finally:
        environment.cache.clear()


def test_the_time_line_s_data_is_read_back_as_it_was() -> None:
    made = page(HOSTILE)
    [data] = re.findall(r'<script type="application/json" id="timeline-data">(.*?)</script>', html_of(made), re.DOTALL)
    assert not set(data) & {"<", ">", "&", "\u2028"}
    assert msgspec.json.decode(data, type=Timeline) == made.timeline


def test_the_time_line_has_chunks_rounds_events_and_ends() -> None:
    timeline = timeline_of(recorded(3, requests=("a", "b")), [wrong("b", 2)])
    lanes = {lane.name: lane for lane in timeline.lanes}
    assert list(lanes) == ["a", "b", SCHEDULER]
    assert lanes["a"].note == "prompt 4, new 512"
    assert [(mark.kind, timeline.columns[mark.at], mark.text) for mark in lanes["a"].marks] == [
        ("chunk", 0, "0 to 3"),
        ("round", 1, "0 of 3"),
        ("event", 1, "abort"),
        ("round", 2, "1 of 3"),
        ("round", 3, "2 of 3"),
        ("end", 4, "■ 6"),
    ]
    assert [mark.text for mark in lanes[SCHEDULER].marks] == ["↺ retract"]
    second = next(mark for mark in lanes["b"].marks if timeline.columns[mark.at] == 2)
    assert (second.accepted, second.rejected, second.bonus) == ((11,), (20, 30), 9)
    assert (second.wrong, second.first, timeline.columns[timeline.first]) == (1, True, 2)
    assert sum(mark.wrong for lane in timeline.lanes for mark in lane.marks) == 1


def test_every_kind_of_event_is_told() -> None:
    kinds = get_args(get_type_hints(Event)["kind"])
    trace = recorded(len(kinds))
    events = tuple(Event(at=at, kind=kind) for at, kind in enumerate(kinds))
    case = replace(trace.header.case, events=events)
    told = timeline_of(Trace(replace(trace.header, case=case), trace.tensors))
    [lane] = [lane for lane in told.lanes if lane.name == SCHEDULER]
    assert {mark.text.removeprefix("↺ ") for mark in lane.marks} >= set(kinds)


def test_a_divergence_of_no_request_is_in_the_scheduler_s_lane() -> None:
    timeline = timeline_of(recorded(1), [replace(wrong(), request="", stage="iteration", iteration=1)])
    [lane] = [lane for lane in timeline.lanes if lane.name == SCHEDULER]
    assert [(mark.wrong, mark.first) for mark in lane.marks if mark.wrong] == [(1, True)]


def test_what_is_prefilled_again_was_retracted() -> None:
    trace = recorded(1)
    again = replace(trace.header.records[0], attempt=1, iteration=1)
    tensors = trace.tensors | {f"{len(trace.header.records)}.next_token": trace.tensors["0.next_token"]}
    header = replace(trace.header, records=(*trace.header.records, again))
    [lane] = [lane for lane in timeline_of(Trace(header, tensors)).lanes if lane.name == "a"]
    assert [mark.text for mark in lane.marks if mark.kind == "chunk"] == ["0 to 3", "↺ 0 to 3"]


def test_more_rounds_than_a_page_can_hold_lose_their_tokens_and_the_page_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagletwin.harness.page.timeline._MOST_ROUNDS", 2)
    timeline = timeline_of(recorded(5))
    assert timeline.brief == 3
    rounds = [mark for mark in timeline.lanes[0].marks if mark.kind == "round"]
    assert [bool(mark.accepted or mark.rejected) for mark in rounds] == [True, True, False, False, False]
    assert "3 rounds are without their tokens" in html_of(replace(page(), timeline=timeline))


def test_the_page_of_a_run_has_the_divergence_its_place_and_how_to_run_it_again() -> None:
    trace = recorded(3)
    made = run_page(trace, DIVERGED, argument=argue(trace.header, DIVERGED), again=("eagletwin check x",), files=("case.json",))
    assert made.headline == "draft.input_ids: request a, round 1, draft decode step 1"
    fields = dict(made.fields)
    assert "the judge failed when it looked at the trace again" in fields.pop("whose the actual one is")  # it has no tables
    assert fields == {"scheduler iteration": "2", "index": "row 4", "expected": "3", "actual": "89"}
    assert made.sentence.startswith("Row i of the draft consumes token x[i+1]")
    assert (made.status, made.again, made.files) == ("diverged", ("eagletwin check x",), ("case.json",))
    text = html_of(made)
    assert "DIVERGED · planted · eagletwin" in text
    assert 'href="case.json"' in text


def test_a_page_is_written_whole(tmp_path: Path) -> None:
    assert write_page(tmp_path, page) == tmp_path / NAME
    assert [file.name for file in tmp_path.iterdir()] == [NAME]
    assert (tmp_path / NAME).read_text(encoding="utf-8").endswith("</html>")


def test_a_page_that_cannot_be_written_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(file: Path, *_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))

    monkeypatch.setattr(Path, "write_text", full)
    assert write_page(tmp_path, page) is None
    told = capsys.readouterr()
    assert told.out == ""
    assert re.fullmatch(
        r"note: .*report.html cannot be written \(no space is left on the disk .*\); the verdict stands .*\n", told.err
    )


def test_a_page_that_cannot_be_made_is_a_note(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> Document:
        raise KeyError("planted")

    assert write_page(tmp_path, broken) is None
    assert "could not be made (KeyError: 'planted'); the verdict stands without it" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


# One document as text, as a comment and as a page: what each of them has of it.


ITEM = Item(
    title="draft.kv, 2 cases: one, two",
    lines=("HEAD: wrong.", "Smallest: small."),
    again="eagletwin check /a/case.json",
    portable="eagletwin check case.json",
    case='{"name": "one"}\n',
    folder="/a/folder",
    href="folder/report.html",
)
ROUNDS = table(
    "Rounds", ("model", "change", "all"), [("llama-tiny", TableCell("-3%", "wrong"), "x1"), ("llama-mtp", "same", "x2")], more=1
)
WHOLE = Document(
    title="HEAD against BASE",
    status="1 newly broken",
    headline="HEAD is wrong where BASE is right.",
    lines=("Two cases ran.",),
    facts=(("HEAD", "SGLang 0.5.23"),),
    reason="1 of 2 changed statements did not run",
    sections=(
        DocumentSection(heading="Newly broken", items=(ITEM,), found=True),
        DocumentSection(heading="Newly fixed", items=(Item(title="three", lines=("BASE: wrong.",), portable="check 3"),)),
        DocumentSection(heading="Acceptance", tables=(ROUNDS,)),
        DocumentSection(
            heading="Not looked at", lines=("trees", "grammars"), folded="Not looked at", brief="Not looked at: 2."
        ),
        DocumentSection(heading="All cases", tables=(table("Cases", ("case",), [("one",)], detail=True),), brief=""),
        DocumentSection(heading="Nothing"),
    ),
    again=("eagletwin compare /a/base /a/head",),
    portable="eagletwin compare BASE HEAD",
    folder="/a/run",
    end="Exit code 1: newly broken.",
)


def test_the_text_has_each_section_in_short_or_in_full_and_ends_with_the_exit_code() -> None:
    text = text_of(WHOLE, 60)
    assert text.splitlines()[:11] == [
        "1 NEWLY BROKEN  HEAD against BASE",
        "NOT SEEN  1 of 2 changed statements did not run",
        "",
        "  HEAD is wrong where BASE is right.",
        "  Two cases ran.",
        "",
        "  Newly broken:",
        "    draft.kv, 2 cases: one, two",
        "      HEAD: wrong.",
        "      Smallest: small.",
        "      again:  eagletwin check /a/case.json",
    ]
    assert "    three: BASE: wrong.\n" in text
    assert "│ llama-tiny │ -3%    │" in text
    assert "\n  Not looked at: 2.\n" in text
    assert "grammars" not in text
    assert "\n    grammars\n" in text_of(WHOLE, 60, verbose=True)
    assert "Nothing" not in text
    assert "x1" not in text
    assert text.splitlines()[-4:] == [
        "  Exit code 1: newly broken.",
        "  again:  eagletwin compare /a/base /a/head",
        "  folder: /a/run",
        "  page:   /a/run/report.html",
    ]


def test_the_comment_begins_with_what_was_found_and_has_no_path() -> None:
    text = markdown_of(WHOLE)
    for part in (
        "## eagletwin: 1 newly broken\n\n**HEAD is wrong where BASE is right.**\n\n**Not seen**: 1 of 2 changed statements",
        '### draft.kv, 2 cases: one, two\n\nHEAD: wrong.\nSmallest: small.\n\n```json\n{"name": "one"}\n```\n',
        "As `case.json`: `eagletwin check case.json`\n",
        "| newly fixed | `three` | BASE: wrong. | `check 3` |",
        "| llama-tiny | **-3%** |",
        "<summary>Not looked at</summary>\n\n* trees\n* grammars\n\n</details>",
        "* HEAD: SGLang 0.5.23\n",
    ):
        assert part in text
    assert "/a/" not in text
    assert "x1" not in text
    assert text.index("### draft.kv") < text.index("Two cases ran.")
    assert text.endswith("Again: `eagletwin compare BASE HEAD`")


def test_a_comment_has_so_many_rows_and_says_how_many_more_there_are() -> None:
    items = tuple(Item(title=f"case-{number}", lines=("wrong",)) for number in range(MOST_ROWS + 2))
    text = markdown_of(replace(WHOLE, sections=(DocumentSection(heading="Unknown", items=items),)))
    assert text.count("| unknown |") == MOST_ROWS
    assert "2 more rows on the page." in text


def test_the_page_has_all_of_it_but_what_is_empty() -> None:
    text = html_of(WHOLE)
    for part in (
        '<p class="status doubt">1 NEWLY BROKEN</p>',
        '<h3><a href="folder/report.html">draft.kv, 2 cases: one, two</a></h3>',
        "<p>Smallest: small.</p>",
        '<pre tabindex="0">eagletwin check /a/case.json</pre>',
        "<caption>Cases</caption>",
        "<td>x1</td>",
        "<p>grammars</p>",
        "<p>Exit code 1: newly broken.</p>",
    ):
        assert part in text
    assert ">Nothing<" not in text
    assert '<p class="status wrong">' in html_of(replace(WHOLE, kind="wrong"))
    assert '<p class="status right">' in html_of(replace(WHOLE, status="equal"))


def test_a_filter_that_no_row_has_is_left_out() -> None:
    rows = [row("a", tags=("live",)), row("b", tags=("fixed",))]
    made = table("Entries", ("entry",), rows, filters=(("State", ("live", "gone", "fixed")),))
    assert made.filters == (("State", ("live", "fixed")),)


# `eagletwin judge --html FOLDER`: what makes the page of which folder, and what it refuses.


def made(folder: Path) -> str:
    assert write_report(folder) == EXIT_EQUAL
    return (folder / NAME).read_text(encoding="utf-8")


def traced(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    trace = recorded(3)
    write_trace(folder, trace.header, trace.tensors)
    return folder


def search(folder: Path, **more: Any) -> Path:
    """What a search of two cases leaves."""
    tally = {
        "cases": 4,
        "statuses": {"equal": 3, "diverged": 1},
        "exercised": {"rejection": 2},
        "accept_lens": {"1 of 5": 2},
        "configurations": {f"llama-tiny{HOSTILE}": 4},
        "topics": {"chains": 4},
        "choices": 145,
        "ties": 1,
    }
    finding = {
        "signature": {"rule": "draft.input_ids", "stage": "draft.extend"},
        "status": "diverged",
        "folder": "/elsewhere/fuzz-0/finding-1/minimal",
        "cases": 4,
        "seconds": 3.0,
        "shrink_looks": 8,
        "shrink_seconds": 2.0,
    }
    known = finding | {"known": "small-tree", "folder": "/elsewhere/fuzz-0/finding-2/minimal"}
    left = ["trees (--only trees)"]
    met = {
        "id": "row-overflow",
        "cases": 3,
        "mended": 17,
        "shows": {"draft.slots (draft)": 3},
        "example": "known/row-overflow.json",
    }
    more = {"known": [met], "refused": {"step-3.5: it says so": "it says so"}, **more}
    summary = {"seconds": 8.0, "tally": tally, "findings": [finding, known], "not_looked_at": left, "command": "eagletwin fuzz"}
    (folder / SUMMARY).write_bytes(msgspec.json.encode(summary | more))
    (folder / "finding-1" / "minimal").mkdir(parents=True)
    (folder / "finding-1" / "minimal" / NAME).touch()
    return folder


def test_the_page_of_a_search_says_what_never_happened_and_what_the_exit_code_means(tmp_path: Path) -> None:
    note = "overlap-context-end: of cases whose draft reads the target's rows, which run with overlap in every search."
    text = made(search(tmp_path, exit_code=125, meaning="cannot tell", known_note=note))
    assert "<p>Exit code 125: cannot tell.</p>" in text
    assert "<caption>Never happened</caption>" in text
    assert FEATURES["abort_in_step"] in text
    assert FEATURES["rejection"] not in text
    assert "overlap-context-end: of cases whose draft reads the target" in text


def test_a_search_that_an_error_ended_says_nothing_of_its_exit_code(tmp_path: Path) -> None:
    assert "Exit code" not in made(search(tmp_path, exit_code=None))


def server(folder: Path) -> Path:
    """A rank that recorded two requests, of which one is cut short."""
    rank = folder / "rank-0"
    said = RecordedServer(recording=RECORDING, engine=ENGINE, arguments={}, launch="today-1", seen=2, written=2)
    for name in ("one", "two"):
        place = rank / name
        place.mkdir(parents=True)
        trace = recorded(2)
        asked = RecordedRequest(id="a", rid=f"{name}{HOSTILE}", prompt=(1, 2, 3, 4), max_new_tokens=512)
        header = RecordingHeader(
            schema=SCHEMA,
            recording=RECORDING,
            request=asked,
            num_steps=3,
            topk=1,
            num_draft_tokens=4,
            page_size=1,
            chunked_prefill_size=64,
            radix_cache=False,
            served=ServedModel(vocab_size=100),
            engine=ENGINE,
            ending=Ending(kind="stopped", detail="planted"),
            records=trace.header.records,
        )
        write_trace(place, header, trace.tensors)
    (rank / SERVER).write_bytes(msgspec.json.encode(said))
    return folder


def test_the_page_of_a_trace_has_the_verdict_that_lies_beside_it(tmp_path: Path) -> None:
    (traced(tmp_path) / "verdict.json").write_bytes(msgspec.json.encode(DIVERGED))
    text = made(tmp_path)
    assert "DIVERGED · planted" in text
    assert "eagletwin judge" in text
    assert 'href="trace.json"' in text


def test_the_page_of_a_trace_alone_is_judged(tmp_path: Path) -> None:
    assert "UNKNOWN · planted" in made(traced(tmp_path))


def test_a_verdict_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (traced(tmp_path) / "verdict.json").write_text("{")
    with pytest.raises(InputError, match=r"verdict.json cannot be read"):
        write_report(tmp_path)


def test_the_page_of_a_search_has_what_was_drawn_found_known_and_left_out(tmp_path: Path) -> None:
    text = made(search(tmp_path))
    for said in (
        "finding-1: diverged, draft.input_ids (draft.extend), new",
        "draft.input_ids (draft.extend), it may be small-tree",
        "0.50 cases/s",
        "trees (--only trees)",
        "row-overflow",
        "draft.slots (draft)",
        "step-3.5: it says so",
        "rejection",
    ):
        assert said in text
    assert f'href="finding-1/minimal/{NAME}"' in text
    assert f'href="finding-2/minimal/{NAME}"' not in text  # it has none
    assert "<img" not in text


def test_a_summary_of_something_else_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"summary.json cannot be read"):
        write_report(search(tmp_path, tally="four"))


def test_the_page_of_a_bisection_has_its_answer(tmp_path: Path) -> None:
    (tmp_path / REPORT).write_text(f"NEEDS trees  case{HOSTILE}: draft.kv\n\n  trees: topk 4.\n")
    variants = [tmp_path / f"variant-{n}" / "look-1" / NAME for n in (1, 2, 10)]
    for file in variants:
        file.parent.mkdir(parents=True)
        file.touch()
    text = made(tmp_path)
    assert "NEEDS trees" in text
    assert "<img" not in text
    places = [text.index(f'href="{page.relative_to(tmp_path)}"') for page in variants]
    assert places == sorted(places)


def test_the_page_of_acceptance_has_each_answer(tmp_path: Path) -> None:
    started: Any = {"version": "0.5.23", "algorithm": "EAGLE", "num_steps": 3, "topk": 1, "num_draft_tokens": 4, "chunk": 8}
    started |= {"page_size": 1, "dtype": "float32", "target": "t", "draft": "d", "overlap": False, "graphs": False}
    right = AnswerRounds(prompt=1, way=HOSTILE, tokens=9, cached=0, deserved=(3, 4), used=4)
    stake = Stake(prompts=1, drafts=9, one_in=3)
    found = ServerAcceptance(
        server=Started(**started),
        exit_code=1,
        condition="",
        off_target=0,
        answers=[replace(right, used=5, wrong=(Wrong(2, 0, (1,)),)), right, replace(right, untold=True, untold_cause="nobody")],
        as_if=[],
        bugs=[],
        power=Power(every=stake, conditions={"batches": stake}, merged=0, slack=0, any_loss=True),
        hidden_bugs={},
        shares={},
        remarks=[f"remark{HOSTILE}"],
    )
    conclude(found, tmp_path, as_json=False)
    kept = (tmp_path / NAME).read_text(encoding="utf-8")
    text = made(tmp_path)
    assert text == kept
    for said in (
        "DIVERGED · 2 answers: 6 to 8 rounds deserved, 9 used",
        "3 to 4",
        "1 round: behind 3 tokens 0 accepted, 1 deserved",
        "cannot be told: nobody",
        "1 draft in 3",
        "remark",
    ):
        assert said in text
    assert "<img" not in text


def test_the_page_of_a_server_s_recordings_lists_them(tmp_path: Path) -> None:
    text = made(server(tmp_path))
    assert "2 recorded requests" in text
    assert "tokens a round" in text
    assert "<img" not in text
    alone = made(tmp_path / "rank-0" / "one")
    assert "1 recorded request" in alone


def test_a_folder_without_anything_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nothing else that has a page"):
        write_report(tmp_path)


def test_a_page_that_cannot_be_written_is_a_harness_error(tmp_path: Path) -> None:
    (traced(tmp_path) / NAME).mkdir()
    assert write_report(tmp_path) == EXIT_HARNESS


def test_verdicts_of_several_runs_are_kept(tmp_path: Path) -> None:
    doubt = replace(DIVERGED, status="unknown", reason="nondeterministic: planted", first=wrong())
    (traced(tmp_path) / "verdict.json").write_bytes(msgspec.json.encode(doubt))
    assert "nondeterministic: planted" in made(tmp_path)
