"""What a server's recording is made of: guarded taps, files, tables, options, and what the judge makes of a folder."""

import dataclasses
import errno
import os
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagletwin.harness.check import recordings
from eagletwin.harness.check.recordings import JudgedServer, LookedAt, judge_recordings, suspects, suspects_text
from eagletwin.harness.commands.report import session_page
from eagletwin.harness.core.case import Request, Sampling
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.recording import (
    RECORDING,
    SERVER,
    Inconclusive,
    RecordedRequest,
    RecordedServer,
    RecordingComparison,
    RecordingHeader,
    Tables,
    as_header,
    whole_tables,
)
from eagletwin.harness.core.records import Ending, EngineInfo, Record, ServedModel
from eagletwin.harness.core.trace import HEADER, SCHEMA, TENSORS, Trace, write_trace
from eagletwin.harness.core.verdict import Divergence, Verdict
from eagletwin.harness.engines.protocol import FOLDER, OPTIONS, RecordOptions, environment, read_record_options
from eagletwin.harness.engines.sglang.recording import guard, plugin
from eagletwin.harness.engines.sglang.recording import underway as keeper
from eagletwin.harness.engines.sglang.recording.guard import Choice, Guards
from eagletwin.harness.engines.sglang.recording.underway import KEPT, CommittedRows, Keeper, Recording, UnderWay, permutation

from ..rows import rows
from .doors import opened

ENGINE = EngineInfo(name="none", version="0", device="cpu", kernels="none", torch="0", triton="0")


# -- taps that cannot break what they stand around --------------------------------------------------------------------------


def around(tap: Callable[..., Any], failures: list[Exception]) -> Callable[..., Any]:
    guarded = Guards(failures.append, lambda: True).around(tap)
    return lambda function, *args: guarded(function, *args)


def test_a_tap_that_fails_before_or_after_the_call_changes_nothing_of_it() -> None:
    calls, failures = [], list[Exception]()

    def own(value: int) -> int:
        calls.append(value)
        return 2 * value

    def before(_call: Any, _value: int) -> Any:
        raise KeyError("before")

    def after(call: Any, value: int) -> Any:
        call(value)
        raise KeyError("after")

    assert around(before, failures)(own, 3) == 6
    assert around(after, failures)(own, 4) == 8
    assert calls == [3, 4]
    assert [str(error) for error in failures] == ["'before'", "'after'"]


def test_what_the_server_itself_raises_passes_through_and_is_no_failure_of_a_tap() -> None:
    failures = list[Exception]()

    def own() -> None:
        raise OSError("its own")

    def tap(call: Any) -> Any:
        return call()

    with pytest.raises(OSError, match="its own"):
        around(tap, failures)(own)
    assert failures == []


def test_the_clock_counts_taps_and_not_the_calls_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(guard.time, "perf_counter", lambda: now[0])

    def takes(seconds: float) -> None:
        now[0] += seconds

    def tap(call: Any) -> None:
        takes(1)
        call()
        takes(2)

    guards = Guards(lambda error: None, lambda: True)
    inner, outer = guards.around(tap), guards.around(tap)
    outer(lambda: (takes(10), inner(lambda: takes(20))))
    assert guards.clock.taken == 6
    assert guards.clock.share == 6 / 36


def test_taps_rest_where_no_chosen_request_runs() -> None:
    def tap(_call: Any) -> Any:
        raise AssertionError("it must not be called")

    assert Guards(lambda error: None, lambda: False).around(tap)(lambda: 5) == 5


# -- which requests -----------------------------------------------------------------------------------------------------


class Req:
    def __init__(self, rid: str, **more: object) -> None:
        self.rid = rid
        vars(self).update(more)


def test_every_third_request_and_those_that_are_named() -> None:
    choice = Choice(RecordOptions(every=3, requests=("r4",)), lambda: None)
    requests = [Req(f"r{n}") for n in range(8)]
    chosen = [one.rid for one in requests if choice.chooses(one)]
    assert chosen == ["r0", "r3", "r4", "r6"]
    assert not any(map(choice.chooses, requests))  # chunks, and prefills after a retraction
    assert choice.seen == 8


