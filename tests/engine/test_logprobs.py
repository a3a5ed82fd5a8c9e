"""What a request is told of the probabilities of tokens (output.logprobs), on the real scheduler."""

import numpy as np
import pytest
from msgspec.structs import replace

from eagletwin.harness.core.case import Bias, Case, Logprobs, Request, Sampling
from eagletwin.harness.core.patch import Edit
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.engines.host import Host
from eagletwin.harness.judge.judge import judge
from eagletwin.harness.judge.rules.outputs import in_steps

from ..rows import spread
from .asked import PROMPT, answered
from .changes import Change, bump, changed, lengthen, nan, nudge, percent, shorten
from .conftest import Runner

# a: from a place in its first chunk on, streamed, retracted; b: behind a cached page; c: from the first token on, it samples
CASE = answered(
    "logprobs",
    {"logprobs": Logprobs(start=3, top=2, tokens=(5, 9))},
    {"logprobs": Logprobs(start=5, top=1)},
    Request(id="c", prompt=PROMPT, max_new_tokens=8, arrive=7, sampling=Sampling(temperature=0.7), logprobs=Logprobs(start=0)),
    Request(id="d", prompt=PROMPT[3:], max_new_tokens=5, arrive=7, logit_bias=(Bias(token=9, value=3),), logprobs=Logprobs()),
    exercises=("logprobs_of_path", "logprobs_of_chunks", "logprobs_behind_hit", "retraction_in_decode", "early_stop"),
)
TREE = Case(
    name="logprobs-of-a-tree",
    model="llama-tiny",
    num_steps=2,
    topk=4,
    num_draft_tokens=8,
    requests=tuple(
        Request(id=name, prompt=PROMPT[n:], max_new_tokens=12, logprobs=Logprobs(top=1, tokens=(3,)))
        for n, name in enumerate("ab")
    ),
    exercises=("logprobs_of_path", "path_not_in_front"),
)

SPEC = "sglang.srt.layers.logprob_processor.compute_spec_logprobs"
RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
PROMPTS = "sglang.srt.managers.scheduler_components.logprob_result_processor.SchedulerLogprobResultProcessor"
ACCEPT = "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept"
REQUEST = "sglang.srt.managers.schedule_batch.Req"

# Fault -> the case, the edit, the rule that names it first.
PLANTED: dict[str, tuple[Case, Edit, str]] = {
    "of what verify samples, without the temperature": (
        CASE,
        Edit(target=SPEC, match="if batch.sampling_info.is_all_greedy or", replacement="if True or"),
        "output.logprobs",
    ),
    "of the row after the token": (
        CASE,
        Edit(
            target=SPEC,
            match="next_token_logits[flat_accept_idx]",
            replacement="next_token_logits.roll(-1, 0)[flat_accept_idx]",
        ),
        "output.logprobs",
    ),
    "of the first nodes of a tree": (
        TREE,
        Edit(
            target=SPEC,
            match="next_token_logits[flat_accept_idx]",
            replacement="next_token_logits.view(bs, -1, next_token_logits.shape[-1])[:, :max_accept].flatten(0, 1)",
        ),
        "output.logprobs",
    ),
    "the best tokens of another round's place": (
        CASE,
        Edit(
            target=f"{RESULTS}._apply_decode_logprobs",
            match="next_token_top_logprobs_val[flat_idx]",
            replacement="next_token_top_logprobs_val[i * max_accept]",
        ),
        "output.logprobs",
    ),
    "the tokens that another request names": (
        TREE,
        Edit(
            target=SPEC,
            match="ids for ids in batch.token_ids_logprobs",
            replacement="ids and [one + 1 for one in ids] for ids in batch.token_ids_logprobs",
        ),
        "output.logprobs",
    ),
    "of the prompt, one place late": (
        CASE,
        Edit(
            target=f"{PROMPTS}._process_input_token_logprobs",
            match="[None] + input_token_logprobs[:-1]",
            replacement="[None] + input_token_logprobs[1:]",
        ),
        "output.logprobs",
    ),
    "each message begins with the last one's end": (
        CASE,
        Edit(
            target=ACCEPT,
            match="req.send_output_token_logprobs_offset = logprob_end",
            replacement="req.send_output_token_logprobs_offset = max(logprob_end - 1, 0)",
        ),
        "output.logprobs",
    ),
    "a retracted request forgets what it was told": (
        CASE,
        Edit(
            target=f"{REQUEST}.reset_for_retract",
            match="self.input_token_logprobs = None",
            replacement="self.input_token_logprobs = None\nself.logprob.output_token_logprobs_val.clear()",
        ),
        "output.logprobs",
    ),
    "a hit ends a row before it must": (
        CASE,
        Edit(
            target=f"{REQUEST}._compute_max_prefix_len",
            match="min(max_prefix_len, self.logprob_start_len)",
            replacement="min(max_prefix_len, self.logprob_start_len - 1)",
        ),
        "radix.hit",
    ),
}
CHANGES: list[tuple[str, Change]] = [
    ("input_token_logprobs", nan),
    ("input_token_logprobs_ids", bump),
    ("input_token_logprobs_values_rows", shorten),
    ("input_top_logprobs", percent),
    ("input_top_logprobs_ids", bump),
    ("input_token_ids_logprobs", percent),
    ("output_token_logprobs", percent),
    ("output_token_logprobs_ids", bump),
    ("output_top_logprobs", nudge),
    ("output_token_ids_logprobs", percent),
    ("output_token_ids_logprobs_ids", bump),
    ("output_token_ids_logprobs_ids_rows", lengthen),
    ("logprobs_sent", bump),
]


