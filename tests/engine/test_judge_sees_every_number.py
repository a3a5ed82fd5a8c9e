"""Change one number of a real, correct trace, of one layer or several: the judge must find it, and name the rule."""

import msgspec
import pytest
import torch

from eagletwin.cases.ledger.multi_layer import ALL_LAYERS
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.records import COUNTS, UNSAID
from eagletwin.harness.core.trace import INNER, Trace
from eagletwin.harness.engines.host import Host
from eagletwin.harness.judge import compare, replay
from eagletwin.harness.judge.judge import judge
from eagletwin.harness.judge.rules import catalogue

from ..rows import spread
from .changes import (
    IDLE_IN_CHAINS,
    Change,
    bump,
    changed,
    first,
    flip,
    last_of,
    lengthen,
    nan,
    nudge,
    of_keys,
    of_values,
    shorten,
    without,
)

# Change one number of a real, correct trace: the judge must find it, and name the rule. A rule that cannot fail is useless.


# (stage, tensor, change, rule that must name it first)
PLANTED: list[tuple[str, str, Change, str]] = [
    ("target.extend", "input_ids", bump, "target.inputs"),
    ("target.extend", "positions", bump, "target.inputs"),
    ("target.extend", "slots", bump, "draft.slots"),
    ("draft.extend", "input_ids", bump, "draft.input_ids"),
    ("draft.extend", "input_ids", shorten, "draft.input_ids"),
    ("draft.extend", "positions", bump, "draft.positions"),
    ("draft.extend", "slots", bump, "draft.slots"),
    ("draft.extend", "hidden_in", nudge, "draft.hidden_in"),
    ("draft.extend", "hidden_in", nan, "draft.hidden_in"),
    ("prefill", "target_kv", of_keys(nudge), "target.kv"),
    ("prefill", "target_kv", of_values(nan), "target.kv"),
    ("prefill", "draft_kv", of_keys(nudge), "draft.kv"),
    ("prefill", "draft_kv", of_values(nudge), "draft.kv"),
    ("prefill", "proposal", bump, "draft.proposal"),
    ("prefill", "proposal_hidden", nudge, "draft.hidden_in"),
    ("prefill", "next_token", bump, "output.tokens"),
    ("draft.decode", "input_ids", bump, "draft.input_ids"),
    ("draft.decode", "positions", bump, "draft.positions"),
    ("draft.decode", "slots", bump, "draft.slots"),
    ("draft.decode", "hidden_in", nudge, "draft.hidden_in"),
    ("target.extend", "hidden_out", nudge, "target.hidden"),
    ("target.verify", "hidden_out", first, "target.hidden"),
    ("draft.decode", "hidden_out", nudge, "draft.proposal"),
    ("draft", "tokens", bump, "draft.proposal"),
    ("draft", "positions", bump, "tree.positions"),
    ("draft", "mask", flip, "tree.mask"),
    ("draft", "retrieve_index", bump, "tree.retrieve"),
    ("draft", "next_token", bump, "tree.retrieve"),
    ("draft", "next_sibling", bump, "tree.retrieve"),
    ("draft", "scratch_slots", bump, "draft.slots"),
    ("draft", "scratch_kv", of_keys(nudge), "draft.scratch_kv"),
    ("draft", "scratch_kv", of_values(nudge), "draft.scratch_kv"),
    ("target.verify", "input_ids", bump, "verify.inputs"),
    ("target.verify", "positions", bump, "verify.inputs"),
    ("target.verify", "slots", bump, "draft.slots"),
    ("verify", "predicted", bump, "verify.accept"),
    ("verify", "accept_index", bump, "verify.accept"),
    ("draft.extend_decode", "input_ids", bump, "draft.input_ids"),
    ("draft.extend_decode", "positions", bump, "draft.positions"),
    ("draft.extend_decode", "slots", bump, "draft.slots"),
    ("draft.extend_decode", "hidden_in", nudge, "draft.hidden_in"),
    ("extend", "target_kv", of_keys(nudge), "target.kv"),
    ("extend", "draft_kv", of_values(nudge), "draft.kv"),
    ("extend", "proposal", bump, "draft.proposal"),
    ("extend", "proposal_hidden", nudge, "draft.hidden_in"),
    ("finished", "tokens", bump, "output.tokens"),
    ("finished", "tokens", shorten, "output.tokens"),
    ("finished", "histogram", bump, "output.counts"),
    ("finished", "histogram", shorten, "output.counts"),
    ("finished", "decoded", bump, "output.stream"),
    ("finished", "sent", bump, "output.stream"),
    ("cached", "target_kv", of_keys(nudge), "target.kv"),
    ("cached", "draft_kv", of_values(nudge), "draft.kv"),
    ("iteration", "free", shorten, "pool.accounting"),
    ("flushed", "free", shorten, "pool.accounting"),
]

