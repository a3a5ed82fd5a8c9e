"""What requests ask for beside their tokens: processors, biases and min_p, on the real worker with the candidate fixes."""

import pytest
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.case import Bias, Case, Processor, Request, Sampling
from eagletwin.harness.core.patch import Edit
from eagletwin.harness.families.dimensions.dimension import tokens

from ..rows import spread
from .conftest import Runner

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
