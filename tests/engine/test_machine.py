"""The scheduler played by hand: what a state machine does step by step is judged at each step, and is a case in the end."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from eagletwin.cases.machine import machine
from eagletwin.cases.strategies import Focus
from eagletwin.harness.check.confirm import check
from eagletwin.harness.core.case import Case, EngineSettings, Event, Request, SGLangSettings
from eagletwin.harness.testing.twin import CaseFailed, Twin

from ..rows import long

QUICK = settings(
    max_examples=6,
    stateful_step_count=12,
    deadline=None,
    database=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=list(HealthCheck),
    report_multiple_bugs=False,
    print_blob=False,
)
TIGHT = Focus(num_steps=3, page_size=4, radix_cache=True, max_total_tokens=96)


TREES = Focus(num_steps=3, topk=3, tree_size=2, page_size=4, radix_cache=True, max_total_tokens=96)


@pytest.mark.parametrize("focus", [*long(Focus(num_steps=2)), TIGHT, *long(TREES)], ids=["plain", "tight", "trees"])
def test_the_unmodified_release_is_equal_at_every_step(eagletwin: Twin, focus: Focus) -> None:
    played = machine(eagletwin.start, focus)
    seed(1)(played)
    run_state_machine_as_test(played, settings=QUICK)  # type: ignore[no-untyped-call]


@pytest.mark.eagletwin(revert=[26329])
def test_the_machine_finds_a_reverted_fix(eagletwin: Twin) -> None:
    played = machine(eagletwin.start, Focus(num_steps=2))
    seed(1)(played)
    with pytest.raises(CaseFailed, match=r"draft\.input_ids") as failed:
        run_state_machine_as_test(played, settings=settings(QUICK, phases=(Phase.generate,)))  # type: ignore[no-untyped-call]
    trial = failed.value.trial
    # what was played is a case like any other, and shows the same when it is run as one
    with pytest.raises(CaseFailed, match=r"draft\.input_ids"):
        eagletwin.check(trial.case)


def test_what_was_played_runs_again_as_a_case(eagletwin: Twin, tmp_path: Path) -> None:
    case = Case(
        name="played",
        model="llama-tiny",
        num_steps=3,
        page_size=4,
        chunked_prefill_size=8,
        requests=(Request(id="a", prompt=tuple(range(3, 22)), max_new_tokens=9),),
        engine=EngineSettings(sglang=SGLangSettings(radix_cache=True, max_total_tokens=256)),
    )
    live = eagletwin.start(case)
    live.step(chunk=4)
    live.step(requests=(Request(id="b", prompt=tuple(range(3, 15)), max_new_tokens=6),))
    live.step(chunk=4)
    live.step(events=(Event(at=0, kind="retract"),))
    live.step(events=(Event(at=0, kind="pause"),))
    live.step(events=(Event(at=0, kind="flush"),))
    live.step(events=(Event(at=0, kind="resume"),))
    for _ in range(4):
        live.step()
    live.step(events=(Event(at=0, kind="abort", request="a"),))
    verdict = live.finish()
    trace = live.trace
    live.close()
    assert verdict.status == "equal"
    assert {"retraction", "chunked_prefill", "batch"} <= set(verdict.exercised)
    engine = eagletwin.host.engine(live.case)
    again = check(engine, live.case, tmp_path)
    # the same in every number; only the session waited longer before it was ended
    theirs = {record.key: number for number, record in enumerate(again.trace.header.records) if record.request}
    compared = 0
    for number, record in enumerate(trace.header.records):
        if record.request and record.stage != "cached":
            other = theirs[record.key]
            assert again.trace.header.records[other] == record
            for name in record.tensors:
                assert again.trace.tensor(other, name).equal(trace.tensor(number, name))
                compared += 1
    assert compared > 50