NUMBERS = [
    ("verify", "accept_len", "verify.accept"),
    ("verify", "bonus", "verify.accept"),
    ("verify", "seq_len", "verify.accept"),
    ("verify", "new_seq_len", "verify.accept"),
    ("draft", "seq_len", "verify.inputs"),
    ("finished", "finish", "output.finish"),
    ("finished", "finish_length", "output.finish"),
    ("finished", "prompt_tokens", "output.counts"),
    ("finished", "completion_tokens", "output.counts"),
    ("finished", "cached_tokens", "output.counts"),
    ("finished", "verify_ct", "output.counts"),
    ("finished", "correct_drafts", "output.counts"),
    ("finished", "retractions", "output.counts"),
    ("iteration", "available", "pool.accounting"),
    ("iteration", "evictable", "pool.accounting"),
    ("iteration", "total", "pool.accounting"),
]


def test_the_trace_itself_is_equal_and_no_rule_was_idle(busy_trace: Trace) -> None:
    verdict = judge(busy_trace)
    assert verdict.status == "equal", verdict
    # nothing befalls the busy case: test_scheduler.py has cases for that rule
    # the others: it drafts chains, with a single layer, no layer keeps a state, and all its requests are greedy
    idle = IDLE_IN_CHAINS
    idle += ("verify.coins", "verify.probabilities", "draft.probabilities", "state.", "target.state", "target.conv")
    idle += ("output.logprobs", "output.hidden", "output.plain", "output.grammar", "grammar.")  # nobody asks
    idle += ("steps.", "session.", "target.compressor")
    assert set(verdict.checked) == {rule for rule in catalogue() if not rule.startswith(idle)}
    assert verdict.ties == 0
    for feature in ("chunked_prefill", "batch", "batch_grows", "batch_shrinks", "radix_hit", "page_crossed_in_draft"):
        assert feature in verdict.exercised


@pytest.mark.parametrize(("stage", "tensor", "change", "rule"), PLANTED)
def test_one_changed_tensor_is_found_and_named(busy_trace: Trace, stage: str, tensor: str, change: Change, rule: str) -> None:
    number = last_of(busy_trace, stage, tensor)
    tensors = {**busy_trace.tensors, f"{number}.{tensor}": change(busy_trace.tensor(number, tensor))}
    verdict = judge(Trace(busy_trace.header, tensors))
    assert (verdict.status, verdict.rule) == ("diverged", rule), verdict
    assert verdict.first is not None
    record = busy_trace.header.records[number]
    if not (stage == "verify" and tensor == "predicted"):  # a wrong committed token is also the next round's bonus token
        assert verdict.first.request == record.request
        assert verdict.first.round == record.round


@pytest.mark.parametrize(
    ("stage", "tensor", "change"),
    [
        ("draft", "mask", lengthen),
        ("draft", "scratch_kv", lengthen),
        ("cached", "slots", shorten),
        ("cached", "target_kv", lengthen),
        ("draft.decode", "input_ids", lambda tensor: tensor[0]),  # of no dimension
    ],
)
def test_a_tensor_of_another_shape_is_never_equal(busy_trace: Trace, stage: str, tensor: str, change: Change) -> None:
    """Where the judge compares only as much of it as there must be, or cannot say how much there is."""
    number = last_of(busy_trace, stage, tensor)
    verdict = judge(changed(busy_trace, {f"{number}.{tensor}": change(busy_trace.tensor(number, tensor))}))
    assert verdict.status == ("diverged" if tensor == "mask" else "unknown"), verdict


def test_a_cached_path_that_lacks_an_emitted_token_is_found(busy_trace: Trace) -> None:
    """What a last round committed past the end may be missing from it, what was emitted may not."""
    numbers = {(record.request, record.stage): number for number, record in enumerate(busy_trace.header.records)}
    for request in busy_trace.header.case.requests:
        name, prompt = request.id, len(request.prompt)
        finished, cached = numbers[name, "finished"], numbers[name, "cached"]
        emitted, tokens = busy_trace.tensor(finished, "tokens"), busy_trace.tensor(cached, "tokens")
        whole = prompt + len(emitted)
        assert judge(changed(busy_trace, {f"{cached}.tokens": tokens[:whole]})).status == "equal"
        verdict = judge(changed(busy_trace, {f"{cached}.tokens": tokens[: whole - 1]}))
        assert (verdict.status, verdict.rule) == ("diverged", "draft.kv"), verdict
        assert verdict.first is not None
        assert (verdict.first.request, verdict.first.stage) == (name, "cached")


