"""Change one number of a real, correct trace of draft trees, or plant that of another request: the judge must name it."""

from itertools import product
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.check.argument import argue
from eagletwin.harness.core.records import KEY_POISON, VALUE_POISON, Key
from eagletwin.harness.core.trace import INNER, Trace
from eagletwin.harness.engines.host import Host
from eagletwin.harness.judge import compare, provenance, replay
from eagletwin.harness.judge.judge import judge
from eagletwin.harness.judge.provenance import NOBODYS, Provenance, find_provenance, rejudge_with_context
from eagletwin.harness.judge.replay import RequestReplay, replay_requests
from eagletwin.harness.judge.rules import catalogue
from eagletwin.harness.page.run import run_page

from .changes import (
    Change,
    bump,
    changed,
    every,
    first,
    flip,
    last_of,
    nan,
    nudge,
    of_keys,
    of_values,
    percent,
    shorten,
    without,
)

# Change one number of a real, correct trace of draft trees: the judge must find it and name the rule, as for chains.


# (stage, tensor) -> change, and the rules that may name it first, whichever record it was
CHANGES: dict[tuple[str, str], tuple[Change, set[str]]] = {
    ("target.extend", "input_ids"): (bump, {"target.inputs"}),
    ("target.extend", "positions"): (bump, {"target.inputs"}),
    ("target.extend", "slots"): (bump, {"draft.slots"}),
    ("target.extend", "hidden_out"): (nudge, {"target.hidden"}),
    ("draft.extend", "input_ids"): (bump, {"draft.input_ids"}),
    ("draft.extend", "positions"): (bump, {"draft.positions"}),
    ("draft.extend", "slots"): (bump, {"draft.slots"}),
    ("draft.extend", "hidden_in"): (nudge, {"draft.hidden_in"}),
    ("prefill", "table"): (bump, {"draft.slots"}),
    ("prefill", "target_rows"): (bump, {"target.kv"}),
    ("prefill", "target_kv"): (nudge, {"target.kv"}),
    ("prefill", "draft_rows"): (bump, {"draft.kv"}),
    ("prefill", "draft_kv"): (nudge, {"draft.kv"}),
    ("prefill", "next_token"): (bump, {"output.tokens"}),
    ("prefill", "proposal"): (bump, {"draft.proposal"}),
    ("prefill", "proposal_hidden"): (nudge, {"draft.hidden_in"}),
    ("prefill", "proposal_probabilities"): (percent, {"draft.proposal"}),
    # a token that the verify tree shows must be that one; of any other, what the row before it proposed
    ("draft.decode", "input_ids"): (bump, {"draft.input_ids", "draft.proposal"}),
    ("draft.decode", "positions"): (bump, {"draft.positions"}),
    ("draft.decode", "slots"): (bump, {"draft.slots"}),
    ("draft.decode", "hidden_in"): (nudge, {"draft.hidden_in"}),
    ("draft.decode", "hidden_out"): (nudge, {"draft.proposal"}),
    ("draft", "tokens"): (bump, {"tree.tokens"}),
    ("draft", "candidate_tokens"): (bump, {"draft.proposal"}),
    ("draft", "candidate_scores"): (percent, {"draft.proposal"}),
    ("draft", "expanded"): (bump, {"tree.parents"}),
    ("draft", "selected"): (bump, {"tree.tokens"}),
    ("draft", "positions"): (bump, {"tree.positions"}),
    ("draft", "mask"): (flip, {"tree.mask"}),
    ("draft", "retrieve_index"): (bump, {"tree.retrieve"}),
    ("draft", "next_token"): (bump, {"tree.retrieve"}),
    ("draft", "next_sibling"): (bump, {"tree.retrieve"}),
    ("draft", "scratch_slots"): (bump, {"draft.slots"}),
    ("draft", "scratch_kv"): (nudge, {"draft.scratch_kv"}),
    ("draft", "hole_kv"): (nudge, {"draft.scratch_kv"}),
    ("target.verify", "input_ids"): (bump, {"verify.inputs"}),
    ("target.verify", "positions"): (bump, {"verify.inputs"}),
    ("target.verify", "slots"): (bump, {"draft.slots"}),
    ("target.verify", "hidden_out"): (first, {"target.hidden"}),  # of rejected nodes it is garbage; node 0 is never rejected
    ("verify", "predicted"): (bump, {"commit.path"}),
    # another node was accepted than the one that the target's argmax leads to, or than the one that was moved
    ("verify", "accept_index"): (bump, {"verify.accept", "target.hidden", "commit.path"}),
    ("verify", "path_hidden"): (nudge, {"commit.path"}),
    ("draft.extend_decode", "input_ids"): (bump, {"draft.input_ids"}),
    ("draft.extend_decode", "positions"): (bump, {"draft.positions"}),
    ("draft.extend_decode", "slots"): (bump, {"draft.slots"}),
    ("draft.extend_decode", "hidden_in"): (nudge, {"draft.hidden_in"}),
    ("extend", "target_rows"): (bump, {"commit.path", "target.kv"}),
    ("extend", "target_kv"): (nudge, {"commit.path"}),
    ("extend", "draft_rows"): (bump, {"draft.kv"}),
    ("extend", "draft_kv"): (nudge, {"draft.kv"}),
    ("extend", "proposal"): (bump, {"draft.proposal"}),
    ("extend", "proposal_hidden"): (nudge, {"draft.hidden_in"}),
    ("extend", "proposal_probabilities"): (percent, {"draft.proposal"}),
    ("finished", "tokens"): (bump, {"output.tokens"}),
    ("finished", "histogram"): (bump, {"output.counts"}),
    ("finished", "decoded"): (bump, {"output.stream"}),
    ("finished", "sent"): (bump, {"output.stream"}),
    ("cached", "tokens"): (bump, {"draft.kv"}),
    ("cached", "target_kv"): (nudge, {"target.kv"}),
    ("cached", "draft_kv"): (nudge, {"draft.kv"}),
    ("iteration", "free"): (bump, {"pool.accounting"}),
    ("iteration", "cached"): (bump, {"pool.accounting"}),
    ("iteration", "held"): (bump, {"pool.accounting"}),
    ("flushed", "free"): (bump, {"pool.accounting"}),
}