def test_what_is_due_and_not_recorded_is_counted_by_its_reason() -> None:
    reasons = iter(["over_share", None, "full"])
    choice = Choice(RecordOptions(every=1), lambda: next(reasons))  # type: ignore[arg-type, return-value]
    images = Req("r1", multimodal_inputs=object())
    assert [choice.chooses(one) for one in (Req("r0"), images, Req("r2"))] == [False, False, False]
    assert choice.skipped == {"over_share": 1, "not_tokens_alone": 1, "full": 1}


# -- files --------------------------------------------------------------------------------------------------------------


def header(number: int, **more: Any) -> RecordingHeader:
    return RecordingHeader(
        schema=SCHEMA,
        recording=RECORDING,
        request=RecordedRequest(id=f"request-{number:06}", rid=f"r{number}", prompt=(1, 2), max_new_tokens=4),
        num_steps=2,
        topk=1,
        num_draft_tokens=3,
        page_size=1,
        chunked_prefill_size=16,
        radix_cache=True,
        served=ServedModel(vocab_size=10),
        engine=ENGINE,
        ending=Ending(kind="finished"),
        records=(),
        **more,
    )


def said(engine: EngineInfo = ENGINE, **more: Any) -> RecordedServer:
    return RecordedServer(recording=RECORDING, engine=engine, arguments={}, **{"launch": "today-1", **more})


def kept(folder: Path, megabytes: int = 10) -> Keeper:
    def state() -> RecordedServer:
        return said(seen=9, written=writer.written)

    writer = Keeper(folder, megabytes, lambda seconds: None, state)
    writer.start()
    return writer


def wait(writer: Keeper, done: Callable[[], bool]) -> None:
    for _ in range(2000):
        if done() and writer._waiting.empty():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it was not done within 20 s")


def test_a_full_disk_keeps_what_was_complete_and_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = kept(tmp_path / "server")
    writer.keep(header(1), {})
    wait(writer, lambda: writer.written == 1)
    write = keeper.write_trace

    def half(folder: Path, *_args: Any) -> None:
        (folder / TENSORS).write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(keeper, "write_trace", half)
    writer.keep(header(2), {})
    wait(writer, lambda: writer.full)
    monkeypatch.setattr(keeper, "write_trace", write)
    writer.keep(header(3), {})
    wait(writer, lambda: True)
    assert sorted(one.name for one in (tmp_path / "server").iterdir()) == ["request-000001", SERVER]
    assert msgspec.json.decode((tmp_path / "server" / SERVER).read_bytes())["written"] == 1


def test_files_are_no_larger_than_was_asked_for(tmp_path: Path) -> None:
    writer = kept(tmp_path / "server", megabytes=1)
    large = Record(request="request-000001", round=0, stage="draft", tensors=("tokens",))
    writer.keep(
        msgspec.structs.replace(header(1), records=(large,)),
        {"0.tokens": np.zeros(200_000, np.int64)},
    )
    wait(writer, lambda: writer.full)
    assert writer.written == 1


# -- tables -------------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(tables=st.lists(st.lists(st.integers(0, 9), max_size=8), max_size=8))
def test_tables_come_back_as_they_were(tables: list[list[int]]) -> None:
    written, records, tensors = Tables(), [], dict[str, torch.Tensor | np.ndarray[Any, Any]]()
    for number, table in enumerate(tables):
        numbers, parts = written.changes(np.array(table, np.int64))
        tensors |= {f"{number}.{name}": part for name, part in parts.items()}
        records.append(Record(request="r", round=number, stage="draft", numbers=numbers, tensors=tuple(parts)))
    found, whole = whole_tables(records, tensors)
    assert [np.asarray(whole[f"{number}.table"]).tolist() for number in range(len(tables))] == tables
    assert all(record.tensors == ("table",) and not record.numbers for record in found)


