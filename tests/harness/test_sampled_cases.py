"""`cases(sampling=...)` draws valid cases that sample as they are asked to."""

import hypothesis
import pytest
from hypothesis import HealthCheck, Phase, given, settings

from eagletwin.cases.strategies import Focus, cases
from eagletwin.harness.core.case import Case
from eagletwin.harness.families.valid import check_case

from ..rows import rows


def drawn(focus: Focus | None, **asked: object) -> list[Case]:
    found: list[Case] = []

    @hypothesis.seed(1)
    @settings(max_examples=60, database=None, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
    @given(cases(focus, **asked))  # type: ignore[arg-type]
    def look(case: Case) -> None:
        check_case(case, "drawn")
        found.append(case)

    look()
    return found


def test_nothing_samples_unless_it_is_asked_for() -> None:
    assert not any(case.samples for case in drawn(None))


@pytest.mark.parametrize("focus", rows([None, Focus(num_steps=2, page_size=4)]))
def test_each_kind_of_sampling_is_drawn_where_it_is_asked_for(focus: Focus | None) -> None:
    for kind, rejection in (("target", {False}), ("rejection", {True})):
        found = drawn(focus, sampling=kind)
        assert all(case.samples for case in found)
        assert {case.engine.sglang.rejection_sampling for case in found} == rejection


def test_any_sampling_is_of_either_kind_where_both_are_possible() -> None:
    found = drawn(Focus(num_steps=2), sampling="any")
    assert all(case.samples for case in found)
    assert {case.engine.sglang.rejection_sampling for case in found} == {False, True}


def test_what_else_is_asked_for_holds() -> None:
    found = drawn(
        Focus(topk=4, context_length=16), held=("topk", "context_length"), sampling="target", events=False, max_requests=2
    )
    assert {(case.topk, case.engine.sglang.context_length) for case in found} == {(4, 16)}
    assert not any(case.events for case in found)
    assert {len(case.requests) for case in found} == {1, 2}


@pytest.mark.parametrize("focus", [Focus(topk=4), Focus(model="llama-eagle3")])
def test_rejection_sampling_of_what_cannot_have_it_is_refused(focus: Focus) -> None:
    with pytest.raises(ValueError, match="sampling='rejection' needs topk 1"):
        cases(focus, sampling="rejection")


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="use one of target, rejection, any"):
        cases(sampling="all")  # type: ignore[arg-type]