# What says who owns a slot, and where rows lie: it is what other tensors are judged by, and only some entries are looked up.
OWNERS = {
    ("batch", "slots"),
    ("batch", "owners"),
    ("batch", "cached"),
    ("draft", "table"),
    ("extend", "table"),
    ("cached", "slots"),
}


def test_the_trace_itself_is_equal_and_no_rule_was_idle(tree_trace: Trace) -> None:
    verdict = judge(tree_trace)
    assert verdict.status == "equal", verdict
    # the others: it has a single layer, no layer keeps a state, and all its requests are greedy
    idle = (
        "engine.",
        "kernel.",
        "race.",
        "ranks.",
        "schedule.",
        "window.",
        "draft.runner",
        "target.selection",
        "draft.selection",
    )
    idle += ("verify.coins", "verify.probabilities", "draft.probabilities", "state.", "target.state", "target.conv")
    idle += ("output.logprobs", "output.hidden", "output.plain", "output.grammar", "grammar.")  # nobody asks
    idle += ("steps.", "session.", "target.compressor")
    assert set(verdict.checked) == {rule for rule in catalogue() if not rule.startswith(idle)}
    assert verdict.ties == 0
    for feature in ("path_not_in_front", "branch_changes_parent", "branch_holes", "chunked_prefill", "radix_hit", "batch"):
        assert feature in verdict.exercised
    assert {"batch_grows", "batch_shrinks", "page_crossed_in_draft", "accept_all", "rejection"} <= set(verdict.exercised)


def test_a_node_does_not_attend_to_its_own_parent_in_this_release(tree_trace: Trace) -> None:
    """Keys lie by branch number (PR #8409, never merged): held to the true tree, the same trace diverges."""
    verdict = judge(tree_trace, view="true_tree")
    assert (verdict.status, verdict.rule) == ("diverged", "draft.proposal")
    assert verdict.first is not None
    assert verdict.first.step >= 2  # up to the second step a branch is its own parent