@pytest.mark.parametrize(("length", "at"), [(5, [0]), (2, [0, 2]), (1 << 31, [0])])
def test_a_table_that_does_not_fit_is_refused(length: int, at: list[int]) -> None:
    record = Record(request="r", round=0, stage="draft", numbers={"table_length": length}, tensors=("table_at", "table_slots"))
    with pytest.raises(ValueError, match="record 0"):
        whole_tables([record], {"0.table_at": np.array(at), "0.table_slots": np.array(at)})


# -- private ids --------------------------------------------------------------------------------------------------------


def test_a_permutation_is_of_its_request_and_the_same_on_every_rank() -> None:
    one, other = (permutation("key", rid, 500) for rid in ("a", "b"))
    assert sorted(one.tolist()) == list(range(500))
    assert (one == permutation("key", "a", 500)).all()
    assert (one != other).any()
    assert (one != permutation("other key", "a", 500)).any()


def test_tokens_are_permuted_and_links_positions_and_slots_are_not() -> None:
    order = permutation("key", "a", 50)
    recording = Recording(1, Req("a"), order)
    ids = np.array([3, 4, 99])
    recording.add(0, "draft", {"seq_len": 3}, {"tokens": ids, "next_token": ids, "positions": ids})
    recording.add(0, "verify", {"bonus": 3, "accept_len": 3}, {"predicted": ids})
    kept = {name: array.tolist() for name, array in recording.recorder.tensors.items()}
    new = [int(order[3]), int(order[4]), 99]  # outside the vocabulary stays outside
    assert kept == {"0.tokens": new, "0.next_token": [3, 4, 99], "0.positions": [3, 4, 99], "1.predicted": new}
    assert [record.numbers for record in recording.recorder.records] == [{"seq_len": 3}, {"bonus": new[0], "accept_len": 3}]


def test_of_floats_rows_alone_are_recorded() -> None:
    recording = Recording(1, Req("a"), None)
    recording.add(0, "draft", {}, {"tokens": np.zeros(2, np.int64), "candidate_scores": np.zeros(2, np.float32)})
    recording.add(0, "extend", {}, {"draft_rows": np.arange(2), KEPT: np.zeros((2, 2, 1, 1, 4), np.float32)})
    assert list(recording.recorder.tensors) == ["0.tokens", "1.draft_rows", "1.draft_kv"]


class _Pool:
    """Rows of which each is its slot."""

    def __init__(self) -> None:
        self.read = list[list[int]]()

    def rows_of(self, parts: list[Any]) -> list[Any]:
        self.read += [part.tolist() for part in parts]
        return [part.astype(np.float32) for part in parts]


class _Tables:
    has_windows = False

    def table(self, request: Any, end: int) -> Any:
        return np.arange(end) + 100 * int(request.rid)


def test_each_row_is_recorded_once_and_no_more_than_were_asked_for() -> None:
    underway, pool = UnderWay(), _Pool()
    requests: list[Any] = [Req("1"), Req("2")]
    underway.by_rid["2"] = Recording(1, requests[1], None)
    rows = CommittedRows(_Tables(), pool, underway, 6)  # type: ignore[arg-type]
    found = [rows.of(requests, [end, end])[1] for end in (3, 5, 8, 9)]
    assert pool.read == [[200, 201, 202], [203, 204], [205]]
    assert [one.get("draft_rows", np.empty(0)).tolist() for one in found] == [[0, 1, 2], [3, 4], [5], []]
    assert [len(one["table"]) for one in found] == [3, 5, 8, 9]


# -- what is asked for --------------------------------------------------------------------------------------------------


def test_options_travel_by_two_variables(tmp_path: Path) -> None:
    options = RecordOptions(every=7, private=True, key="ab", requests=("x",))
    variables = environment(tmp_path, options)
    assert set(variables) == {FOLDER, OPTIONS}
    assert read_record_options(variables) == (tmp_path, options)
    assert read_record_options({FOLDER: "/x"}) == (Path("/x"), RecordOptions())
    assert read_record_options({}) is None


