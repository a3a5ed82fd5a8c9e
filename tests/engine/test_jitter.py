"""Pauses between streams: where they fall, that they leave a CPU engine's answers alone, and what a race looks like."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.records import Ending, Jitter, Jittered
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.sglang.jitter import Pauses, streams_of
from eagletwin.harness.judge.judge import judge

from ..lab.bench.workload import rate_case
from ..lab.gpu.missing_waits import HIDDEN, WAITS
from ..lab.gpu.races import TOLD, race, raced, told
from ..rows import spread


class _Cuda:
    """As much of torch.cuda as pauses touch. done: calls of events, and sleeps: on which stream, and how many cycles."""

    def __init__(self) -> None:
        self.done: list[tuple[str, int]] = []
        done = self.done

        class Event:
            def record(self, stream: Any = None) -> None:  # noqa: ARG002  as torch has it
                done.append(("record", 0))

            def wait(self, stream: Any = None) -> None:  # noqa: ARG002
                done.append(("wait", 0))

        class Stream:
            def __init__(self, name: str) -> None:
                self.name = name

            def wait_event(self, event: Any) -> None:
                event.wait(self)

            def wait_stream(self, other: Any) -> None:
                event = Event()
                event.record(other)
                self.wait_event(event)

        cuda = self

        class StreamContext:
            def __init__(self, stream: Stream) -> None:
                self._stream = stream

            def __enter__(self) -> None:
                self._before, cuda.current = cuda.current, self._stream

            def __exit__(self, *_: object) -> None:
                cuda.current = self._before

        self.Event, self.Stream, self.StreamContext = Event, Stream, StreamContext
        self.current = Stream("default")

    def current_stream(self) -> Any:
        return self.current

    def _sleep(self, cycles: int) -> None:
        self.done.append((self.current.name, cycles))


def _use(cuda: _Cuda, seed: int, share: float = 1.0) -> Jittered:
    """A batch or so, with pauses."""
    forward, copy = cuda.Stream("forward"), cuda.Stream("copy")
    pauses = Pauses(Jitter(seed=seed, share=share), lambda stream: str(stream.name), cuda)
    pauses.start()
    forward.wait_stream(copy)
    with cuda.StreamContext(forward):
        event = cuda.Event()
        event.record()
        event.wait(copy)
    pauses.stop()
    return pauses.jittered


def test_a_pause_follows_the_call_on_the_stream_that_goes_on() -> None:
    cuda = _Cuda()
    jittered = _use(cuda, seed=3)
    assert [pause.place for pause in jittered.pauses] == [
        "Stream.wait_stream on forward",  # with the event inside it, one point
        "StreamContext.enter on forward",
        "Event.record on forward",
        "Event.wait on copy",
        "StreamContext.exit on default",
    ]
    assert [pause.point for pause in jittered.pauses] == list(range(jittered.points))
    slept = [stream for stream, cycles in cuda.done if cycles]
    assert slept == ["forward", "forward", "forward", "copy", "default"]
    assert [word for word, cycles in cuda.done if not cycles] == ["record", "wait", "record", "wait"]
    assert all(200 <= pause.microseconds <= 20_000 for pause in jittered.pauses)
    assert cuda.current.name == "default"


def test_the_same_seed_has_the_same_pauses_and_none_are_left_behind() -> None:
    first, again, other = (_use(_Cuda(), seed, share=0.5) for seed in (1, 1, 2))
    assert first == again
    assert first.pauses != other.pauses
    cuda = _Cuda()
    _use(cuda, seed=1)
    before = len(cuda.done)
    with cuda.StreamContext(cuda.Stream("forward")):
        pass
    assert len(cuda.done) == before
    assert not _use(_Cuda(), seed=1, share=0.0).pauses


def test_torch_has_what_pauses_change() -> None:
    pauses, before = Pauses(Jitter(seed=0), str), torch.cuda.Event.record
    pauses.start()
    assert torch.cuda.Event.record is not before
    pauses.stop()
    assert torch.cuda.Event.record is before


def test_a_stream_is_called_by_what_the_scheduler_has_it_for() -> None:
    scheduler = SimpleNamespace(
        schedule_stream=1, forward_stream=2, copy_stream=3, future_map=SimpleNamespace(fwd_prepare_d2h_stream=4)
    )
    name = streams_of(scheduler)
    assert [name(number) for number in range(1, 6)] == ["schedule", "forward", "copy", "lengths", "another"]


@pytest.mark.parametrize("topk", [1, 3])
def test_a_run_with_pauses_is_answered_as_the_one_that_was_judged(overlapped: Host, tmp_path: Path, topk: int) -> None:
    case = rate_case(1, topk)
    case = replace(case, engine=replace(case.engine, sglang=replace(case.engine.sglang, radix_cache=True)))
    judged = _run(overlapped, case, tmp_path / "judged")
    assert judge(judged).status == "equal"
    (tmp_path / "raced").mkdir()
    run = race(overlapped.engine(case), case, judged, Jitter(seed=7), tmp_path / "raced")
    assert not run.differs
    assert run.compared >= 20
    assert {record.stage for record in told(judged).header.records} == set(TOLD)
    assert run.points == 0  # a CPU has no streams


def test_what_another_draft_changes_shows_in_the_drafts_that_were_accepted(overlapped: Host, tmp_path: Path) -> None:
    """A draft that was raced is a wrong draft: greedy tokens stay as they are."""
    case = rate_case(1, 1)
    judged = _run(overlapped, case, tmp_path / "judged")
    wrong = Patch(
        name="wrong-first-token",
        edits=(
            Edit(
                target="sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft",
                match="draft_input: EagleDraftInput = batch.spec_info",
                replacement="draft_input: EagleDraftInput = batch.spec_info\n"
                "draft_input.topk_index = torch.zeros_like(draft_input.topk_index)",
            ),
        ),
    )
    other = _run(overlapped, case, tmp_path / "other", (wrong,))
    run = raced(judged, other, Jitter(seed=5))
    assert run.differs.startswith("finished")
    assert ", tokens" not in run.differs
    assert ", decoded" not in run.differs


def test_a_run_that_does_not_end_is_a_race(overlapped: Host, tmp_path: Path) -> None:
    judged = _run(overlapped, LEDGER["25015"].case, tmp_path / "judged")
    header = replace(judged.header, ending=Ending(kind="hung", detail="no end"), jittered=Jittered(Jitter(seed=5), 9, ()))
    run = raced(judged, Trace(header, judged.tensors), Jitter(seed=5))
    assert (run.differs, run.points, run.compared) == ("hung no end", 9, 0)


@pytest.mark.parametrize("patch", spread(WAITS + HIDDEN), ids=lambda patch: str(patch.name))
def test_missing_waits_fit_the_release_and_are_none_on_a_cpu(overlapped: Host, tmp_path: Path, patch: Patch) -> None:
    case = rate_case(1, 1)
    trace = _run(overlapped, case, tmp_path / "run", (patch,))
    assert judge(trace).status == "equal"
    assert not trace.header.idle_edits or "_apply_war_barrier" in "".join(trace.header.idle_edits)


def _run(host: Host, case: Any, folder: Path, patches: tuple[Patch, ...] = ()) -> Trace:
    folder.mkdir()
    return host.engine(case, patches).run(case, folder)
