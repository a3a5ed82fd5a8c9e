"""The fixture under rough handling: one test must not reach into another's case, engine or verdict."""

import signal
from pathlib import Path
from typing import NoReturn

import pytest

from eagletwin.harness.core.case import Case, EngineSettings, Event, Request, SGLangSettings
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.testing.twin import CaseFailed, Twin

FORWARD = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft_forward"
BAD = Patch(
    name="bad", edits=(Edit(target=FORWARD, match="topk_index = torch.argmax(", replacement="topk_index = torch.argmin("),)
)


def case(name: str, new: int = 6, steps: int = 2, arrive: int = 0) -> Case:
    return Case(
        name=name,
        model="llama-tiny",
        num_steps=steps,
        requests=(Request(id="a", prompt=(7, 19, 3), max_new_tokens=new, arrive=arrive),),
        engine=EngineSettings(sglang=SGLangSettings(max_total_tokens=512)),
    )


@pytest.mark.eagletwin(patches=[BAD])
def test_a_failure_does_not_cut_later_cases_short(eagletwin: Twin) -> None:
    for late in (0, 5):
        with pytest.raises(CaseFailed, match=r"draft\.proposal"):
            eagletwin.check(case("late", arrive=late))


@pytest.fixture
def checked_in_a_fixture(eagletwin: Twin) -> str:
    return eagletwin.check(case("fixture")).status


def test_a_fixture_runs_as_this_tests_marker_says_not_the_last_ones(checked_in_a_fixture: str) -> None:
    assert checked_in_a_fixture == "equal"


def test_a_case_for_something_is_not_known_from_one_for_nothing(eagletwin: Twin) -> None:
    plain = case("plain")
    assert eagletwin.check(plain).status == "equal"
    with pytest.raises(CaseFailed, match="which did not happen"):
        eagletwin.check(Case(**{**{f: getattr(plain, f) for f in plain.__struct_fields__}, "exercises": ("batch",)}))


def test_a_case_is_run_as_often_as_it_is_checked(eagletwin: Twin) -> None:
    before = eagletwin.ran
    for _ in range(3):
        eagletwin.check(case("again"))
    assert eagletwin.ran == before + 3


class Rung(Exception):
    """What a time limit of pytest raises, in the middle of anything."""


def test_who_stops_waiting_leaves_no_answer_for_the_next_case(eagletwin: Twin) -> None:
    def ring(*_: object) -> NoReturn:
        raise Rung

    eagletwin.check(case("warm"))
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    try:
        with pytest.raises(Rung):
            eagletwin.check(case("long", new=400))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    for name in ("one", "two"):
        assert eagletwin.check(case(name)).status == "equal"


@pytest.mark.long
def test_a_session_may_idle_and_pause_for_long(eagletwin: Twin) -> None:
    live = eagletwin.start(case("idle", new=1))
    for _ in range(40):
        live.step()
    live.step(events=(Event(at=0, kind="pause"),))
    for _ in range(40):
        live.step()
    assert live.finish().status == "equal"


@pytest.mark.long
def test_sessions_keep_their_engine_and_say_when_somebody_else_wants_it(eagletwin: Twin) -> None:
    live = eagletwin.start(case("open"))
    for call in (lambda: eagletwin.check(case("other")), lambda: eagletwin.start(case("second"))):
        with pytest.raises(InputError, match="a session is open on this engine"):
            call()
    for steps in range(3, 13):  # more configurations than engines stand at once
        eagletwin.check(case("elsewhere", steps=steps))
    with pytest.raises(InputError, match="the same id"):
        live.step(requests=(Request(id="a", prompt=(1,), max_new_tokens=1),))
    live.step()
    assert live.finish().status == "equal"
    with pytest.raises(InputError, match="the session is over"):
        live.finish()
    assert eagletwin.check(case("after")).status == "equal"


@pytest.mark.eagletwin(patches=[BAD])
def test_what_a_session_failed_on_can_be_concluded_while_it_is_open(
    eagletwin: Twin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eagletwin, "_out", tmp_path)
    live = eagletwin.start(case("failing"))
    live.step()
    with pytest.raises(CaseFailed, match=r"draft\.proposal") as failed:
        live.step()
    assert eagletwin.conclude(failed.value).verdict.status == "diverged"