@pytest.mark.parametrize("text", ["{", '{"every": 0}', '{"evry": 3}', '{"share": 0}', "[]"])
def test_options_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="nothing is recorded"):
        read_record_options({FOLDER: "/x", OPTIONS: text})


def test_without_the_variable_the_plugin_imports_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    plugin.start()  # where SGLang cannot be imported, as here in `make quick`
    code = "import sys, eagletwin.harness.engines.sglang.recording.plugin as p; p.start(); print('torch' in sys.modules)"
    environ = {name: value for name, value in os.environ.items() if name != FOLDER}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environ)
    assert done.stdout == "False\n"


def test_a_hook_that_fails_does_not_stop_the_scheduler(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, "/nowhere")
    plugin._built(None, SimpleNamespace(draft_worker=object()))
    assert "The server goes on" in capsys.readouterr().out


# -- the commands -------------------------------------------------------------------------------------------------------


def test_the_command_becomes_the_server_with_the_variables_set(tmp_path: Path) -> None:
    code = f"import os, sys; print(os.environ['{FOLDER}'], os.environ['{OPTIONS}']); sys.exit(7)"
    words = ["-m", "eagletwin", "record", "out", "--every", "3", "--", sys.executable, "-c", code]
    done = opened(words, tmp_path)
    assert done.returncode == 7
    assert done.stdout.startswith(f"{tmp_path / 'out'} {{")
    assert '"every":3' in done.stdout
    assert (tmp_path / "out").is_dir()


@pytest.mark.parametrize("words", rows([[], ["--"], ["--", "no-such-program"], ["--private", "--rows", "9", "--", "sh"]]))
def test_a_command_that_cannot_be_started_is_128(tmp_path: Path, words: list[str]) -> None:
    done = opened(["-m", "eagletwin", "record", "out", *words], tmp_path)
    assert (done.returncode, done.stdout) == (128, "")
    assert "no server was started" in done.stderr


def test_the_variables_can_be_printed_for_a_shell(tmp_path: Path) -> None:
    done = opened(["-m", "eagletwin", "record", "a b", "--print"], tmp_path)
    assert done.returncode == 0
    again = subprocess.run(["sh", "-c", f'{done.stdout}\necho "${FOLDER}"'], capture_output=True, text=True, check=True)
    assert again.stdout.strip() == str(tmp_path / "a b")


@pytest.mark.slow
def test_a_folder_without_recordings_is_no_pass(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="holds no recording"):
        judge_recordings(tmp_path / "empty", frozenset())
    done = opened(["-m", "eagletwin", "judge", "empty"], tmp_path)
    assert (done.returncode, done.stdout) == (128, "")
    assert "no server recorded into it" in done.stderr
    server = tmp_path / "out" / "rank"
    server.mkdir(parents=True)
    rank = said(seen=5, skipped={"failed": 5}, failures=5, last_failure="x")
    (server / SERVER).write_bytes(msgspec.json.encode(rank))
    session = judge_recordings(tmp_path / "out", frozenset())
    assert session.status == "unknown"
    report = session.report(100, "")
    assert "saw 5 requests and recorded 0" in report
    assert "Taps failed 5 times" in report
    gone = msgspec.structs.replace(rank, written=2)
    (server / SERVER).write_bytes(msgspec.json.encode(gone))
    assert "2 were written, and 0 are judged here" in judge_recordings(tmp_path / "out", frozenset()).report(100, "")


# -- the checkpoints at hand --------------------------------------------------------------------------------------------

CHANCE = Inconclusive("drawn by chance", "the drafts were drawn", "record greedy requests")
LAYERS = Inconclusive("16 bits", "the layers round", "serve in float32")


def beside(*those: tuple[dict[str, int], Inconclusive | None]) -> JudgedServer:
    """A server whose recordings are equal by themselves: what was compared with the checkpoints, and why no draft was."""
    looked = [
        LookedAt(Path(f"request-{n}"), "equal", "", 1, 3, Counter(weighed), why) for n, (weighed, why) in enumerate(those)
    ]
    weighed = sum((Counter(one) for one, _ in those), Counter[str]())
    return JudgedServer([], Counter(equal=len(those)), Counter({"draft.kv": 2}) + weighed, weighed=weighed, looked=looked)


