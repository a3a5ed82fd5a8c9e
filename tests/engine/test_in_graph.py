"""What a CUDA graph hides, on a trace without a graph: the records of draft decode are taken out, as a graph would have it."""

from collections.abc import Callable

import torch
from msgspec.structs import replace

from eagletwin.harness.core.records import Record
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.judge.judge import judge

_HIDDEN = ("draft.positions", "draft.hidden_in", "draft.slots")


def in_a_graph(trace: Trace, device: str = "cuda", keep: Callable[[str], bool] = lambda name: True) -> Trace:
    """The same trace, as the CUDA engine would have left it; of a tree's tensors in draft(), those that `keep` names."""
    consumed: dict[tuple[str, int], list[torch.Tensor]] = {}
    records: list[Record] = []
    tensors: dict[str, torch.Tensor] = {}
    for number, record in enumerate(trace.header.records):
        if record.stage == "draft.decode":
            key = (record.request, record.round)
            consumed.setdefault(key, []).append(trace.tensor(number, "input_ids"))
            continue
        mine = {name: trace.tensor(number, name) for name in record.tensors}
        if record.stage == "draft":
            if trace.header.case.topk > 1:
                mine["consumed"] = torch.cat(consumed[record.request, record.round])
            mine = {name: tensor for name, tensor in mine.items() if keep(name)}
            record = replace(record, numbers=record.numbers | {"in_graph": 1}, tensors=tuple(mine))
        tensors |= {f"{len(records)}.{name}": tensor for name, tensor in mine.items()}
        records.append(record)
    engine = replace(trace.header.engine, device=device)
    return Trace(replace(trace.header, records=tuple(records), engine=engine), tensors)


def rounds(trace: Trace) -> int:
    return sum(record.stage == "draft" for record in trace.header.records)


def test_a_chain_is_judged_by_what_is_left_and_says_what_it_did_not_see(busy_trace: Trace) -> None:
    verdict = judge(in_a_graph(busy_trace))
    steps = rounds(busy_trace) * (busy_trace.header.case.num_steps - 1)
    assert verdict.status == "equal"
    assert verdict.unseen == dict.fromkeys((*_HIDDEN, "draft.input_ids"), steps)


def test_the_tokens_of_a_trees_frontiers_are_seen(tree_trace: Trace) -> None:
    trace = in_a_graph(tree_trace)
    verdict = judge(trace)
    assert verdict.status == "equal"
    assert set(verdict.unseen) == set(_HIDDEN)
    number = next(n for n, record in enumerate(trace.header.records) if record.stage == "draft")
    trace.tensors[f"{number}.consumed"] = trace.tensor(number, "consumed") + 1
    assert judge(trace).status == "diverged"


def test_a_wrong_row_shows_without_the_inputs_that_led_to_it(busy_trace: Trace) -> None:
    trace = in_a_graph(busy_trace)
    number = next(n for n, record in enumerate(trace.header.records) if record.stage == "draft")
    trace.tensors[f"{number}.scratch_kv"] = trace.tensor(number, "scratch_kv") + 0.1
    assert judge(trace).rule == "draft.scratch_kv"


def test_a_graph_excuses_nothing_else(busy_trace: Trace, tree_trace: Trace) -> None:
    assert "on a CPU" in judge(in_a_graph(busy_trace, device="cpu")).reason
    without = in_a_graph(tree_trace, keep=lambda name: name != "candidate_tokens")
    assert judge(without).status == "unknown"
    without = in_a_graph(tree_trace, keep=lambda name: name != "consumed")
    assert judge(without).status == "unknown"


def test_rows_stand_in_for_what_a_graph_hides_and_the_share_says_what_is_left(busy_trace: Trace) -> None:
    verdict = judge(in_a_graph(busy_trace))
    assert verdict.gap == ""
    for share in verdict.shares.values():
        assert (share.rounds, share.rows, share.never) == (share.rounds_compared, share.rows_compared, ())
    first = verdict.shares[busy_trace.header.case.requests[0].id]
    assert first.rounds == sum(
        record.stage == "verify" and record.request == busy_trace.header.case.requests[0].id
        for record in busy_trace.header.records
    )


def test_a_tree_whose_branches_change_parent_names_the_view(tree_trace: Trace) -> None:
    verdict = judge(tree_trace)
    assert "branch_changes_parent" in verdict.exercised
    assert [(excuse.kind, excuse.view) for excuse in verdict.excuses] == [("view", "slot_layout")]
