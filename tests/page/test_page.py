"""One document as text, as a comment and as a page, and that nothing that goes wrong with a page is more than a note."""

import errno
import os
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import get_args, get_type_hints

import msgspec
import pytest
from msgspec.structs import replace

from eagletwin.harness.check.argument import argue
from eagletwin.harness.core.case import Event
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.page import render
from eagletwin.harness.page.document import Document, DocumentSection, Item, TableCell, Timeline, row, table
from eagletwin.harness.page.render import MOST_ROWS, NAME, html_of, markdown_of, text_of, write_page
from eagletwin.harness.page.run import run_page
from eagletwin.harness.page.timeline import SCHEDULER, timeline_of

from .planted import DIVERGED, HOSTILE, page, recorded, wrong

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
    timeline = timeline_of([recorded(3, requests=("a", "b"))], [wrong("b", 2)])
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
    told = timeline_of([Trace(replace(trace.header, case=case), trace.tensors)])
    [lane] = [lane for lane in told.lanes if lane.name == SCHEDULER]
    assert {mark.text.removeprefix("↺ ") for mark in lane.marks} >= set(kinds)


def test_a_divergence_of_no_request_is_in_the_scheduler_s_lane() -> None:
    timeline = timeline_of([recorded(1)], [replace(wrong(), request="", stage="iteration", iteration=1)])
    [lane] = [lane for lane in timeline.lanes if lane.name == SCHEDULER]
    assert [(mark.wrong, mark.first) for mark in lane.marks if mark.wrong] == [(1, True)]


def test_what_is_prefilled_again_was_retracted() -> None:
    trace = recorded(1)
    again = replace(trace.header.records[0], attempt=1, iteration=1)
    tensors = trace.tensors | {f"{len(trace.header.records)}.next_token": trace.tensors["0.next_token"]}
    header = replace(trace.header, records=(*trace.header.records, again))
    [lane] = [lane for lane in timeline_of([Trace(header, tensors)]).lanes if lane.name == "a"]
    assert [mark.text for mark in lane.marks if mark.kind == "chunk"] == ["0 to 3", "↺ 0 to 3"]


def test_more_rounds_than_a_page_can_hold_lose_their_tokens_and_the_page_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eagletwin.harness.page.timeline._MOST_ROUNDS", 2)
    timeline = timeline_of([recorded(2, name="one"), recorded(3, name="two")])
    assert [lane.name for lane in timeline.lanes if lane.name != SCHEDULER] == ["a (1)", "a (2)"]
    assert timeline.brief == 3
    rounds = [mark for mark in timeline.lanes[1].marks if mark.kind == "round"]
    assert not any(mark.accepted or mark.rejected for mark in rounds)
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