@pytest.fixture(scope="module")
def told(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return host.engine(CASE).run(CASE, tmp_path_factory.mktemp("logprobs"))


@pytest.mark.parametrize("case", [CASE, TREE], ids=lambda case: case.name)
def test_what_it_is_told_is_right(run: Runner, case: Case) -> None:
    _, verdict = run(case)
    assert verdict.status == "equal", verdict
    assert verdict.checked["output.logprobs"] > 20


@pytest.mark.parametrize("fault", spread(sorted(PLANTED), lambda fault: PLANTED[fault][-1]))
def test_a_fault_is_named(run: Runner, fault: str) -> None:
    case, edit, rule = PLANTED[fault]
    trace, verdict = run(replace(case, exercises=()), edit)
    assert (verdict.status, verdict.rule) == ("diverged", rule), (verdict, trace.header.ending)
    assert judge(trace, frozenset({rule})).status == "equal"


@pytest.mark.parametrize(("tensor", "change"), CHANGES)
def test_one_changed_number_is_found(told: Trace, tensor: str, change: Change) -> None:
    number = next(n for n, record in enumerate(told.header.records) if (record.stage, record.request) == ("finished", "a"))
    verdict = judge(changed(told, {f"{number}.{tensor}": change(told.tensor(number, tensor))}))
    assert (verdict.status, verdict.rule) == ("diverged", "output.logprobs"), verdict
    assert verdict.first is not None
    assert verdict.first.request == "a"


def test_a_probability_that_is_no_normal_float32_has_the_logarithm_of_a_step_beside_it(run: Runner) -> None:
    """SGLang's is that of softmax in float32: of exp(-101.5) six steps of 2 ** -149, which is 0.04 from it."""
    case = Case(
        name="logprobs-in-steps",
        model="deepseek-nextn-wide",
        num_steps=1,
        requests=(
            Request(id="a", prompt=(49,), max_new_tokens=1, sampling=Sampling(temperature=0.7), logprobs=Logprobs(tokens=(0,))),
        ),
    )
    assert run(case)[1].status == "equal"
    least, error = float(np.finfo(np.float32).min), np.full((1, 1), 0.015)
    expected = np.array([[-101.529, -101.529, -101.529, -110.0, -110.0, -80.0, -80.0]])
    actual = np.array([[-101.487, least, -101.0, least, -101.487, least, -80.3]])
    assert in_steps(expected, actual, error).tolist() == [[-101.487, least, -101.529, least, -110.0, -80.0, -80.0]]


@pytest.mark.long
def test_none_of_the_tokens_whose_probability_is_0_is_the_better_one(run: Runner) -> None:
    """A prefill's logarithms are of probabilities in float32: beside a token this likely all others have 0."""
    request = Request(
        id="a",
        prompt=(49,),
        max_new_tokens=12,
        sampling=Sampling(temperature=0.5),
        logit_bias=(Bias(token=7, value=60.0),),
        logprobs=Logprobs(top=3),
    )
    trace, verdict = run(Case(name="logprobs-of-0", model="llama-tiny", num_steps=1, requests=(request,)))
    assert verdict.status == "equal", verdict
    number = next(n for n, record in enumerate(trace.header.records) if record.stage == "finished")
    ids = trace.integers(number, "output_top_logprobs_ids")
    assert ids[0] == 7
    wrong = changed(trace, {f"{number}.output_top_logprobs_ids": trace.tensor(number, "output_top_logprobs_ids").flip(0)})
    assert judge(wrong).rule == "output.logprobs"  # the likely one is the better one still


@pytest.mark.long
def test_a_greedy_request_is_told_of_such_a_probability_where_its_prefill_has_one_that_samples(run: Runner) -> None:
    greedy = Request(
        id="a",
        prompt=(49,),
        max_new_tokens=4,
        logit_bias=(Bias(token=7, value=-100.0),),
        logprobs=Logprobs(tokens=(7,)),
    )
    sampled = Request(id="b", prompt=(53, 5), max_new_tokens=1, sampling=Sampling(temperature=0.7))
    least = float(np.finfo(np.float32).min)
    for requests in ((greedy, sampled), (greedy,)):
        trace, verdict = run(Case(name="greedy-logprobs-of-0", model="llama-tiny", num_steps=1, requests=requests))
        assert verdict.status == "equal", verdict
        number = next(n for n, one in enumerate(trace.header.records) if (one.stage, one.request) == ("finished", "a"))
        told = trace.tensor(number, "output_token_ids_logprobs")
        assert [value == least for value in told.tolist()] == [len(requests) == 2, False, False, False]
        for place in range(4):  # all others are told by log_softmax
            zero = told.clone()
            zero[place] = least
            verdict = judge(changed(trace, {f"{number}.output_token_ids_logprobs": zero}))
            right = len(requests) == 2 and place == 0
            assert (verdict.status, verdict.rule) == (("equal", "") if right else ("diverged", "output.logprobs")), place
