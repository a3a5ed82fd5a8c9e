"""What is on a page, and that nothing that goes wrong with it is more than a note."""

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
from eagletwin.harness.page.document import Document, Timeline
from eagletwin.harness.page.render import NAME, html_of, write_page
from eagletwin.harness.page.run import run_page
from eagletwin.harness.page.timeline import SCHEDULER, timeline_of

from .planted import DIVERGED, HOSTILE, page, recorded, wrong


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
