"""EAGLE-3 on the real worker: generated cases are equal, and a fault in anything that it adds to EAGLE-1/2 is found."""

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings

from eagletwin.cases.strategies import Focus, cases
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.patch import Edit
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.families.weights import model_pair
from eagletwin.harness.testing.twin import Twin

from ..rows import spread
from .conftest import Runner

DRAFT = "sglang.srt.models.llama_eagle3"
WORKER = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker"
MAPPED = "topk_index = self.hot_token_id[topk_index]"
AT_FIRST = f"{MAPPED}\n\n    out_cache_loc = per_step_draft_out_cache_loc("
AT_A_STEP = f"{MAPPED}\n            hidden_states = logits_output.hidden_states"


def _at_a_step(mapped: str) -> Edit:
    return Edit(
        target=f"{WORKER}.draft_forward",
        match=AT_A_STEP,
        replacement=f"topk_index = {mapped}\nhidden_states = logits_output.hidden_states",
    )


def _at_first(mapped: str) -> Edit:
    return Edit(
        target=f"{WORKER}.draft_forward",
        match=AT_FIRST,
        replacement=f"topk_index = {mapped}\nout_cache_loc = per_step_draft_out_cache_loc(",
    )


# Which fault -> (edit, rule, where it must be seen first: stage, step, index)
PLANTED = {
    "d2t is left out at the first step": (_at_first("topk_index"), "draft.proposal", "draft", 0, "token of candidate 0"),
    "d2t is left out at one step": (
        _at_a_step("self.hot_token_id[topk_index] if i != 1 else topk_index"),
        "draft.proposal",
        "draft",
        2,
        "d[3]",
    ),
    "d2t is of the next id at one step": (
        _at_a_step("self.hot_token_id[(topk_index + (i == 0)) % 64]"),
        "draft.proposal",
        "draft",
        1,
        "d[2]",
    ),
    "d2t is one off": (
        Edit(
            target=f"{DRAFT}.LlamaForCausalLMEagle3.load_weights",
            match="loaded_weight + torch.arange(loaded_weight.shape[0])",
            replacement="(loaded_weight + torch.arange(loaded_weight.shape[0]) + 1) % 96",
        ),
        "draft.proposal",
        "draft",
        0,
        "token of candidate 0",
    ),
    "the states of the layers before are captured": (
        Edit(
            target="sglang.srt.models.llama.LlamaForCausalLM.set_eagle3_layers_to_capture",
            match="[val + 1 for val in layer_ids]",
            replacement="layer_ids",
        ),
        "target.hidden",
        "target.extend",
        0,
        "row 0",
    ),
    "the three states are in another order": (
        Edit(
            target=f"{WORKER}._draft_extend_for_prefill",
            match="hidden_states=target_hidden_states,",
            replacement="hidden_states=target_hidden_states.roll(32, -1),",
        ),
        "draft.hidden_in",
        "draft.extend",
        0,
        "row 0",
    ),
    "draft decode feeds on the state after the norm": (
        Edit(
            target=f"{DRAFT}.LlamaModel.forward",
            match="hidden_states_to_logits if self.norm_output else hidden_states_to_aux",
            replacement="hidden_states_to_logits",
        ),
        "draft.hidden_in",
        "prefill",
        16,
        "state that row",
    ),
    "logits are of the state before the norm": (
        Edit(
            target=f"{DRAFT}.LlamaModel.forward",
            match="return hidden_states_to_logits, [aux]",
            replacement="return hidden_states_to_aux, [aux]",
        ),
        "draft.proposal",
        "",
        None,
        "d[",
    ),
    "the embedding has no norm": (
        Edit(
            target=f"{DRAFT}.LlamaDecoderLayer.forward",
            match="embeds = self.input_layernorm(embeds)",
            replacement="embeds = embeds",
        ),
        "draft.kv",
        "prefill",
        0,
        "row 0",
    ),
    "the residual sum is the normed state's": (
        Edit(
            target=f"{DRAFT}.LlamaDecoderLayer.forward",
            match="hidden_states = self.hidden_norm(hidden_states)",
            replacement="hidden_states = residual = self.hidden_norm(hidden_states)",
        ),
        "draft.hidden_in",
        "prefill",
        16,
        "state that row",
    ),
}