@pytest.mark.parametrize(
    ("those", "status"),
    [
        ([({"draft.proposal": 3}, None)], "equal"),
        ([({"draft.proposal": 3}, None), ({"verify.accept": 5}, LAYERS)], "equal"),
        ([({"draft.kv": 3}, CHANCE)], "equal"),  # a row that the draft stores is wrong where its token or its state is
        ([({"verify.accept": 5}, LAYERS)], "unknown"),  # tokens are right whatever was drafted
        ([({}, CHANCE), ({"verify.accept": 5}, LAYERS)], "unknown"),
        ([({"verify.accept": 5}, None)], "unknown"),  # --without
    ],
)
def test_what_was_drafted_must_have_been_compared_somewhere(those: list[Any], status: str) -> None:
    session = beside(*those)
    assert session.status == status
    assert ("whether the server drafts what this pair deserves is not known" in session.report(200, "")) == (
        status == "unknown"
    )


def test_one_server_s_drafts_say_nothing_of_another_s() -> None:
    session = beside(({"draft.proposal": 3}, None), ({"verify.accept": 5}, LAYERS))
    session.looked[1] = dataclasses.replace(session.looked[1], launch="another")
    assert session.status == "unknown"
    report = session.report(200, "")
    assert "No draft of 1 of the 2 launches was compared with the checkpoints" in report
    assert "try: serve in float32\n" in report


@pytest.mark.parametrize(("strange", "asked"), [(2, False), (3, True)])
def test_a_target_that_says_few_of_the_tokens_may_be_another_one(strange: int, asked: bool) -> None:
    session = dataclasses.replace(beside(({"draft.proposal": 3, "verify.accept": 4}, None)), strange=strange)
    said = f"{strange} of 4 greedy tokens are not those of this target: is it the server's?"
    assert (said in session.report(200, "")) == asked


def test_one_token_of_another_target_is_said_in_the_singular() -> None:
    session = dataclasses.replace(beside(({"draft.proposal": 3, "verify.accept": 1}, None)), strange=1)
    assert "1 of 1 greedy token is not that of this target: is it the server's?" in session.report(200, "")


def test_rules_that_were_left_out_are_the_first_cause() -> None:
    session = dataclasses.replace(beside(({}, None), ({}, CHANCE)), without=frozenset({"draft.proposal"}))
    assert "try: leave --without out; or record greedy requests\n" in session.report(200, "")


def test_causes_are_counted_each_with_its_remedy() -> None:
    session = beside(({}, CHANCE), ({"verify.accept": 5}, LAYERS), ({}, CHANCE))
    report = session.report(200, "")
    assert "try: record greedy requests; or serve in float32" in report
    assert "No draft was compared in 2 of 3 recordings: the drafts were drawn. To have drafts compared, record greedy" in report
    assert "No draft was compared in 1 of 3 recordings: the layers round. To have drafts compared, serve in float32." in report
    page = session_page(session, Path("recorded"), "", report)
    assert page.headline == "3 recorded requests: 3 equal; no draft was compared in 3"
    [table] = page.sections[0].tables
    assert [row.cells[4].text for row in table.rows] == [f"not compared: {why.cause}" for why in (CHANCE, LAYERS, CHANCE)]
    assert ("Drafts not compared", ("16 bits", "drawn by chance")) in table.filters


def test_rows_of_tokens_alone_are_told_from_rows_that_were_compared() -> None:
    """Of several layers, integers say which tokens the rows of a prefix had been fed: that is draft.kv, too."""
    report = beside(({"draft.proposal": 3}, None)).report(200, "")
    assert "by rules that need no weights: draft.kv 2." in report
    assert "3 comparisons with the checkpoints: draft.proposal 3." in report
    assert "No row was compared with them" in report
    assert "above, draft.kv compares which tokens rows had been fed" in report
    assert "No row was compared" not in beside(({"draft.kv": 3}, None)).report(200, "")