@pytest.mark.parametrize(("stage", "name", "rule"), NUMBERS)
def test_one_changed_number_is_found_and_named(busy_trace: Trace, stage: str, name: str, rule: str) -> None:
    number = last_of(busy_trace, stage)
    record = busy_trace.header.records[number]
    record = msgspec.structs.replace(record, numbers={**record.numbers, name: record.numbers[name] + 1})
    records = (*busy_trace.header.records[:number], record, *busy_trace.header.records[number + 1 :])
    verdict = judge(Trace(msgspec.structs.replace(busy_trace.header, records=records), busy_trace.tensors))
    assert (verdict.status, verdict.rule) == ("diverged", rule), verdict


@pytest.mark.parametrize(
    ("numbers", "tensors", "status", "unseen"),
    [
        (
            {"aborted": 0, "dropped": 0, "finish": 0, "finish_length": 14, "finish_matched": -1}
            | dict.fromkeys(COUNTS, UNSAID)
            | {"prompt_tokens": 19, "completion_tokens": 14, "retractions": 0},
            ("tokens", "decoded", "sent", "histogram"),
            "equal",
            {"output.counts": 3},
        ),
        ({"aborted": 0, "dropped": 0}, ("tokens", "decoded", "sent", "histogram"), "unknown", {}),
    ],
    ids=["a release that sends less", "a tap that stopped"],
)
def test_what_was_not_sent_is_unseen(
    busy_trace: Trace, numbers: dict[str, int], tensors: tuple[str, ...], status: str, unseen: dict[str, int]
) -> None:
    number = last_of(busy_trace, "finished")
    silent = msgspec.structs.replace(busy_trace.header.records[number], numbers=numbers, tensors=tensors)
    records = (*busy_trace.header.records[:number], silent, *busy_trace.header.records[number + 1 :])
    header = msgspec.structs.replace(busy_trace.header, records=records)
    verdict = judge(Trace(header, busy_trace.tensors))
    assert (verdict.status, verdict.unseen) == (status, unseen)


@pytest.mark.parametrize("stage", ["finished", "flushed", "draft", "verify", "extend", "iteration", "cached", *INNER])
def test_a_missing_record_is_never_equal(busy_trace: Trace, stage: str) -> None:
    number = last_of(busy_trace, stage)
    assert judge(without(busy_trace, lambda n, _: n == number)).status != "equal"


@pytest.mark.parametrize("stage", ["iteration", "cached", "batch", "prefill"])
def test_a_stage_that_was_not_recorded_at_all_is_never_equal(busy_trace: Trace, stage: str) -> None:
    assert judge(without(busy_trace, lambda _, record: record.stage == stage)).status != "equal"


