"""The verdict of two runs of one case."""

import msgspec

from eagletwin.harness.check.confirm import agree, alike
from eagletwin.harness.core.verdict import Divergence, Verdict

FIRST = Divergence(
    rule="draft.kv",
    request="a",
    round=1,
    stage="extend",
    step=0,
    iteration=3,
    index="row 5, element 28",
    expected="-1.32",
    actual="-1.73 (1.82e+03 times the bound)",
)


def diverged(**changes: object) -> Verdict:
    first = msgspec.structs.replace(FIRST, **changes)
    return Verdict(status="diverged", rule=first.rule, first=first)


def test_the_same_twice_is_a_divergence_as_it_was() -> None:
    assert agree(diverged(), diverged(iteration=4), "in replay-1") == diverged()


def test_other_wrong_numbers_in_the_same_record_are_a_divergence_that_says_so() -> None:
    other = diverged(index="row 5, element 4", actual="1.32 (2e+03 times the bound)", expected="1.85")
    both = agree(diverged(), other, "in replay-1")
    assert both.status == "diverged"
    assert both.first == FIRST
    assert "differ in replay-1" in both.reason
    assert "row 5, element 4: 1.32" in both.reason
    assert agree(both, diverged(), "in replay-2") == both  # a third run does not take back what the second showed


def test_another_rule_record_or_status_is_nondeterministic() -> None:
    for second in (
        *(
            diverged(**change)
            for change in ({"rule": "draft.proposal"}, {"round": 2}, {"request": "b"}, {"layer": 1}, {"rank": 1})
        ),
        Verdict(status="equal"),
        Verdict(status="unknown", reason="stopped"),
    ):
        assert not alike(diverged(), second)
        both = agree(diverged(), second, "in replay-1")
        assert both.status == "unknown"
        assert both.reason.startswith("nondeterministic: first draft.kv at extend, round 1, row 5, element 28")
        assert agree(Verdict(status="equal"), diverged(), "once more").status == "unknown"