# -- ranks --------------------------------------------------------------------------------------------------------------


def of_rank(folder: Path, rank: int, drafted: Sequence[int], *, rid: str = "r", number: int = 1, **more: Any) -> None:
    """A recording by one of two ranks: the drafts of one round."""
    engine = msgspec.structs.replace(ENGINE, tp=2, rank=rank)
    request = RecordedRequest(id=f"request-{number:06}", rid=rid, prompt=(1, 2), max_new_tokens=4)
    ending = more.pop("ending", Ending(kind="finished"))
    records = [Record(request=request.id, round=n, stage="draft", tensors=("tokens",)) for n in range(len(drafted))]
    recording = msgspec.structs.replace(header(number), engine=engine, request=request, records=tuple(records), ending=ending)
    below = folder / request.id
    below.mkdir(parents=True)
    write_trace(below, recording, {f"{n}.tokens": np.array([token]) for n, token in enumerate(drafted)})
    (folder / SERVER).write_bytes(msgspec.json.encode(said(engine, seen=1, written=1, **more)))


def compared(folder: Path) -> tuple[int, list[str]]:
    """Pairs of ranks that were compared, and by which rule something was wrong."""
    session = judge_recordings(folder, frozenset())
    return session.checked["ranks.agree"], [text for _, text in session.wrong if "ranks.agree" in text]


def test_ranks_of_one_start_are_compared_request_by_request(tmp_path: Path) -> None:
    for rank in range(2):
        of_rank(tmp_path / "right" / f"rank{rank}", rank, [5, 6])
        of_rank(tmp_path / "wrong" / f"rank{rank}", rank, [5, 6 + rank])
        of_rank(tmp_path / "short" / f"rank{rank}", rank, [5, 6][: 2 - rank])
    assert compared(tmp_path / "right") == (1, [])
    for name in ("wrong", "short"):
        number, wrong = compared(tmp_path / name)
        assert number == 1
        assert len(wrong) == 1


def test_ranks_that_differ_are_wrong_whatever_each_is_by_itself(tmp_path: Path) -> None:
    for rank in range(2):
        of_rank(tmp_path / f"rank{rank}", rank, [5, 6 + rank])
    session = judge_recordings(tmp_path, frozenset())
    assert session.status == "diverged"
    assert sum(session.counts.values()) == len(session.looked) == 2
    assert session.counts["diverged"] == sum(one.status == "diverged" for one in session.looked) == 1


def test_a_rule_that_is_left_out_asks_nothing_of_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recordings, "judge", lambda *_: Verdict(status="equal"))
    of_rank(tmp_path / "rank0", 0, [5])
    place = {"request": "r", "round": 0, "stage": "verify", "step": 0, "iteration": 1, "index": "token 5 of the text"}
    wrong = Divergence(rule="verify.accept", expected="1", actual="2", **place)  # type: ignore[arg-type]

    def report(*without: str) -> str:
        compared = Counter({"draft.proposal": 1, "verify.accept": 2})
        session = judge_recordings(
            tmp_path, frozenset(without), lambda *_: RecordingComparison([wrong, wrong], Counter(compared))
        )
        assert session.status == ("equal" if without else "diverged")
        return session.report(200, "")

    assert "2 of 2 greedy tokens are not those of this target" in report()
    assert "of this target" not in report("verify.accept")


def test_what_was_not_one_request_is_not_compared(tmp_path: Path) -> None:
    starts, replicas, twice = (tmp_path / name for name in ("starts", "replicas", "twice"))
    for rank in range(2):
        of_rank(starts / f"rank{rank}", rank, [5 + rank], launch=f"today-{rank}")
        of_rank(replicas / f"rank{rank}", rank, [5 + rank], dp=rank)
        for number in (1, 2):  # a client gave two requests one id
            of_rank(twice / f"rank{rank}", rank, [5 + number], number=number)
    assert [compared(folder) for folder in (starts, replicas, twice)] == [(0, [])] * 3


