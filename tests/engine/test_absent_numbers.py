"""Leave one number out of a real, correct trace: the judge must never say `equal`. What is absent is a tap that stopped."""

from collections.abc import Iterator

import pytest
from msgspec.structs import replace

from eagletwin.harness.core.case import Adaptive, Case, EngineSettings, Event, Tier
from eagletwin.harness.core.records import COUNTS, UNSAID
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.engines.host import Host
from eagletwin.harness.judge.judge import judge

from ..rows import spread

TRACES = ("busy_trace", "tree_trace", "sampled_trace", "states_trace")
# What the busy case is changed to, for stages and numbers that it does not have.
SETTINGS: dict[str, dict[str, object]] = {
    "host's pages": {"host_pages": 64},
    "adaptive": {"adaptive": Adaptive(tiers=(Tier(batch=1, steps=(1, 3)),), interval=1, warmup=0)},
    "mixed chunks": {"mixed_chunks": True},
}


def _without_each(trace: Trace) -> Iterator[tuple[str, str, Trace]]:
    """Stage, name, and the trace without that number: in the last record that has it, and in all."""
    records = trace.header.records
    for stage, name in sorted({(record.stage, name) for record in records for name in record.numbers}):
        of_it = [n for n, record in enumerate(records) if record.stage == stage and name in record.numbers]
        for gone in (of_it, of_it[-1:]):
            left = tuple(
                replace(record, numbers={key: value for key, value in record.numbers.items() if key != name})
                if n in gone
                else record
                for n, record in enumerate(records)
            )
            yield stage, name, Trace(replace(trace.header, records=left), trace.tensors)


def _equal_without(trace: Trace) -> list[tuple[str, str]]:
    assert judge(trace).status == "equal", judge(trace)
    return [(stage, name) for stage, name, left in _without_each(trace) if judge(left).status == "equal"]


@pytest.mark.parametrize("fixture", TRACES)
def test_no_trace_is_equal_without_one_of_its_numbers(request: pytest.FixtureRequest, fixture: str) -> None:
    assert _equal_without(request.getfixturevalue(fixture)) == []


@pytest.mark.parametrize(
    "changed", spread([*SETTINGS, "windows", "an abort in a step"], lambda changed: changed in ("windows", "adaptive"))
)
def test_nor_where_there_are_more_of_them(
    host: Host, busy_case: Case, tmp_path_factory: pytest.TempPathFactory, changed: str
) -> None:
    settings = busy_case.engine.sglang
    if changed == "windows":
        sizes = EngineSettings(sglang=replace(settings, max_total_tokens=1024))
        case = replace(busy_case, model="mimo-v2-window", chunked_prefill_size=512, engine=sizes)
    elif changed == "an abort in a step":
        case = replace(busy_case, events=(Event(at=0, kind="abort", request="a", step=4),))
    else:
        case = replace(busy_case, engine=EngineSettings(sglang=replace(settings, **SETTINGS[changed])))
    assert _equal_without(host.engine(case).run(case, tmp_path_factory.mktemp("more"))) == []


def test_a_trace_of_an_older_schema_is_judged_without(busy_trace: Trace) -> None:
    old = {"in_graph", "dropped", *COUNTS}
    records = tuple(
        replace(record, numbers={name: value for name, value in record.numbers.items() if name not in old})
        for record in busy_trace.header.records
    )
    verdict = judge(Trace(replace(busy_trace.header, schema=4, records=records), busy_trace.tensors))
    assert verdict.status == "equal", verdict


def test_what_a_message_of_this_sglang_does_not_count_is_not_compared(busy_trace: Trace) -> None:
    records = tuple(
        replace(record, numbers=record.numbers | {"retractions": UNSAID}) if record.stage == "finished" else record
        for record in busy_trace.header.records
    )
    verdict = judge(Trace(replace(busy_trace.header, records=records), busy_trace.tensors))
    assert (verdict.status, verdict.unseen["output.counts"]) == ("equal", 2)
