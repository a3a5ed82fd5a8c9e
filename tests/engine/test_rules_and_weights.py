"""The catalogue says which rules need the model's weights: with other weights in the reference these find something, and the
others find nothing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from eagletwin.harness.core.case import Case, EngineSettings, Logprobs
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.engines.host import Host
from eagletwin.harness.judge import replay
from eagletwin.harness.judge.judge import judge
from eagletwin.harness.judge.rules import catalogue
from eagletwin.reference.state_layers import Kept

FREE = {name for name, rule in catalogue().items() if rule.weights == "no"}


@pytest.fixture
def other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference computes as with weights of its own: hidden states, logits, rows and drafts are others."""
    right = replay.target_rows

    def kept(part: Kept) -> Kept:
        return Kept(1.1 * part.state, 1.1 * part.window)

    def wrong(*arguments: Any) -> Any:
        rows = right(*arguments)
        return replace(
            rows,
            hidden=1.1 * rows.hidden.flip(-1),
            logits=rows.logits.flip(-1),
            keys=1.1 * rows.keys,
            values=1.1 * rows.values,
            kept=tuple(map(kept, rows.kept)),
        )

    monkeypatch.setattr(replay, "target_rows", wrong)


def diverged(trace: Trace) -> set[str]:
    verdict = judge(trace)
    assert verdict.status == "diverged", verdict
    return {verdict.rule, *verdict.later}


@pytest.mark.usefixtures("other_weights")
def test_of_a_chain(busy_trace: Trace) -> None:
    found = diverged(busy_trace)
    assert found.isdisjoint(FREE)
    assert found == {
        "draft.hidden_in",
        "draft.kv",
        "draft.proposal",
        "draft.scratch_kv",
        "output.tokens",
        "target.hidden",
        "target.kv",
        "verify.accept",
    }


@pytest.mark.usefixtures("other_weights")
def test_of_a_tree(tree_trace: Trace) -> None:
    found = diverged(tree_trace)
    assert found.isdisjoint(FREE)
    assert found >= {"tree.parents", "tree.tokens", "commit.path"}


@pytest.mark.usefixtures("other_weights")
def test_of_requests_that_sample(sampled_trace: Trace) -> None:
    found = diverged(sampled_trace)
    assert found.isdisjoint(FREE)
    assert found >= {"verify.probabilities", "draft.probabilities"}


@pytest.mark.usefixtures("other_weights")
def test_of_layers_that_keep_a_state(states_trace: Trace) -> None:
    found = diverged(states_trace)
    assert found.isdisjoint(FREE)
    assert found >= {"target.state", "target.conv"}


@pytest.mark.usefixtures("other_weights")
def test_of_what_a_request_is_told(host: Host, busy_case: Case, tmp_path: Path) -> None:
    requests = tuple(
        structs.replace(request, logprobs=Logprobs(start=0), hidden_states="last") for request in busy_case.requests
    )
    settings = structs.replace(busy_case.engine.sglang, plain_decode=True)
    case = structs.replace(busy_case, requests=requests, engine=EngineSettings(sglang=settings))
    found = diverged(host.engine(case).run(case, tmp_path))
    assert found.isdisjoint(FREE)
    assert found >= {"output.logprobs", "output.hidden", "output.plain"}


def test_every_rule_that_needs_weights_was_shown_to() -> None:
    """Those of the five tests above: a rule that is added names its test there."""
    shown = {"draft.hidden_in", "draft.kv", "draft.proposal", "draft.scratch_kv", "output.tokens", "target.hidden", "target.kv"}
    shown |= {"verify.accept", "tree.parents", "tree.tokens", "commit.path", "verify.probabilities", "draft.probabilities"}
    shown |= {
        "target.state",
        "target.conv",
        "output.logprobs",
        "output.hidden",
        "output.plain",
        "state.tracked",
    }  # the last one is of prefixes in the cache (test_states.py)
    assert shown == set(catalogue()) - FREE