def test_nothing_of_the_trace_is_left_unchanged_by_these_tests(tree_trace: Trace) -> None:
    recorded = {(record.stage, name) for record in tree_trace.header.records for name in record.tensors}
    empty = {pair for pair in recorded if not every(tree_trace, *pair)}
    assert recorded - OWNERS - empty == set(CHANGES)


@pytest.mark.parametrize(("stage", "tensor"), sorted(CHANGES))
def test_a_changed_tensor_of_the_first_and_the_last_record_is_found_and_named(
    tree_trace: Trace, stage: str, tensor: str
) -> None:
    change, rules = CHANGES[stage, tensor]
    changes = [of_keys(change), of_values(change)] if tensor.endswith("_kv") else [change]
    records = every(tree_trace, stage, tensor)
    for number, change in product(sorted({records[0], records[-1]}), changes):
        verdict = judge(changed(tree_trace, {f"{number}.{tensor}": change(tree_trace.tensor(number, tensor))}))
        assert verdict.status == "diverged", (number, verdict)
        assert verdict.rule in rules, (number, verdict)
        assert verdict.first is not None
        record = tree_trace.header.records[number]
        if tensor not in (
            "predicted",
            "held",
        ):  # a wrong committed token is also the next round's; a slot may have another owner
            assert (verdict.first.request, verdict.first.round) == (record.request, record.round), (number, verdict)


@pytest.mark.parametrize("round", [0, 1, 2])
def test_the_token_of_each_candidate_is_compared_also_where_it_went_on(tree_trace: Trace, round: int) -> None:
    number = number_of(tree_trace, "a", round, "draft")
    tokens = tree_trace.tensor(number, "candidate_tokens")
    for candidate in range(len(tokens)):
        wrong = tokens.clone()
        wrong[candidate] += 1
        verdict = judge(changed(tree_trace, {f"{number}.candidate_tokens": wrong}))
        assert (verdict.status, verdict.rule) == ("diverged", "draft.proposal"), (candidate, verdict)


@pytest.mark.parametrize("stage", ["finished", "flushed", "draft", "verify", "extend", "iteration", "cached", *INNER])
def test_a_missing_record_is_never_equal(tree_trace: Trace, stage: str) -> None:
    number = last_of(tree_trace, stage)
    assert judge(without(tree_trace, lambda n, _: n == number)).status != "equal"


# what a last round committed past the end may be missing from cached tokens (test_judge_sees_every_number.py cuts off more)
@pytest.mark.parametrize(("stage", "tensor"), sorted(set(CHANGES) - {("cached", "tokens")}))
def test_a_missing_or_shortened_tensor_is_never_equal(tree_trace: Trace, stage: str, tensor: str) -> None:
    number = every(tree_trace, stage, tensor)[0]
    short = shorten(tree_trace.tensor(number, tensor))
    assert judge(changed(tree_trace, {f"{number}.{tensor}": short})).status != "equal"
    record = tree_trace.header.records[number]
    gone = msgspec.structs.replace(record, tensors=tuple(name for name in record.tensors if name != tensor))
    records = (*tree_trace.header.records[:number], gone, *tree_trace.header.records[number + 1 :])
    tensors = {name: value for name, value in tree_trace.tensors.items() if name != f"{number}.{tensor}"}
    assert judge(Trace(msgspec.structs.replace(tree_trace.header, records=records), tensors)).status != "equal"


@pytest.mark.parametrize(
    ("stage", "names"),
    [
        ("draft", ("hole_kv",)),
        ("verify", ("path_hidden",)),
        ("extend", ("proposal_probabilities",)),
        ("prefill", ("proposal_probabilities",)),
    ],
)
def test_a_tree_of_which_a_part_was_never_recorded_is_never_equal(
    tree_trace: Trace, stage: str, names: tuple[str, ...]
) -> None:
    """A tap that stopped recording, in every round: nothing is left to compare, and nothing may pass."""
    records = tuple(
        msgspec.structs.replace(record, tensors=tuple(name for name in record.tensors if name not in names))
        if record.stage == stage
        else record
        for record in tree_trace.header.records
    )
    kept = {f"{n}.{name}" for n, record in enumerate(records) for name in record.tensors}
    tensors = {name: value for name, value in tree_trace.tensors.items() if name in kept}
    verdict = judge(Trace(msgspec.structs.replace(tree_trace.header, records=records), tensors))
    assert verdict.status == "unknown"
    assert names[0] in verdict.reason


