"""What stays the same of a finding while its case shrinks, and what tells two findings apart."""

import pytest

from eagletwin.harness.commands.fuzz.shrinking import smaller
from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.core.records import Ending
from eagletwin.harness.core.signature import Signature, signature_of, without_numbers
from eagletwin.harness.core.verdict import Divergence, Verdict

FINISHED = Ending(kind="finished")


def diverged(**fields: object) -> Verdict:
    known: dict[str, object] = {"rule": "draft.kv", "request": "a", "round": 1, "stage": "extend", "step": 2, "iteration": 7}
    first = Divergence(**{**known, "index": "row 3", "expected": "1", "actual": "2", **fields})  # type: ignore[arg-type]
    return Verdict(status="diverged", rule=first.rule, first=first)


def crashed(detail: str, origin: str = "", where: str = "verify, iteration 3") -> tuple[Verdict, Ending]:
    ending = Ending(kind="crashed", detail=detail, where=where, **({"origin": origin} if origin else {}))
    return Verdict(status="unknown", rule="engine.crash", reason=f"{detail} (last seen: {where})"), ending


def test_request_round_step_iteration_and_values_are_no_part_of_it() -> None:
    smallest = diverged(request="c", round=0, step=0, iteration=1, index="row 0", actual="9")
    assert signature_of(diverged(), FINISHED) == signature_of(smallest, FINISHED) == Signature("draft.kv", "extend")


@pytest.mark.parametrize("other", [{"rule": "draft.slots"}, {"stage": "prefill"}, {"layer": 1}], ids=str)
def test_rule_stage_and_layer_tell_two_apart(other: dict[str, object]) -> None:
    assert signature_of(diverged(**other), FINISHED) != signature_of(diverged(), FINISHED)


def test_a_faulted_kernel_is_distinguished_by_its_name() -> None:
    first, second = (Ending(kind="faulted", rule="kernel.memory", origin=name) for name in ("assign", "scatter"))
    found = diverged(rule="kernel.memory", stage="kernel")
    assert signature_of(found, first) == Signature("kernel.memory", "kernel", kernel="assign")
    assert signature_of(found, first) != signature_of(found, second)


def test_crashes_are_distinguished_by_exception_and_function_and_by_no_number() -> None:
    one = signature_of(*crashed("IndexError: 3 (x.py:7 in f)", "IndexError in srt/x.py:f"))
    assert one == signature_of(*crashed("IndexError: 5 (x.py:9 in f)", "IndexError in srt/x.py:f", "prefill, iteration 0"))
    assert one != signature_of(*crashed("KeyError: 3 (x.py:7 in f)", "KeyError in srt/x.py:f"))
    assert one != signature_of(*crashed("IndexError: 3 (y.py:7 in g)", "IndexError in srt/y.py:g"))
    assert signature_of(*crashed("killed by SIGSEGV")) != signature_of(*crashed("killed by SIGKILL"))
    assert signature_of(*crashed("killed by SIGSEGV")) == signature_of(
        *crashed("killed by SIGSEGV", where="extend, iteration 9")
    )


def test_reasons_are_compared_without_numbers_and_names_of_requests() -> None:
    ties, more = (Verdict(status="unknown", reason=f"{number} of 20 choices are ties") for number in (7, 12))
    assert signature_of(ties, FINISHED) == signature_of(more, FINISHED)
    incomplete = Verdict(status="unknown", reason="the trace is not complete: request b has no draft in round 2")
    assert signature_of(incomplete, FINISHED) != signature_of(ties, FINISHED)
    assert without_numbers("request 'b' of [1, 22, 3], -1.5e-3 and x2") == "a request of [#], # and x2"


def test_nothing_was_found_in_an_equal_a_vacuous_and_a_stopped_run() -> None:
    stopped = Ending(kind="stopped", detail="before iteration 3")
    assert signature_of(Verdict(status="equal"), FINISHED) is None
    assert signature_of(Verdict(status="unknown", reason="never called", vacuous=True), FINISHED) is None
    assert signature_of(Verdict(status="unknown", reason="the run was stopped"), stopped) is None
    assert signature_of(diverged(), stopped) is not None


def test_a_signature_names_a_file() -> None:
    assert Signature("engine.crash", cause="IndexError in srt/x.py:f").slug == "engine.crash-IndexError-in-srt-x.py-f"
    assert str(Signature("draft.kv", "prefill", layer=2)) == "draft.kv (prefill, layer 2)"


def test_what_became_smaller_is_named_and_nothing_else() -> None:
    request = Request(id="a", prompt=(1, 2, 3), max_new_tokens=4)
    found = Case(name="x", model="llama-tiny", num_steps=3, page_size=4, chunks=(4,) * 40, requests=(request,))
    now = Case(name="x", model="llama-tiny", num_steps=3, requests=(request,))
    assert smaller(found, now) == "page_size 4 → 1, chunks 40 → 0"
    assert smaller(found, found) == ""
