"""What requests ask of their logits: processors, biases, min_p, penalties and min_new_tokens, with the candidate fixes."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.case import (
    Bias,
    Case,
    EngineSettings,
    Event,
    Penalties,
    Processor,
    Request,
    Sampling,
    SGLangSettings,
)
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.engines.host import Host
from eagletwin.harness.families.dimensions.dimension import tokens
from eagletwin.harness.judge.judge import judge

from ..rows import spread
from .conftest import Runner

# What requests ask for beside their tokens: processors, biases and min_p, on the real worker with the candidate fixes.


SAMPLE = "sglang.srt.speculative.eagle_utils.eagle_sample"
SAMPLER = "sglang.srt.layers.sampler.Sampler"
BATCH = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"

PROCESSORS = (Processor(kind="forbid", seed=1), None, Processor(seed=3), Processor(kind="forbid", seed=4))
BIASES = ((), (Bias(token=54, value=-100), Bias(token=3, value=6)), (Bias(token=60, value=4),), ())
MIN_PS = (0.3, 0.0, 1.0, 0.05)


def _case(name: str, *ways: dict[str, object]) -> Case:
    """Requests that come one after another and end at different times: the batch grows and shrinks."""
    requests = tuple(
        Request(id=f"r{n}", prompt=tokens(n, 5 + n, 96), max_new_tokens=14 - 2 * n, arrive=2 * n, **way)  # type: ignore[arg-type]
        for n, way in enumerate(ways)
    )
    return Case(name=name, model="llama-tiny", num_steps=3, requests=requests)


CASES = {
    "processor": _case("processors", *({"processor": processor} for processor in PROCESSORS)),
    "logit_bias": _case("biases", *({"logit_bias": biases} for biases in BIASES)),
    "min_p": _case("min-p", *({"sampling": Sampling(temperature=2, min_p=min_p)} for min_p in MIN_PS)),
}
FIXES = {"processor": LEDGER["logit-processor"], "min_p": LEDGER["min-p"]}
REACHED = {"processor": "logits_changed", "logit_bias": "logits_changed", "min_p": "min_p_cuts"}


def fixed(ask: str, wrong: tuple[str, str] | None = None) -> tuple[Edit, ...]:
    """The candidate fix, in which one expression is wrong."""
    if ask not in FIXES:
        return ()
    remedy = FIXES[ask].remedy
    assert remedy is not None
    if wrong is None:
        return remedy.edits
    [edit] = remedy.edits
    right, fault = wrong
    assert right in edit.replacement
    return (replace(edit, replacement=edit.replacement.replace(right, fault)),)


# Fault -> what is asked for, the edits, the rule that names it first.
PLANTED: dict[str, tuple[str, tuple[Edit, ...], str]] = {
    "verify applies no processor (live)": ("processor", (), "verify.accept"),
    "processors see the first node of each request alone": (
        "processor",
        fixed(
            "processor",
            (
                "(next_token_logits, sampling_info, verify_input.draft_token_num)",
                "(next_token_logits[:: verify_input.draft_token_num], sampling_info)",
            ),
        ),
        "verify.accept",
    ),
    "who stays in the batch gets the parameters of who left": (
        "processor",
        (
            *fixed("processor"),
            Edit(
                target=f"{BATCH}._filter_batch_custom_logit_processor",
                match="[self.custom_params[i] for i in keep_indices]",
                replacement="self.custom_params[: len(keep_indices)]",
            ),
        ),
        "verify.accept",
    ),
    "a prefill applies no processor": (
        "processor",
        (
            *fixed("processor"),
            Edit(
                target=f"{SAMPLER}._preprocess_logits",
                match="if sampling_info.has_custom_logit_processor:",
                replacement="if False:",
            ),
        ),
        "output.tokens",
    ),
    "verify adds no bias": (
        "logit_bias",
        (Edit(target=SAMPLE, match="if sampling_info.logit_bias is not None:", replacement="if False:"),),
        "verify.accept",
    ),
    "verify adds another request's bias": (
        "logit_bias",
        (
            Edit(
                target=SAMPLE,
                match="sampling_info.logit_bias, verify_input.draft_token_num",
                replacement="sampling_info.logit_bias.roll(1, 0), verify_input.draft_token_num",
            ),
        ),
        "verify.accept",
    ),
    "verify adds half of a bias": (
        "logit_bias",
        (
            Edit(
                target=SAMPLE,
                match="sampling_info.logit_bias, verify_input.draft_token_num",
                replacement="sampling_info.logit_bias / 2, verify_input.draft_token_num",
            ),
        ),
        "verify.accept",
    ),
    "verify cuts at no min_p (live)": ("min_p", (), "verify.probabilities"),
    "min_p is a probability, and not a share of the largest": (
        "min_p",
        fixed("min_p", ("target_probs.amax(-1, keepdim=True) * min_ps", "min_ps")),
        "verify.probabilities",
    ),
    "another request's min_p": (
        "min_p",
        fixed(
            "min_p",
            (
                "torch.repeat_interleave(sampling_info.min_ps, verify_input.draft_token_num, dim=0)",
                "sampling_info.min_ps.repeat(verify_input.draft_token_num)",
            ),
        ),
        "verify.probabilities",
    ),
    "what min_p leaves is not normalized": (
        "min_p",
        fixed("min_p", ("target_probs / target_probs.sum(-1, keepdim=True)", "target_probs")),
        "verify.probabilities",
    ),
    "a prefill cuts at no min_p": (
        "min_p",
        (
            *fixed("min_p"),
            Edit(
                target="sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch",
                match="if need_min_p_sampling:",
                replacement="if False:",
            ),
        ),
        "output.tokens",
    ),
}


@pytest.mark.parametrize("ask", sorted(CASES))
def test_with_the_candidate_fix_all_is_equal_and_it_mattered(run: Runner, ask: str) -> None:
    _, verdict = run(CASES[ask], *fixed(ask))
    assert verdict.status == "equal", verdict
    assert REACHED[ask] in verdict.exercised


def test_where_top_k_cuts_is_told_next_to_a_token_that_a_bias_rules_out(run: Runner) -> None:
    sampling, biases = Sampling(temperature=1.6, top_k=12), (Bias(token=54, value=-100), Bias(token=3, value=6))
    _, verdict = run(_case("cut", *({"sampling": sampling, "logit_bias": biases} for _ in range(4))))
    assert verdict.status == "equal", verdict
    assert (verdict.unseen.get("verify.probabilities", 0), verdict.checked["verify.probabilities"]) == (0, 42)


@pytest.mark.parametrize("fault", spread(sorted(PLANTED), lambda fault: PLANTED[fault][2], lambda fault: PLANTED[fault][0]))
def test_a_fault_is_named(run: Runner, fault: str) -> None:
    ask, edits, rule = PLANTED[fault]
    trace, verdict = run(CASES[ask], *edits)
    assert (verdict.status, verdict.rule) == ("diverged", rule), (verdict, trace.header.ending)


# Penalties on tokens that a request was sent before, on the real worker with the candidate fix.


WAYS = (Penalties(frequency=-2), Penalties(presence=2), Penalties(frequency=0.7, repetition=2), None)
CASE = Case(
    name="penalties",
    model="llama-tiny",
    num_steps=3,
    requests=tuple(
        Request(id=f"r{n}", prompt=(prompt,), max_new_tokens=14 - 2 * n, arrive=2 * n, penalties=way)
        for n, (prompt, way) in enumerate(zip((84, 59, 9, 16), WAYS, strict=True))
    ),
    events=(Event(at=7, kind="retract"),),
    exercises=("penalized", "retraction_in_decode", "batch_grows", "batch_shrinks"),
)
PENALTIES_SAMPLE = "sglang.srt.speculative.eagle_utils.eagle_sample"
INFO = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo"

REMEDY = LEDGER["penalties"].remedy
assert REMEDY is not None
FIXED = REMEDY.edits


def _wrong(right: str, fault: str) -> tuple[Edit, ...]:
    """The candidate fix, in which one expression is wrong."""
    launched, edit, from_the_start = FIXED
    assert right in edit.replacement
    return launched, replace(edit, replacement=edit.replacement.replace(right, fault)), from_the_start


# Fault -> the edits, the rule that names it first.
PENALTIES_PLANTED: dict[str, tuple[tuple[Edit, ...], str]] = {
    "the last token of each round alone is counted (live)": ((), "verify.accept"),
    "verify leaves additive penalties out": (
        (
            *FIXED,
            Edit(
                target=PENALTIES_SAMPLE, match="if sampling_info.acc_additive_penalties is not None:", replacement="if False:"
            ),
        ),
        "verify.accept",
    ),
    "verify leaves the scaling out": (
        (
            *FIXED,
            Edit(target=PENALTIES_SAMPLE, match="if sampling_info.acc_scaling_penalties is not None:", replacement="if False:"),
        ),
        "verify.accept",
    ),
    "verify takes another request's penalties": (
        (
            *FIXED,
            Edit(
                target=PENALTIES_SAMPLE,
                match="sampling_info.acc_additive_penalties,",
                replacement="sampling_info.acc_additive_penalties.roll(1, 0),",
            ),
        ),
        "verify.accept",
    ),
    "each token is penalized once, however often it came": (
        _wrong("counts * one.frequency_penalties", "(counts > 0) * one.frequency_penalties"),
        "verify.accept",
    ),
    "a prefill after a retraction has no penalties": (
        (
            *FIXED,
            Edit(
                target=f"{INFO}._apply_pre_grammar_logits_transforms",
                match="if self.acc_additive_penalties is not None:",
                replacement="if False:",
            ),
        ),
        "output.tokens",
    ),
}


def test_with_the_candidate_fix_all_is_equal_and_it_mattered_in_penalties(run: Runner) -> None:
    _, verdict = run(CASE, *FIXED)
    assert verdict.status == "equal", verdict


@pytest.mark.parametrize("fault", spread(sorted(PENALTIES_PLANTED), lambda fault: PENALTIES_PLANTED[fault][-1]))
def test_a_fault_is_named_in_penalties(run: Runner, fault: str) -> None:
    edits, rule = PENALTIES_PLANTED[fault]
    trace, verdict = run(replace(CASE, exercises=()), *edits)
    assert (verdict.status, verdict.rule) == ("diverged", rule), (verdict, trace.header.ending)


@pytest.mark.long
def test_a_greedy_request_with_penalties_shows_a_retracted_chunk_s_tail_as_well(run: Runner) -> None:
    entry = LEDGER["retracted-chunk-tail"]
    case, remedy = entry.also[0], entry.remedy
    assert remedy is not None
    _, red = run(case, *FIXED)
    assert (red.status, red.rule) == ("diverged", entry.rule)
    _, green = run(case, *FIXED, *remedy.edits)
    assert green.status == "equal"


@pytest.mark.long
def test_a_round_that_a_retraction_lost_is_judged_by_what_was_sent_when_it_began(overlapped: Host, tmp_path: Path) -> None:
    """`c` committed two tokens in round 1, which was lost. Round 2 began behind the first of them, which counts there."""
    settings = SGLangSettings(max_total_tokens=152)
    case = Case(
        name="lost-round",
        model="llama-tiny",
        num_steps=4,
        topk=4,
        num_draft_tokens=5,
        page_size=4,
        requests=tuple(
            Request(
                id=name,
                prompt=tuple(range(10 + 9 * n, 22 + 9 * n)),
                max_new_tokens=24,
                arrive=2 * n,
                penalties=Penalties(frequency=-2),
                sampling=None if n else Sampling(temperature=0.5),  # so that logits are recorded
            )
            for n, name in enumerate("abc")
        ),
        exercises=("retraction_in_decode", "penalized"),
        engine=EngineSettings(sglang=settings),
    )
    entries = ("penalties-2", "certain-node")
    patches = tuple(remedy for entry in entries if (remedy := LEDGER[entry].remedy) is not None)
    trace = overlapped.engine(case, patches).run(case, tmp_path)
    rounds = [one.numbers for one in trace.header.records if one.stage == "verify" and one.request == "c"]
    lost, again = rounds[1], rounds[2]
    assert lost["seq_len"] < again["seq_len"] < lost["new_seq_len"]
    assert judge(trace).status == "equal"


@pytest.mark.long
def test_the_candidate_fix_holds_where_a_round_is_launched_before_the_one_before_is_processed(
    overlapped: Host, tmp_path: Path
) -> None:
    case, patch = LEDGER["penalties"].case, REMEDY
    assert patch is not None
    assert judge(overlapped.engine(case, (patch,)).run(case, tmp_path)).status == "equal"
    alone = Patch(name="late", edits=FIXED[1:])
    late = judge(overlapped.engine(case, (alone,)).run(case, tmp_path))
    assert (late.status, late.rule) == ("diverged", "verify.accept")


# min_new_tokens, on the real worker with the candidate fix of penalties: until then nothing ends a request.


STOPS = tuple(range(0, 96, 2))
LEASTS = (7, 3, 0, 5)
MIN_NEW_TOKENS_CASE = Case(
    name="min-new-tokens",
    model="llama-tiny",
    num_steps=3,
    requests=tuple(
        Request(id=f"r{n}", prompt=(prompt,), max_new_tokens=12, arrive=2 * n, stop=STOPS, min_new_tokens=least)
        for n, (prompt, least) in enumerate(zip((84, 59, 9, 16), LEASTS, strict=True))
    ),
    events=(Event(at=4, kind="retract"),),
    exercises=("held_back", "early_stop", "retraction_in_decode", "batch_shrinks"),
)
PENALIZER = "sglang.srt.sampling.penaltylib.min_new_tokens.BatchedMinNewTokensPenalizer"
OWN = "(req.sampling_params.stop_token_ids or set())"

MIN_NEW_TOKENS_REMEDY = LEDGER["penalties"].remedy
assert MIN_NEW_TOKENS_REMEDY is not None
_, FIX, _ = MIN_NEW_TOKENS_REMEDY.edits  # the others are of the overlap scheduler, and of what counts by itself


def _counting(wrong: str) -> Edit:
    """The candidate fix, which counts otherwise."""
    right = "one.len_output_tokens[row] = len(sent)"
    assert right in FIX.replacement
    return replace(FIX, replacement=FIX.replacement.replace(right, f"one.len_output_tokens[row] = {wrong}"))


# Fault -> its edits.
MIN_NEW_TOKENS_PLANTED: dict[str, tuple[Edit, ...]] = {
    "one token a round is counted (live)": (),
    "the prompt counts": (_counting("len(sent) + len(req.origin_input_ids)"),),
    "one token too late": (_counting("len(sent) - 1"),),
    "a request's own stop tokens are not held back": (
        FIX,
        Edit(target=f"{PENALIZER}._prepare", match=OWN, replacement="set()"),
    ),
    "another request's least length, once a batch shrinks": (
        FIX,
        Edit(
            target=f"{PENALIZER}._filter",
            match="self.min_new_tokens = self.min_new_tokens[keep_indices]",
            replacement="self.min_new_tokens = self.min_new_tokens[: len(keep_indices)]",
        ),
    ),
    "verify does not hold back": (
        FIX,
        Edit(
            target="sglang.srt.speculative.eagle_utils.eagle_sample",
            match="if sampling_info.acc_additive_penalties is not None:",
            replacement="if False:",
        ),
    ),
}


def test_the_next_case_of_a_process_has_no_tokenizer(host: Host, tmp_path: Path) -> None:
    """Which requests with min_new_tokens alone need."""
    at = "return self.finished_reason is not None"
    looks = Edit(
        target="sglang.srt.managers.schedule_batch.Req.finished",
        match=at,
        replacement=f"assert self.sampling_params.min_new_tokens or self.tokenizer is None\n{at}",
    )
    for least, before in ((2, 0), (0, 1)):
        request = Request(id="a", prompt=(84,), max_new_tokens=4, min_new_tokens=least)
        case = replace(MIN_NEW_TOKENS_CASE, requests=(request,), events=(), exercises=())
        folder = tmp_path / str(least)
        folder.mkdir()
        trace = host.engine(case, (Patch(name="looks", edits=(looks,)),)).run(case, folder, fresh=False)
        assert (trace.header.ending.kind, trace.header.before) == ("finished", before), trace.header.ending


def test_nothing_ends_a_request_before_it_may(run: Runner) -> None:
    trace, verdict = run(MIN_NEW_TOKENS_CASE, FIX)
    assert verdict.status == "equal", verdict
    lengths = [len(trace.integers(n, "tokens")) for n, record in enumerate(trace.header.records) if record.stage == "finished"]
    assert all(length >= least for length, least in zip(sorted(lengths), sorted(LEASTS), strict=True))


@pytest.mark.parametrize("fault", spread(sorted(MIN_NEW_TOKENS_PLANTED)))
def test_a_fault_is_named_in_min_new_tokens(run: Runner, fault: str) -> None:
    _, verdict = run(replace(MIN_NEW_TOKENS_CASE, exercises=()), *MIN_NEW_TOKENS_PLANTED[fault])
    assert verdict.status == "diverged", verdict
    assert verdict.rule in {"verify.accept", "output.tokens"}
