"""Penalties on tokens that a request was sent before, on the real worker with the candidate fix."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.case import Case, EngineSettings, Event, Penalties, Request, Sampling, SGLangSettings
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.engines.host import Host
from eagletwin.harness.judge.judge import judge

from ..rows import spread
from .conftest import Runner

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
SAMPLE = "sglang.srt.speculative.eagle_utils.eagle_sample"
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
PLANTED: dict[str, tuple[tuple[Edit, ...], str]] = {
    "the last token of each round alone is counted (live)": ((), "verify.accept"),
    "verify leaves additive penalties out": (
        (*FIXED, Edit(target=SAMPLE, match="if sampling_info.acc_additive_penalties is not None:", replacement="if False:")),
        "verify.accept",
    ),
    "verify leaves the scaling out": (
        (*FIXED, Edit(target=SAMPLE, match="if sampling_info.acc_scaling_penalties is not None:", replacement="if False:")),
        "verify.accept",
    ),
    "verify takes another request's penalties": (
        (
            *FIXED,
            Edit(
                target=SAMPLE,
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


def test_with_the_candidate_fix_all_is_equal_and_it_mattered(run: Runner) -> None:
    _, verdict = run(CASE, *FIXED)
    assert verdict.status == "equal", verdict


@pytest.mark.parametrize("fault", spread(sorted(PLANTED), lambda fault: PLANTED[fault][-1]))
def test_a_fault_is_named(run: Runner, fault: str) -> None:
    edits, rule = PLANTED[fault]
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
