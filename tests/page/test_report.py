"""`eagletwin judge --html FOLDER`: what makes the page of which folder, and what it refuses."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from eagletwin.harness.commands.acceptance.report import AnswerRounds, ServerAcceptance, conclude
from eagletwin.harness.commands.bisect.report import REPORT
from eagletwin.harness.commands.fuzz.tally import SUMMARY
from eagletwin.harness.commands.report import write_report
from eagletwin.harness.core.errors import EXIT_EQUAL, EXIT_HARNESS, InputError
from eagletwin.harness.core.recording import RECORDING, SERVER, RecordedRequest, RecordedServer, RecordingHeader
from eagletwin.harness.core.records import Ending, ServedModel
from eagletwin.harness.core.trace import SCHEMA, write_trace
from eagletwin.harness.deserved.rounds import Wrong
from eagletwin.harness.deserved.server import Started
from eagletwin.harness.deserved.statistics import Power, Stake
from eagletwin.harness.families.dimensions import FEATURES
from eagletwin.harness.page.render import NAME

from .planted import DIVERGED, ENGINE, HOSTILE, recorded, wrong


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
    for page in variants:
        page.parent.mkdir(parents=True)
        page.touch()
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