def number_of(trace: Trace, request: str, round: int, stage: str, step: int = 0) -> int:
    keys = [record.key[:4] for record in trace.header.records]
    return keys.index((request, round, stage, step))


def story_of(trace: Trace) -> RequestReplay:
    return replay_requests(trace, "slot_layout")["a"]


def frontier(trace: Trace, round: int, step: int, candidates: list[int]) -> Trace:
    """The trace if the frontier of this step had been these candidates, with the tokens that their rows propose."""
    topk, number = trace.header.case.topk, number_of(trace, "a", round, "draft")
    expanded = trace.tensor(number, "expanded").clone()
    expanded[(step - 1) * topk : step * topk] = torch.tensor(candidates)
    tokens = story_of(trace).choices[round].tokens
    consumed = torch.tensor([tokens[candidate] if 0 <= candidate < len(tokens) else 0 for candidate in candidates])
    decode = number_of(trace, "a", round, "draft.decode", step)
    return changed(trace, {f"{number}.expanded": expanded, f"{decode}.input_ids": consumed})


def selection(trace: Trace, round: int, candidates: list[int]) -> Trace:
    """The trace if these had been selected, with their tokens in the tree."""
    number, tokens = number_of(trace, "a", round, "draft"), story_of(trace).choices[round].tokens
    drafted = [tokens[candidate] if 0 <= candidate < len(tokens) else 0 for candidate in candidates]
    nodes = torch.tensor([int(trace.tensor(number, "tokens")[0]), *drafted])
    return changed(trace, {f"{number}.selected": torch.tensor(candidates), f"{number}.tokens": nodes})


@pytest.mark.parametrize("round", [0, 1, 2])
@pytest.mark.parametrize("step", [2, 3])
def test_a_frontier_that_is_none_is_a_divergence_and_not_a_crash(tree_trace: Trace, round: int, step: int) -> None:
    last = story_of(tree_trace).rounds[round].expanded[(step - 1) * 3 : step * 3]
    of_the_depth_before = 0
    for wrong in (
        [last[0], last[1], 10**6],
        [last[0], -5, last[2]],
        [last[0], last[0], last[1]],
        [of_the_depth_before, *last[1:]],
    ):
        verdict = judge(frontier(tree_trace, round, step, wrong))
        assert verdict.status == "diverged", (wrong, verdict)
        assert verdict.rule in ("tree.parents", "draft.input_ids", "draft.hidden_in", "draft.proposal"), (wrong, verdict)


def test_of_frontiers_alone_the_rule_is_tree_parents(tree_trace: Trace) -> None:
    """With the hidden states that such a frontier would have brought, what is left to be wrong is the choice itself."""
    blind = frozenset({"draft.hidden_in", "draft.input_ids", "draft.scratch_kv", "draft.proposal"})
    best = story_of(tree_trace).rounds[0].expanded[3:6]
    for wrong in (best[::-1], [best[0], best[0], best[1]], [best[0], best[1], 10**6], [best[0], 0, best[2]]):
        verdict = judge(frontier(tree_trace, 0, 2, wrong), blind)
        assert (verdict.status, verdict.rule) == ("diverged", "tree.parents"), (wrong, verdict)


def test_a_first_frontier_in_another_order_is_found(tree_trace: Trace) -> None:
    blind = frozenset({"draft.hidden_in", "draft.input_ids", "draft.scratch_kv", "draft.proposal"})
    assert judge(frontier(tree_trace, 0, 1, [1, 0, 2]), blind).rule == "tree.parents"


