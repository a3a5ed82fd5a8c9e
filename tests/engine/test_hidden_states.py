"""The real worker feeds the hidden states that the recipe declares: it would diverge from a reference that fed the others."""

import msgspec
import pytest
import torch

from eagletwin.harness.case import Case
from eagletwin.harness.judge.bounds import FLOAT32
from eagletwin.harness.judge.story import stories
from eagletwin.harness.models.recipes import RECIPES

from .conftest import Runner


@pytest.mark.parametrize("name", sorted(name for name in RECIPES if not RECIPES[name].mtp_layers))
def test_the_worker_feeds_the_target_states_that_the_recipe_declares_and_residual_draft_states(
    run: Runner, busy_case: Case, name: str
) -> None:
    trace, verdict = run(msgspec.structs.replace(busy_case, model=name))
    assert verdict.status == "equal"
    told = stories(trace, "slot_layout")
    seen = {"draft.extend": 0, "draft.decode": 0}
    for number, record in enumerate(trace.header.records):
        if record.stage == "draft.extend":
            story, hidden = told[record.request], trace.tensor(number, "hidden_in")
            assert story.target is not None
            rows = slice(record.step, record.step + len(hidden))
            assert FLOAT32.error_of(story.target.hidden[rows], hidden).max() < 1
            if RECIPES[name].target_hidden == "post_norm":
                other = story.target.residual
            else:  # the residual stream, but one layer later
                size = RECIPES[name].target.hidden_size
                other = torch.cat([story.target.hidden[:, size:], story.target.residual], -1)
            assert FLOAT32.error_of(other[rows], hidden).min() > 100
            seen[record.stage] += 1
        if record.stage == "draft.decode" and record.step == 2:
            growth = told[record.request].growths[record.round]
            assert FLOAT32.error_of(growth.hidden[1], trace.tensor(number, "hidden_in")).max() < 1
            seen[record.stage] += 1
    assert min(seen.values()) > 2