def test_a_rank_that_stopped_recording_agrees_as_far_as_it_went(tmp_path: Path) -> None:
    of_rank(tmp_path / "rank0", 0, [5, 6])
    of_rank(tmp_path / "rank1", 1, [5], ending=Ending(kind="stopped", detail="after 1 round"))
    assert compared(tmp_path) == (1, [])


def test_a_recording_that_was_edited_is_refused(tmp_path: Path) -> None:
    writer = kept(tmp_path / "server")
    writer.keep(header(1), {})
    wait(writer, lambda: writer.written == 1)
    assert judge_recordings(tmp_path / "server", frozenset()).status == "unknown"  # it has no record at all
    file = tmp_path / "server/request-000001" / HEADER
    file.write_text(file.read_text().replace('"num_steps":2', '"num_steps":3'))
    with pytest.raises(InputError, match="edited"):
        judge_recordings(tmp_path, frozenset())


@pytest.mark.parametrize(
    ("version", "rule", "layers", "topk", "states", "named"),
    [
        ("0.5.23", "draft.input_ids", 2, 1, True, ["multi-layer-chunk-tail-2", "multi-layer-chunk-tail-3"]),
        ("0.5.23", "commit.path", 2, 2, True, ["multi-layer-topk-path"]),
        ("0.5.23", "commit.path", 0, 2, True, ["tree-window", "tree-slots", "tree-sinks"]),
        ("0.5.12", "commit.path", 0, 2, True, ["26997-kv", "26997-tokens", "26997-hidden"]),
        ("0.5.12", "commit.path", 0, 1, True, []),
        ("0.5.23", "draft.input_ids", 0, 1, False, ["standalone-shift"]),
        ("0.5.23+dirty.0123", "draft.slots", 0, 2, True, ["row-overflow"]),
        ("a-fork", "draft.slots", 0, 2, True, ["row-overflow"]),  # all live ones may be there
        ("a-fork", "draft.positions", 0, 1, True, []),
    ],
)
def test_a_divergence_names_the_bugs_that_the_release_has(
    version: str, rule: str, layers: int, topk: int, states: bool, named: list[str]
) -> None:
    of = msgspec.structs.replace(
        header(1),
        topk=topk,
        num_draft_tokens=3 if topk == 1 else 4,
        served=ServedModel(vocab_size=10, mtp_layers=layers, states=states),
        engine=msgspec.structs.replace(ENGINE, version=version),
    )
    trace = Trace(as_header(of, ()), {})
    assert [entry.id for entry in suspects(trace, rule)] == named
    text = " ".join(suspects_text(trace, rule))
    assert all(f"{name}: " in text for name in named)
    assert ("not confirmed" in text) == bool(named)


def test_a_bug_that_needs_a_gpu_or_a_request_that_samples_is_named_where_they_are() -> None:
    served = ServedModel(vocab_size=10, mtp_layers=0, states=True)
    there = msgspec.structs.replace(ENGINE, version="0.5.23", device="cuda", pp=2)
    of = msgspec.structs.replace(header(1), topk=2, num_draft_tokens=4, served=served, engine=there)

    def named(of: RecordingHeader, requests: tuple[Request, ...], rule: str) -> list[str]:
        whole = as_header(of, ())
        whole = msgspec.structs.replace(whole, case=msgspec.structs.replace(whole.case, requests=requests))
        return [entry.id for entry in suspects(Trace(whole, {}), rule)]

    greedy = as_header(of, ()).case.requests
    assert "tree-slots" in named(of, greedy, "commit.path")
    sampled = tuple(msgspec.structs.replace(one, sampling=Sampling(temperature=0.8)) for one in greedy)
    assert "pipeline-zeros" in named(of, sampled, "verify.accept")
    assert "pipeline-zeros" not in named(of, greedy, "verify.accept")
    alone = msgspec.structs.replace(of, engine=msgspec.structs.replace(there, pp=1))
    assert "pipeline-zeros" not in named(alone, sampled, "verify.accept")
