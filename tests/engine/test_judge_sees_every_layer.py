"""Change one number of a real, correct trace of a multi-layer draft: the judge must find it, and name rule and layer."""

import msgspec
import pytest

from eagletwin.cases.ledger.multi_layer_chunk_tail import ALL_LAYERS
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.trace import INNER, Trace
from eagletwin.harness.engines.host import Host
from eagletwin.harness.judge.judge import judge

from ..rows import spread
from .changes import Change, bump, nan, nudge, of_keys, of_values, shorten, without

# (stage, tensor, change, rule that must name it first); of the tensor's own layer, or of the layer's part of it
INNER_CHANGES: list[tuple[str, str, Change, str]] = [
    (stage, tensor, change, rule)
    for stage in ("draft.extend", "draft.extend_decode")
    for tensor, change, rule in (
        ("input_ids", bump, "draft.input_ids"),
        ("input_ids", shorten, "draft.input_ids"),
        ("positions", bump, "draft.positions"),
        ("slots", bump, "draft.slots"),
        ("hidden_in", nudge, "draft.hidden_in"),
        ("hidden_in", nan, "draft.hidden_in"),
    )
]
STORED: list[tuple[str, str, Change]] = [
    (stage, f"{part}_kv", change)
    for stage in ("prefill", "extend", "cached")
    for part in ("draft", "draft1", "draft2")
    for change in (of_keys(nudge), of_values(nan))
]


@pytest.fixture(scope="module", params=["llama-mtp", "llama-mtp-chain"])
def trace(host: Host, busy_case: Case, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Trace:
    case = msgspec.structs.replace(busy_case, model=request.param)
    return host.engine(case, (ALL_LAYERS,)).run(case, tmp_path_factory.mktemp("busy"))


def _last(trace: Trace, stage: str, layer: int = 0, tensor: str = "") -> int:
    records = enumerate(trace.header.records)
    found = [n for n, record in records if (record.stage, record.layer) == (stage, layer)]
    return [n for n in found if not tensor or (f"{n}.{tensor}" in trace.tensors and trace.tensor(n, tensor).numel())][-1]


def _changed(trace: Trace, number: int, tensor: str, change: Change) -> Trace:
    return Trace(trace.header, {**trace.tensors, f"{number}.{tensor}": change(trace.tensor(number, tensor))})


def test_the_trace_itself_is_equal(trace: Trace) -> None:
    verdict = judge(trace)
    assert verdict.status == "equal", verdict
    assert verdict.checked["draft.runner"] == verdict.checked["draft.positions"]
    for feature in ("chunked_prefill", "batch", "batch_grows", "radix_hit", "look_ahead_rejected"):
        assert feature in verdict.exercised


@pytest.mark.parametrize("layer", spread([0, 1, 2]))
@pytest.mark.parametrize(("stage", "tensor", "change", "rule"), INNER_CHANGES)
def test_a_changed_input_of_a_layer_is_found_and_named(
    trace: Trace, stage: str, tensor: str, change: Change, rule: str, layer: int
) -> None:
    verdict = judge(_changed(trace, _last(trace, stage, layer), tensor, change))
    assert (verdict.status, verdict.rule) == ("diverged", rule), verdict
    assert verdict.first is not None
    assert verdict.first.layer == layer


@pytest.mark.parametrize(("stage", "tensor", "change"), STORED)
def test_a_changed_row_of_a_layer_is_found_and_named(trace: Trace, stage: str, tensor: str, change: Change) -> None:
    verdict = judge(_changed(trace, _last(trace, stage, 0, tensor), tensor, change))
    assert (verdict.status, verdict.rule) == ("diverged", "draft.kv"), verdict
    assert verdict.first is not None
    assert verdict.first.layer == int(tensor[5]) if tensor[5].isdigit() else not verdict.first.layer


def test_a_changed_proposal_of_the_last_layer_is_found(trace: Trace) -> None:
    verdict = judge(_changed(trace, _last(trace, "extend"), "proposal", bump))
    assert (verdict.status, verdict.rule) == ("diverged", "draft.proposal"), verdict
    assert verdict.first is not None
    assert verdict.first.layer == 2


@pytest.mark.parametrize("name", ["attention", "kv_pool", "req_pool"])
def test_a_forward_with_another_layers_pools_is_found(trace: Trace, name: str) -> None:
    number = _last(trace, "draft.extend_decode", 1)
    record = trace.header.records[number]
    record = msgspec.structs.replace(record, numbers={**record.numbers, name: 0})
    records = (*trace.header.records[:number], record, *trace.header.records[number + 1 :])
    verdict = judge(Trace(msgspec.structs.replace(trace.header, records=records), trace.tensors))
    assert (verdict.status, verdict.rule) == ("diverged", "draft.runner"), verdict


@pytest.mark.parametrize("stage", ["draft.extend", "draft.extend_decode"])
def test_a_layer_that_was_not_recorded_is_no_pass(trace: Trace, stage: str) -> None:
    number = _last(trace, stage, 2)
    verdict = judge(without(trace, lambda n, _: n == number))
    assert verdict.status == "unknown"
    assert "not complete" in verdict.reason


def test_proposals_of_fewer_layers_are_no_pass(trace: Trace) -> None:
    assert judge(_changed(trace, _last(trace, "extend"), "proposal", shorten)).status != "equal"


def test_stored_rows_show_a_fault_where_nothing_inside_a_forward_is_seen(host: Host, busy_case: Case, tmp_path_factory) -> None:  # type: ignore[no-untyped-def]
    """As under a replayed CUDA graph: the live chunk tail, by the boundary records alone."""
    case = msgspec.structs.replace(busy_case, model="llama-mtp")
    live = host.engine(case).run(case, tmp_path_factory.mktemp("live"))
    boundary = without(live, lambda _, record: record.stage in INNER)
    header = msgspec.structs.replace(boundary.header, inner=False)
    verdict = judge(Trace(header, boundary.tensors))
    assert (verdict.status, verdict.rule) == ("diverged", "draft.kv"), verdict
