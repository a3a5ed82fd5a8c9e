"""Several samples of one prompt (`n`) on the real scheduler: a request of no new tokens, then as many of the same prompt."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.case import Case, EngineSettings, Logprobs, Request, Sampling, SGLangSettings
from eagletwin.harness.core.patch import Edit
from eagletwin.harness.core.records import Finish
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.engines.host import Host
from eagletwin.harness.judge.judge import judge

from ..rows import spread
from .conftest import Runner

PROMPT = tuple((31 * i + 5) % 90 for i in range(11))
CASE = Case(
    name="samples",
    model="llama-tiny",
    num_steps=3,
    page_size=4,
    requests=(
        Request(id="a", prompt=PROMPT, max_new_tokens=9, n=3, sampling=Sampling(temperature=1.5)),
        Request(id="x", prompt=PROMPT[:5], max_new_tokens=12, arrive=1),
    ),
    engine=EngineSettings(sglang=SGLangSettings(radix_cache=True, max_total_tokens=512)),
    exercises=("several_samples", "samples_share_prompt"),
)
SEEDED = replace(
    CASE,
    requests=(replace(CASE.requests[0], sampling=Sampling(temperature=1.5, seed=5)),),
    engine=EngineSettings(sglang=replace(CASE.engine.sglang, deterministic=True)),
)
OTHER = tuple(range(40, 51))
BEHIND = replace(
    CASE,
    requests=(Request(id="y", prompt=OTHER, max_new_tokens=1), replace(CASE.requests[0], arrive=3)),
)
ASKING = replace(
    CASE,
    requests=(
        Request(id="a", prompt=PROMPT, max_new_tokens=5, n=2, logprobs=Logprobs(start=3, top=2, tokens=(7,))),
        Request(id="b", prompt=PROMPT[:7], max_new_tokens=5, n=2, hidden_states="last", stop=tuple(range(0, 90, 5))),
        Request(id="c", prompt=PROMPT[:9], max_new_tokens=5, n=2, stream=True, min_new_tokens=3),
    ),
)
FINISH = "sglang.srt.managers.schedule_batch.Req.update_finish_state"
LIMIT = "sglang.srt.managers.scheduler.Scheduler.init_req_max_new_tokens"
SENT = "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept"
SEEDS = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
LOOKED_UP = "sglang.srt.managers.schedule_batch.Req.init_next_round_input"
KEY = "token_ids_to_match = self.full_untruncated_fill_ids"
CUT = "req.sampling_params.max_new_tokens = max(0, max_new_tokens)"

# Fault -> its case, its edit, and the rule that names it first.
PLANTED: dict[str, tuple[Case, Edit, str]] = {
    "a request of no new tokens is sent one": (
        CASE,
        Edit(
            target=FINISH,
            match="self.finished_len = self.sampling_params.max_new_tokens",
            replacement="self.finished_len = max(self.sampling_params.max_new_tokens, 1)",
        ),
        "output.tokens",
    ),
    "a sample ends as the first request does": (
        CASE,
        Edit(target=LIMIT, match=CUT, replacement=f"{CUT} * (not req.rid.endswith('.2'))"),
        "output.tokens",
    ),
    "the temperature of a sample is lost": (
        CASE,
        Edit(
            target=LIMIT, match=CUT, replacement=f"{CUT}\nif req.rid.endswith('.3'):\n    req.sampling_params.temperature = 1.0"
        ),
        "verify.probabilities",
    ),
    "tokens of one sample go to another": (
        CASE,
        Edit(
            target=SENT,
            match="self.rids.append(req.rid)",
            replacement="self.rids.append({'a.1': 'a.2', 'a.2': 'a.1'}.get(req.rid, req.rid))",
        ),
        "output.tokens",
    ),
    "the first request leaves nothing in the prefix cache": (
        CASE,
        Edit(
            target="sglang.srt.mem_cache.common.release_kv_cache",
            match="checkpoint = checkpoint and not req.skip_radix_cache_insert",
            replacement="checkpoint = checkpoint and req.sampling_params.max_new_tokens > 0",
        ),
        "radix.kept",
    ),
    "the token that is not sent is told no logprob": (
        ASKING,
        Edit(
            target=SENT,
            match="len(output_ids_) if req.is_retracted else max(len(output_ids_), 1)",
            replacement="len(output_ids_)",
        ),
        "output.logprobs",
    ),
    "the token that is not sent has no hidden state": (
        ASKING,
        Edit(
            target=SENT,
            match="req.hidden_states[-1] if req.hidden_states else None",
            replacement="req.hidden_states[-1] if req.hidden_states and output_ids_ else None",
        ),
        "output.hidden",
    ),
    "a sample looks its prompt up as one that nobody read": (
        BEHIND,
        Edit(target=LOOKED_UP, match=KEY, replacement=f"{KEY}[int(self.rid == 'a.2') :]"),
        "radix.hit",
    ),
    "a sample takes the rows of another prompt": (
        BEHIND,
        Edit(
            target=LOOKED_UP,
            match=KEY,
            replacement=f"{KEY}\nif self.rid == 'a.2':\n    token_ids_to_match = array('q', {[*OTHER]})",
        ),
        "target.kv",
    ),
    "samples of one seed draw other coins": (
        SEEDED,
        Edit(
            target=SEEDS,
            match="r.sampling_params.sampling_seed\n                    if",
            replacement="r.sampling_params.sampling_seed + (r.rid == 'a.2')\n                    if",
        ),
        "verify.coins",
    ),
}


def finished(trace: Trace) -> dict[str, tuple[int, list[int]]]:
    """By request: the iteration in which its end was seen, and what it was sent."""
    records = enumerate(trace.header.records)
    return {one.request: (one.iteration, trace.integers(n, "tokens")) for n, one in records if one.stage == "finished"}


def samples(trace: Trace) -> Sequence[list[int]]:
    return [tokens for name, (_, tokens) in finished(trace).items() if name in ("a.1", "a.2", "a.3")]


def test_the_prompt_is_read_once_and_then_its_samples_come_at_once(run: Runner) -> None:
    trace, verdict = run(CASE)
    assert verdict.status == "equal", (verdict.rule, verdict.reason, verdict.first)
    assert {"several_samples", "samples_share_prompt"} <= {*verdict.exercised}
    ends, work = finished(trace), [one for one in trace.header.records if one.stage in ("prefill", "verify")]
    assert [one.stage for one in work if one.request == "a.0"] == ["prefill"]
    assert ends["a.0"][1] == []
    said = next(one.numbers for one in trace.header.records if one.stage == "finished" and one.request == "a.0")
    assert (said["finish"], said["finish_length"], said["completion_tokens"]) == (Finish.LENGTH, 0, 0)
    starts = [
        (one.iteration, one.numbers["start"]) for one in work if one.stage == "prefill" and one.request in ("a.1", "a.2", "a.3")
    ]
    assert starts == [(ends["a.0"][0], 8)] * 3  # of 11 tokens, whole pages of 4
    assert all(len(tokens) == 9 for tokens in samples(trace))


def test_coins_that_are_drawn_give_samples_that_differ_and_one_seed_gives_one_sample(run: Runner) -> None:
    drawn, _ = run(CASE)
    assert len(set(map(tuple, samples(drawn)))) == 3
    hashed, verdict = run(SEEDED)
    assert verdict.status == "equal", (verdict.rule, verdict.reason, verdict.first)
    assert len(samples(hashed)) == 3
    assert len(set(map(tuple, samples(hashed)))) == 1


def test_what_samples_ask_for_is_told_of_no_token_by_the_request_before_them(run: Runner) -> None:
    """It is told of the token that would have been its first: logprobs, and the last hidden state."""
    trace, verdict = run(ASKING)
    assert verdict.status == "equal", (verdict.rule, verdict.reason, verdict.first)
    numbers = {one.request: n for n, one in enumerate(trace.header.records) if one.stage == "finished"}
    assert trace.integers(numbers["a.0"], "logprobs_sent") == [1]
    assert trace.integers(numbers["b.0"], "given_counts") == [1]
    assert all(verdict.checked[rule] for rule in ("output.logprobs", "output.hidden", "output.stream"))


def test_the_request_before_samples_is_given_the_states_of_its_prompt(run: Runner) -> None:
    """Which 0.5.23 throws away: the entry `hidden-no-tokens`."""
    remedy = LEDGER["hidden-no-tokens"].remedy
    assert remedy is not None
    case = replace(CASE, requests=(replace(CASE.requests[0], hidden_states="all", sampling=None, n=2),), exercises=())
    trace, verdict = run(case, *remedy.edits)
    assert verdict.status == "equal", (verdict.rule, verdict.reason, verdict.first)
    numbers = {one.request: n for n, one in enumerate(trace.header.records) if one.stage == "finished"}
    assert trace.integers(numbers["a.0"], "given_entries") == [len(PROMPT)]
    assert verdict.checked["output.hidden"] > 3
    _, verdict = run(case)
    assert (verdict.rule, verdict.first and verdict.first.request) == ("output.hidden", "a.0")


@pytest.mark.long
def test_without_a_prefix_cache_each_sample_reads_the_prompt_anew(run: Runner) -> None:
    case = replace(
        CASE, engine=EngineSettings(sglang=replace(CASE.engine.sglang, radix_cache=False)), exercises=("several_samples",)
    )
    trace, verdict = run(case)
    assert verdict.status == "equal", (verdict.rule, verdict.reason, verdict.first)
    assert "samples_share_prompt" not in verdict.exercised
    assert {one.numbers["start"] for one in trace.header.records if one.stage == "prefill"} == {0}


@pytest.mark.parametrize("fault", spread(sorted(PLANTED), lambda fault: PLANTED[fault][-1].partition(".")[0]))
def test_a_planted_fault_is_named_by_its_rule(run: Runner, fault: str) -> None:
    case, edit, rule = PLANTED[fault]
    _, verdict = run(case, edit)
    assert (verdict.status, verdict.rule) == ("diverged", rule), (verdict.reason, verdict.first)


def test_a_prompt_that_is_not_kept_is_seen_by_no_other_rule(run: Runner) -> None:
    case, edit, rule = PLANTED["the first request leaves nothing in the prefix cache"]
    trace, _ = run(replace(case, exercises=("several_samples",)), edit)
    assert judge(trace, frozenset({rule})).status == "equal"


@pytest.mark.long
def test_a_case_that_is_run_step_by_step_may_want_samples_on_the_way(host: Host, tmp_path: Path) -> None:
    begun = replace(CASE, requests=CASE.requests[1:], exercises=())
    session = host.engine(begun).session(begun, tmp_path)
    session.step()
    session.step(requests=(replace(CASE.requests[0], id="late", sampling=None),))
    trace = session.finish()
    assert session.case.requests[-1].n == 3
    assert {"late.0", "late.1", "late.2", "late.3"} <= finished(trace).keys()
    verdict = judge(trace)
    assert verdict.status == "equal", (verdict.rule, verdict.reason, verdict.first)
    assert "several_samples" in verdict.exercised
