"""The overlap scheduler on a CPU, where SGLang turns it off: a batch is launched before the last one is looked at."""

from pathlib import Path

from eagletwin.harness.case import Case, Event, Request
from eagletwin.harness.engines.mode import Mode
from eagletwin.harness.engines.process import Host
from eagletwin.harness.judge import judge


def test_a_round_that_nobody_waits_for_is_recorded_and_judged(tmp_path: Path) -> None:
    prompts = {"a": (3, 5, 9, 11), "b": (13, 5, 9, 11)}
    case = Case(
        name="overlap",
        model="llama-tiny",
        num_steps=3,
        requests=tuple(Request(id=name, prompt=prompt, max_new_tokens=9) for name, prompt in prompts.items()),
        events=(Event(at=4, kind="retract"), Event(at=6, kind="abort", request="a")),
    )
    with Host(mode=Mode(overlap=True)) as host:
        trace = host.engine(case).run(case, tmp_path)
    assert trace.header.engine.overlap
    assert judge(trace).status == "equal"