@pytest.mark.parametrize("round", [0, 1, 2])
def test_a_selection_that_is_none_is_a_divergence_and_not_a_crash(tree_trace: Trace, round: int) -> None:
    selected = story_of(tree_trace).rounds[round].selected
    swapped = [selected[1], selected[0], *selected[2:]]
    for wrong in (swapped, [*selected[:-1], 10**6], [-3, *selected[1:]], [*selected[:-1], selected[-2]]):
        verdict = judge(selection(tree_trace, round, wrong))
        assert (verdict.status, verdict.rule) == ("diverged", "tree.tokens"), (wrong, verdict)


@pytest.mark.parametrize("round", [0, 1, 2])
def test_a_node_without_its_parent_is_a_divergence_and_not_a_crash(tree_trace: Trace, round: int) -> None:
    """A node with children is left out, for a candidate that was not selected."""
    of = story_of(tree_trace).rounds[round]
    parent = next(of.expanded[child // 3 - 1] for child in reversed(of.selected) if child >= 3)
    other = next(candidate for candidate in range(30) if candidate not in of.selected)
    wrong = selection(tree_trace, round, sorted({*of.selected, other} - {parent}))
    verdict = judge(wrong)
    assert (verdict.status, verdict.rule) == ("diverged", "tree.tokens"), verdict  # they are not the best
    verdict = judge(wrong, frozenset({"tree.tokens"}))
    assert (verdict.status, verdict.rule) == ("diverged", "tree.parents"), verdict  # nor are they a tree


@pytest.mark.parametrize("fault", ["none", "hidden_in", "tokens", "selected", "mask"])
def test_a_verdict_does_not_depend_on_how_much_is_looked_at_together(
    tree_trace: Trace, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    planted: dict[str, dict[str, Change]] = {
        "none": {},
        "hidden_in": {"draft.extend": nan, "draft.decode": nudge},
        "tokens": {"draft": bump},
        "selected": {"draft": bump},
        "mask": {"draft": flip},
    }
    tensors: dict[str, Tensor] = {}
    for stage, change in planted[fault].items():
        number = last_of(tree_trace, stage, fault)
        tensors[f"{number}.{fault}"] = change(tree_trace.tensor(number, fault))
    together = judge(changed(tree_trace, tensors))
    monkeypatch.setattr(compare, "_WAITING", 0)
    monkeypatch.setattr(replay, "_TOGETHER", 0)
    monkeypatch.setattr(replay, "_SCRATCH_TOGETHER", 1)
    alone = judge(changed(tree_trace, tensors))
    assert together.status == ("diverged" if tensors else "equal")
    assert alone.headroom == pytest.approx(together.headroom, rel=1e-6)
    assert msgspec.structs.replace(alone, headroom=together.headroom) == together


# Whose number a wrong one is: numbers of others are planted in a real, correct trace, and must be told as theirs.


def planted(trace: Trace, number: int, tensor: str, value: torch.Tensor) -> tuple[Trace, Provenance]:
    """The trace with another tensor in a record, and whose the first wrong number is."""
    changed = Trace(trace.header, {**trace.tensors, f"{number}.{tensor}": value})
    verdict = judge(changed)
    assert verdict.first is not None, verdict
    assert verdict.first.request == trace.header.records[number].request
    owners = find_provenance(changed, verdict)
    assert owners is not None
    said = "it is" if owners.sure else "may be"
    text = " ".join(argue(trace.header, verdict, trace=changed).split())
    assert not owners.text or f"{said} {owners.text}" in text
    return changed, owners


def of(trace: Trace, request: str, round: int, stage: str, step: int = 0) -> int:
    keys = {record.key: number for number, record in enumerate(trace.header.records)}
    return keys[Key(request, round, stage, step)]


def test_a_state_of_another_request_is_told_as_its(busy_trace: Trace) -> None:
    own, other = of(busy_trace, "a", 1, "draft.extend_decode"), of(busy_trace, "b", 0, "draft.extend_decode")
    first = busy_trace.header.records[of(busy_trace, "b", 0, "draft")].numbers["seq_len"]
    states = busy_trace.tensor(own, "hidden_in").clone()
    states[0] = busy_trace.tensor(other, "hidden_in")[0]
    _, owners = planted(busy_trace, own, "hidden_in", states)
    assert (owners.sure, owners.text) == (True, f"row {first} of request b, the target's state h[{first}]")


def test_a_state_of_the_row_before_is_told_as_that(busy_trace: Trace) -> None:
    number = of(busy_trace, "a", 0, "draft.extend", 8)
    states = busy_trace.tensor(number, "hidden_in").roll(1, 0)
    states[0] = busy_trace.tensor(number, "hidden_in")[0]
    _, owners = planted(busy_trace, number, "hidden_in", states)
    assert owners.text == "row 8 of request a, the target's state h[8], the row before its own"
    assert len(owners.by_row) == len(states) - 1


def test_a_stored_row_of_another_request_is_told_as_its(busy_trace: Trace) -> None:
    own, other = last_of(busy_trace, "extend", "draft_kv"), of(busy_trace, "b", 0, "prefill", 4)
    assert busy_trace.header.records[own].request == "a"
    rows = busy_trace.tensor(own, "draft_kv").clone()
    row = busy_trace.integers(other, "draft_rows")[-1]
    rows[0] = busy_trace.tensor(other, "draft_kv")[-1]
    _, owners = planted(busy_trace, own, "draft_kv", rows)
    assert owners.text.startswith(f"row {row} of request b, as the draft stores it")


def test_keys_and_values_of_different_rows_are_told_apart(busy_trace: Trace) -> None:
    own, other = last_of(busy_trace, "extend", "target_kv"), of(busy_trace, "b", 0, "prefill", 4)
    row = busy_trace.integers(other, "target_rows")[-1]
    rows = busy_trace.tensor(own, "target_kv").clone()
    mine = busy_trace.integers(own, "target_rows")[0]
    rows[0, 1] = busy_trace.tensor(other, "target_kv")[-1, 1]
    _, owners = planted(busy_trace, own, "target_kv", rows)
    keys, values = owners.text.split("; ")
    assert keys.startswith(f"its keys are row {mine} of request a")
    assert values.startswith(f"its values are row {row} of request b")


def test_poison_is_told_as_poison(busy_trace: Trace) -> None:
    number = last_of(busy_trace, "extend", "draft_kv")
    rows = busy_trace.tensor(number, "draft_kv").clone()
    rows[0, 0], rows[0, 1] = KEY_POISON, VALUE_POISON
    _, owners = planted(busy_trace, number, "draft_kv", rows)
    assert owners.text == "poison: the slot was never written, or was freed"


def test_a_state_that_read_poison_is_told_by_its_size(busy_trace: Trace) -> None:
    number = last_of(busy_trace, "draft.extend_decode", "hidden_in")
    _, owners = planted(busy_trace, number, "hidden_in", busy_trace.tensor(number, "hidden_in") * 1e3)
    assert owners.text.startswith("of poison's size")


def test_a_row_that_nobody_has_is_told_as_nobodys(busy_trace: Trace) -> None:
    number = last_of(busy_trace, "draft.extend_decode", "hidden_in")
    _, owners = planted(busy_trace, number, "hidden_in", nudge(busy_trace.tensor(number, "hidden_in")))
    assert (owners.text, owners.by_row) == (NOBODYS, {})


def test_a_wrong_token_may_be_the_next_one(busy_trace: Trace) -> None:
    number = of(busy_trace, "a", 0, "draft.extend", 8)
    prompt, ids = busy_trace.header.case.requests[0].prompt, busy_trace.tensor(number, "input_ids").clone()
    ids[1] = prompt[11]
    _, owners = planted(busy_trace, number, "input_ids", ids)
    assert not owners.sure
    assert owners.text.startswith("x[11]")


def test_a_run_of_tokens_of_other_rows_is_no_chance(busy_trace: Trace) -> None:
    number = of(busy_trace, "a", 0, "draft.extend", 8)
    prompt = busy_trace.header.case.requests[0].prompt
    ids = torch.tensor(prompt[8:16])
    _, owners = planted(busy_trace, number, "input_ids", ids)
    assert (owners.sure, owners.text) == (True, "x[8] to x[15] of request a, in place of x[9] on")


def test_a_position_is_told_by_how_far_it_is_off(busy_trace: Trace) -> None:
    number = of(busy_trace, "a", 0, "draft.extend", 8)
    _, owners = planted(busy_trace, number, "positions", busy_trace.tensor(number, "positions") + 2)
    assert owners.text == "2 too large, as all 8 that are wrong"


def test_a_slot_of_another_request_is_told_by_its_column(busy_trace: Trace) -> None:
    records, other = busy_trace.header.records, of(busy_trace, "b", 0, "prefill", 4)
    together = records[of(busy_trace, "b", 0, "target.verify")].iteration
    [own] = [n for n, one in enumerate(records) if (one.request, one.stage, one.iteration) == ("a", "target.verify", together)]
    table = busy_trace.integers(other, "table")
    slots = busy_trace.tensor(own, "slots").clone()
    slots[0] = table[8]
    _, owners = planted(busy_trace, own, "slots", slots)
    assert owners.text == "column 8 of request b"


def test_a_choice_is_told_by_its_rank(busy_trace: Trace) -> None:
    number = of(busy_trace, "a", 0, "extend")
    _, owners = planted(busy_trace, number, "proposal", busy_trace.tensor(number, "proposal") + 1)
    assert owners.text.endswith("of 96 by the reference's logits")


def test_numbers_behind_the_first_wrong_one_own_nothing(busy_trace: Trace) -> None:
    """A wrong row that is recorded again later is no evidence of whose it was."""
    number = of(busy_trace, "a", 1, "extend")
    later = last_of(busy_trace, "extend", "draft_kv")
    odd = torch.full_like(busy_trace.tensor(number, "draft_kv"), 3.0)
    again = busy_trace.tensor(later, "draft_kv").clone()
    again[0] = odd[0]
    trace = Trace(busy_trace.header, {**busy_trace.tensors, f"{later}.draft_kv": again})
    _, owners = planted(trace, number, "draft_kv", odd)
    assert owners.text == NOBODYS


@pytest.mark.parametrize("stage", ["draft", "verify"])
def test_a_closer_look_at_a_verdict_of_another_trace_says_nothing(busy_trace: Trace, stage: str) -> None:
    tensor = {"draft": "positions", "verify": "predicted"}[stage]
    number = last_of(busy_trace, stage, tensor)
    wrong = Trace(busy_trace.header, {**busy_trace.tensors, f"{number}.{tensor}": busy_trace.tensor(number, tensor) + 1})
    verdict = judge(wrong)
    assert rejudge_with_context(wrong, verdict) is not None
    assert rejudge_with_context(busy_trace, verdict) is None
    assert rejudge_with_context(busy_trace, judge(busy_trace)) is None


def test_a_closer_look_that_fails_is_named_where_the_owner_would_stand(
    busy_trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = last_of(busy_trace, "draft", "positions")
    wrong = Trace(busy_trace.header, {**busy_trace.tensors, f"{number}.positions": busy_trace.tensor(number, "positions") + 1})
    verdict = judge(wrong)

    def fails(*_: object) -> None:
        raise IndexError("row 12")

    monkeypatch.setattr(provenance, "compare_trace", fails)
    said = "unknown: the judge failed when it looked at the trace again: IndexError: row 12"
    assert said in " ".join(argue(wrong.header, verdict, trace=wrong).split())
    assert ("whose the actual one is", said) in run_page(wrong, verdict, argument="").fields


DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", ["8409", "26997-kv"])
def test_the_argument_with_its_tree_is_the_documented_one(host: Host, tmp_path: Path, name: str) -> None:
    entry, text = LEDGER[name], (DOCS / "explanation/trees.md").read_text()
    trace = host.engine(entry.case, entry.red.patches).run(entry.case, tmp_path)
    said = argue(trace.header, judge(trace, view=entry.red.view), trace=trace).split("\n")
    begin, end = said.index(f"  {entry.rule}"), next(n for n, line in enumerate(said) if line.startswith("  node: token"))
    floats = ("  expected", "  actual")  # their last digit is the machine's
    for line in said[begin : end + 1]:
        assert line.startswith(floats) or f"\n{line}\n" in text, line
    assert f"`{entry.command(entry.red)}`" in text