@pytest.fixture(scope="module")
def case(busy_case: Case) -> Case:
    return msgspec.structs.replace(busy_case, model="llama-eagle3")


@pytest.mark.long
@pytest.mark.parametrize("name", ["llama-eagle3", "llama-eagle3-full"])
def test_generated_cases_are_equal(eagletwin: Twin, name: str) -> None:
    focus = Focus(model=name, num_steps=4, page_size=4, radix_cache=True)
    seen = 0

    @settings(max_examples=25, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(case=cases(focus).filter(lambda case: case.model == name))
    def check(case: Case) -> None:
        nonlocal seen
        assert eagletwin.check(case).status == "equal"
        seen += 1

    check()
    assert seen == 25


@pytest.mark.parametrize("fault", spread(sorted(PLANTED), lambda fault: PLANTED[fault][1]))
def test_a_fault_in_what_eagle3_adds_is_found_and_named(run: Runner, case: Case, fault: str) -> None:
    edit, rule, stage, step, index = PLANTED[fault]
    trace, verdict = run(case, edit)
    assert (verdict.status, verdict.rule) == ("diverged", rule), (verdict, trace.header.ending)
    assert verdict.first is not None
    assert verdict.first.index.startswith(index), verdict.first
    if stage:
        assert (verdict.first.stage, verdict.first.step) == (stage, step), verdict.first


OUTSIDE = {
    "d[1]": (_at_first("self.hot_token_id[topk_index] + 1000"), "draft.input_ids", "draft.decode", 1),
    "d[2]": (_at_a_step("self.hot_token_id[topk_index] + 1000 * (i == 0)"), "draft.proposal", "draft.decode", 2),
    "d[3]": (_at_a_step("self.hot_token_id[topk_index] + 1000 * (i == 1)"), "draft.proposal", "draft", 2),
}


@pytest.mark.parametrize("token", spread(sorted(OUTSIDE)))
def test_a_token_outside_the_vocabulary_is_a_divergence_though_the_worker_dies_of_it(
    run: Runner, case: Case, token: str
) -> None:
    edit, rule, stage, step = OUTSIDE[token]
    trace, verdict = run(case, edit)
    assert trace.header.ending.kind == "crashed"
    assert (verdict.status, verdict.rule) == ("diverged", rule), verdict
    assert verdict.first is not None
    assert (verdict.first.stage, verdict.first.step) == (stage, step), verdict.first
    assert int(verdict.first.actual.split(",")[0]) >= 1000


def test_a_death_in_draft_decode_alone_is_unknown(run: Runner, case: Case) -> None:
    """What the round consumed so far was right, so nothing diverged; and the judge makes sense of the trace."""
    dies = Edit(
        target=f"{WORKER}.draft_forward",
        match="maybe_detect_oob(",
        replacement="if i == 1:\n    raise ValueError('the worker raised')\nmaybe_detect_oob(",
    )
    _, verdict = run(case, dies)
    assert (verdict.status, verdict.rule) == ("unknown", "engine.crash")
    assert "the worker raised" in verdict.reason
    assert "judge" not in verdict.reason


def test_the_worker_proposes_in_the_drafts_ids_and_the_judge_maps_them(run: Runner, case: Case) -> None:
    trace, verdict = run(case)
    assert verdict.status == "equal"
    proposes = model_pair(case.model).proposes.tolist()
    proposed = _proposals(trace)
    assert all(0 <= draft_id < len(proposes) for draft_id, _ in proposed)
    assert all(proposes[draft_id] == token for draft_id, token in proposed)
    assert any(draft_id != token for draft_id, token in proposed)
    assert len(proposed) > 3


def _proposals(trace: Trace) -> list[tuple[int, int]]:
    """(what an extend proposed, d[1] of the draft after it)."""
    found, last = [], {}
    for number, record in enumerate(trace.header.records):
        if "proposal" in record.tensors:
            last[record.request] = trace.integers(number, "proposal")[0]
        if record.stage == "draft":
            found.append((last[record.request], trace.integers(number, "tokens")[1]))
    return found
