"""Whose number a wrong one is: numbers of others are planted in a real, correct trace, and must be told as theirs."""

import pytest
import torch

from eagletwin.harness.check.argument import argue
from eagletwin.harness.core.records import KEY_POISON, VALUE_POISON, Key
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.judge import provenance
from eagletwin.harness.judge.judge import judge
from eagletwin.harness.judge.provenance import NOBODYS, Provenance, find_provenance, rejudge_with_context
from eagletwin.harness.page.run import run_page

from .changes import last_of, nudge


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

    monkeypatch.setattr(provenance, "compared", fails)
    said = "unknown: the judge failed when it looked at the trace again: IndexError: row 12"
    assert said in " ".join(argue(wrong.header, verdict, trace=wrong).split())
    assert ("whose the actual one is", said) in run_page(wrong, verdict, argument="").fields
