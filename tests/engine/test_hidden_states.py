"""The real worker feeds the hidden states that the recipe declares: it would diverge from a reference that fed the others."""

import msgspec
import numpy as np
import pytest
import torch

from eagletwin.harness.core.case import Case
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.weights import model_pair
from eagletwin.harness.judge.bounds import FLOAT32
from eagletwin.harness.judge.replay import replay_requests
from eagletwin.reference.llama import target_rows

from .conftest import Runner


@pytest.mark.parametrize(
    "name", sorted(name for name in RECIPES if RECIPES[name].drafts == ("draft",) and RECIPES[name].reads_states)
)
def test_the_worker_feeds_the_target_states_that_the_recipe_declares_and_residual_draft_states(
    run: Runner, busy_case: Case, name: str
) -> None:
    case = msgspec.structs.replace(busy_case, model=name)
    if RECIPES[name].target.states:  # what a cached prefix keeps of states is not judged
        settings = msgspec.structs.replace(case.engine.sglang, radix_cache=False)
        case = msgspec.structs.replace(case, engine=msgspec.structs.replace(case.engine, sglang=settings))
    trace, verdict = run(case)
    assert verdict.status == "equal"
    assert trace.header.fallbacks == ()  # no kernel of this family needs Triton's interpreter
    told, target = replay_requests(trace, "slot_layout"), model_pair(name).reference_target()
    seen = {"draft.extend": 0, "draft.decode": 0}
    for number, record in enumerate(trace.header.records):
        if record.stage == "draft.extend":
            replay, hidden = told[record.request], trace.array(number, "hidden_in")
            assert replay.target is not None
            rows = slice(record.step, record.step + len(hidden))
            assert FLOAT32.error_of(replay.target.hidden[rows], hidden).max() < 1
            other = target_rows(target, RECIPES[name].target, torch.tensor(replay.tokens[:-1])).residual.numpy()
            if RECIPES[name].target_hidden != "post_norm":  # the residual stream, but one layer later
                size = RECIPES[name].target.hidden_size
                other = np.concatenate([replay.target.hidden[:, size:], other], -1)
            assert FLOAT32.error_of(other[rows], hidden).min() > 100
            seen[record.stage] += 1
        if record.stage == "draft.decode" and record.step == 2:
            growth = told[record.request].growths[record.round]
            assert FLOAT32.error_of(growth.hidden[1], trace.array(number, "hidden_in")).max() < 1
            seen[record.stage] += 1
    assert min(seen.values()) > 2