def test_every_batch_must_say_who_owned_what(busy_trace: Trace) -> None:
    """Slots would be judged by the owners of another batch."""
    numbers = [number for number, record in enumerate(busy_trace.header.records) if record.stage == "batch"]
    for gone in (numbers[0], numbers[len(numbers) // 2], numbers[-1]):
        verdict = judge(without(busy_trace, lambda n, _, gone=gone: n == gone))  # type: ignore[misc]
        assert verdict.status == "unknown"
        assert "owners" in verdict.reason


def test_a_first_chunk_that_was_not_recorded_is_never_equal(busy_trace: Trace) -> None:
    first = ("target.extend", "draft.extend", "prefill")
    cut = without(busy_trace, lambda _, record: record.request == "a" and record.stage in first and record.step == 0)
    assert judge(cut).rule == "output.counts"  # what the prefix cache seems to have had is not what was counted
    verdict = judge(cut, frozenset({"output.counts"}))
    assert "was recorded" in verdict.reason or "chunk" in verdict.reason


def test_rows_that_were_not_recorded_are_never_equal(busy_trace: Trace) -> None:
    empty = {}
    for number, record in enumerate(busy_trace.header.records):
        if record.stage in ("prefill", "extend"):
            empty[f"{number}.draft_rows"] = busy_trace.tensor(number, "draft_rows")[:0]
            empty[f"{number}.draft_kv"] = busy_trace.tensor(number, "draft_kv")[:0]
    verdict = judge(Trace(busy_trace.header, {**busy_trace.tensors, **empty}))
    assert "not every row of the draft" in verdict.reason


def test_integers_recorded_as_floats_are_never_equal(busy_trace: Trace) -> None:
    number = last_of(busy_trace, "draft.extend", "input_ids")
    ids = busy_trace.tensor(number, "input_ids").double() + 0.9
    assert judge(Trace(busy_trace.header, {**busy_trace.tensors, f"{number}.input_ids": ids})).status != "equal"


def test_more_tokens_than_a_request_can_have_are_refused_before_the_reference_runs(busy_trace: Trace) -> None:
    number = last_of(busy_trace, "verify")
    endless = torch.zeros(10**6, dtype=torch.int64)
    changes = {f"{number}.predicted": endless, f"{number}.accept_index": endless}
    verdict = judge(Trace(busy_trace.header, {**busy_trace.tensors, **changes}))
    assert verdict.status == "unknown"
    assert "it can have" in verdict.reason


def test_a_slot_of_somebody_else_is_found(busy_trace: Trace) -> None:
    """Request and table agree on the slot, but another live request, or the prefix cache, owns it as well."""
    decodes = [n for n, record in enumerate(busy_trace.header.records) if record.stage == "draft.decode"]
    number = decodes[-1]
    slot = int(busy_trace.tensor(number, "slots")[0])
    batch = max(n for n, record in enumerate(busy_trace.header.records[:number]) if record.stage == "batch")
    names = busy_trace.header.records[batch].numbers
    other = next(index for name, index in names.items() if name != f"request.{busy_trace.header.records[number].request}")
    slots, owners = busy_trace.tensor(batch, "slots"), busy_trace.tensor(batch, "owners")
    changes = {
        f"{batch}.slots": torch.cat([slots, torch.tensor([slot], dtype=slots.dtype)]),
        f"{batch}.owners": torch.cat([owners, torch.tensor([other], dtype=owners.dtype)]),
    }
    assert judge(Trace(busy_trace.header, {**busy_trace.tensors, **changes})).rule == "draft.slots"
    cached = busy_trace.tensor(batch, "cached")
    cached = torch.cat([cached, torch.tensor([slot], dtype=cached.dtype)])
    assert judge(Trace(busy_trace.header, {**busy_trace.tensors, f"{batch}.cached": cached})).rule == "draft.slots"


def test_a_token_outside_the_vocabulary_is_a_divergence_and_not_a_crash(busy_trace: Trace) -> None:
    number = last_of(busy_trace, "extend")
    tensors = {**busy_trace.tensors, f"{number}.proposal": torch.tensor([10**6])}
    assert judge(Trace(busy_trace.header, tensors)).rule == "draft.proposal"


def test_a_case_that_does_not_reach_what_it_is_for_is_unknown(busy_trace: Trace) -> None:
    case = msgspec.structs.replace(busy_trace.header.case, exercises=("batch", "accept_all"))
    reached = judge(Trace(msgspec.structs.replace(busy_trace.header, case=case), busy_trace.tensors))
    assert reached.status == ("equal" if "accept_all" in reached.exercised else "unknown")
    idle = next(name for name in ("accept_all", "prompt_ends_in_page", "rejection") if name in reached.exercised)
    assert idle  # the case above must be able to reach something
    single = msgspec.structs.replace(case, num_steps=3, exercises=("chunk_tail_differs",))
    assert judge(Trace(msgspec.structs.replace(busy_trace.header, case=single), busy_trace.tensors)).status == "equal"


@pytest.mark.parametrize("fault", ["none", "hidden_in", "tokens"])
def test_a_verdict_does_not_depend_on_how_much_is_looked_at_together(
    busy_trace: Trace, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Rows that are compared one by one, and requests of which each has its own forwards: the same, to the last message."""
    changed = {"none": {}, "hidden_in": {"draft.extend": nan, "draft.decode": nudge}, "tokens": {"draft": bump}}[fault]
    tensors = dict(busy_trace.tensors)
    for stage, change in changed.items():
        number = last_of(busy_trace, stage, fault)
        tensors[f"{number}.{fault}"] = change(busy_trace.tensor(number, fault))
    together = judge(Trace(busy_trace.header, tensors))
    monkeypatch.setattr(compare, "_WAITING", 0)
    monkeypatch.setattr(replay, "_TOGETHER", 0)
    alone = judge(Trace(busy_trace.header, tensors))
    assert together.status == ("diverged" if changed else "equal")
    assert alone.headroom == pytest.approx(together.headroom, rel=1e-6)
    assert msgspec.structs.replace(alone, headroom=together.headroom) == together


# Change one number of a real, correct trace of a multi-layer draft: the judge must find it, and name rule and layer.


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
