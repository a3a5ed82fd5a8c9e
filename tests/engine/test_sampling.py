"""Requests that sample: the worker as it is, faults planted in it, and where top_k, top_p and min_p cut."""

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from eagletwin.harness.core.case import Bias, Case, EngineSettings, Grammar, Request, Sampling, SGLangSettings
from eagletwin.harness.core.patch import Edit
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.core.verdict import Verdict
from eagletwin.harness.engines.host import Host
from eagletwin.harness.families.dimensions.dimension import tokens
from eagletwin.harness.judge.judge import judge
from eagletwin.harness.judge.provenance import rejudge_with_context
from eagletwin.harness.judge.replay import replay_requests
from eagletwin.harness.judge.rules.sessions import with_full_prompts
from eagletwin.harness.judge.trace_diff import diff
from eagletwin.harness.page.run import tables_of

from ..rows import long, spread
from .conftest import Runner

# Requests that sample: the worker as it is, faults planted in it, and numbers changed in its traces.


UTILS = "sglang.srt.speculative.eagle_utils"
WORKER = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker"
INPUT = "sglang.srt.speculative.eagle_info.EagleDraftInput"
PROPOSAL = "sglang.srt.speculative.spec_utils.sample_draft_proposal"

WAYS = (Sampling(temperature=1.6, top_k=8), Sampling(temperature=0.7, top_p=0.9), None, Sampling(temperature=0.5))


def _case(name: str, topk: int, *, rejection: bool, seed: int = 0) -> Case:
    """Four requests that come one after another and end at different times: the batch grows and shrinks."""
    return Case(
        name=name,
        model="llama-tiny",
        num_steps=3,
        topk=topk,
        num_draft_tokens=9 if topk > 1 else 0,
        requests=tuple(
            Request(id=f"r{n}", prompt=tokens(n, 5 + n, 96), max_new_tokens=14 - 2 * n, arrive=2 * n, sampling=way)
            for n, way in enumerate(WAYS)
        ),
        engine=EngineSettings(sglang=SGLangSettings(rejection_sampling=rejection, random_seed=seed)),
    )


CHAIN, TREE = _case("chain", 1, rejection=False), _case("tree", 3, rejection=False)
REJECTION = _case("rejection", 1, rejection=True)
SEEDED = replace(
    TREE,
    name="seeded",
    requests=tuple(
        replace(request, sampling=replace(request.sampling or Sampling(top_k=1), seed=7 + n))
        for n, request in enumerate(TREE.requests)
    ),
    engine=EngineSettings(sglang=SGLangSettings(deterministic=True)),
)


def test_thresholds_accept_more(run: Runner) -> None:
    """As many as the reference's do. Held to thresholds of 1, the same trace has decisions that no coin allows."""
    settings = replace(TREE.engine.sglang, accept_single=0.3, accept_acc=0.6)
    trace, verdict = run(replace(TREE, name="thresholds", engine=EngineSettings(sglang=settings)))
    assert verdict.status == "equal", verdict
    exact = judge(Trace(replace(trace.header, case=TREE), trace.tensors))
    assert (exact.status, exact.rule) == ("diverged", "verify.accept")


@pytest.mark.parametrize("case", [CHAIN, TREE, REJECTION, *long(SEEDED)], ids=lambda case: case.name)
def test_the_worker_samples_as_the_reference_does(run: Runner, case: Case) -> None:
    trace, verdict = run(case)
    assert verdict.status == "equal", verdict
    assert {"sampled_verify", "coin_refuses", "mixed_sampling", "batch_grows", "batch_shrinks"} <= set(verdict.exercised)
    assert trace.header.fallbacks == ()  # the kernel that hashes seeds, too
    assert verdict.checked["verify.coins"] >= 10
    assert verdict.checked["verify.probabilities"] >= 20
    assert (verdict.checked.get("draft.probabilities", 0) > 0) == case.engine.sglang.rejection_sampling
    assert ("verify.coins" in verdict.unseen) == (case is not SEEDED)  # the coins of a seed are known
    assert verdict.unseen["output.tokens"] == 3  # the first token of each request that samples
    again, _ = run(case)
    kept = [(number, name) for number, record in enumerate(trace.header.records) for name in record.tensors]
    assert all(torch.equal(again.tensor(*key), trace.tensor(*key)) for key in kept), "other coins"


def test_a_greedy_request_with_a_temperature_is_drafted_at_it(run: Runner) -> None:
    """It takes the best of all tokens; what a batch that samples makes of its draft's logits is at its temperature."""
    requests = tuple(
        replace(request, sampling=request.sampling or Sampling(temperature=0.5, top_k=1)) for request in REJECTION.requests
    )
    trace, verdict = run(replace(REJECTION, name="greedy-at-half", requests=requests))
    assert verdict.status == "equal", verdict
    assert any(record.request == "r2" and "draft_probabilities" in record.tensors for record in trace.header.records)


def test_a_greedy_case_is_run_without_the_shims_of_sampling(run: Runner) -> None:
    greedy = replace(CHAIN, requests=tuple(replace(request, sampling=None) for request in CHAIN.requests))
    trace, verdict = run(greedy)
    assert verdict.status == "equal", verdict
    assert not any("sampling_ops" in shim or "greedy" in shim for shim in trace.header.engine.shims)
    assert not any("coins" in record.tensors for record in trace.header.records)


# Fault -> the case that shows it, the edit, the rule
PLANTED: dict[str, tuple[Case, Edit, str]] = {
    "the refused draft token is emitted": (
        REJECTION,
        Edit(
            target=f"{UTILS}.eagle_sample",
            match="del (\n",
            replacement="""for b in range(bs):
    n = int(num_correct_drafts[b])
    if n + 1 < verify_input.draft_token_num:
        predict[accept_index[b, n].long()] = candidates[b, n + 1].int()
del (
""",
        ),
        "verify.accept",
    ),
    "the token after a refusal is drawn from p, not from what q leaves of it": (
        REJECTION,
        Edit(
            target=f"{UTILS}.eagle_sample",
            match="del (\n",
            replacement="""for b in range(bs):
    n = int(num_correct_drafts[b])
    sums = target_probs[b, n].cumsum(0)
    predict[accept_index[b, n].long()] = (sums > coins_for_final_sampling[b] * sums[-1]).int().argmax().int()
del (
""",
        ),
        "verify.accept",
    ),
    "all requests of a batch have the first one's coins": (
        TREE,
        Edit(
            target=f"{UTILS}.eagle_sample", match="uniform_samples=coins,", replacement="uniform_samples=coins[:1] + 0 * coins,"
        ),
        "verify.coins",
    ),
    "coins are made smaller, so that more is accepted": (
        TREE,
        Edit(target=f"{UTILS}.eagle_sample", match="uniform_samples=coins,", replacement="uniform_samples=coins * 0.97,"),
        "verify.coins",
    ),
    "final coins are made smaller, so that the last tokens are rarer": (
        CHAIN,
        Edit(
            target=f"{UTILS}._verify_coins",
            match="return coins, coins_for_final_sampling",
            replacement="return coins, coins_for_final_sampling * 0.97",
        ),
        "verify.coins",
    ),
    "a node has the coin of the next one": (
        SEEDED,
        Edit(
            target=f"{UTILS}._seeded_verify_coins",
            match="uniforms[:, :draft_token_num]",
            replacement="uniforms[:, 1 : draft_token_num + 1]",
        ),
        "verify.coins",
    ),
    "coins are hashed from the length of another request": (
        SEEDED,
        Edit(
            target=f"{UTILS}._seeded_verify_coins",
            match="seq_lens.to(torch.uint64)",
            replacement="seq_lens.flip(0).to(torch.uint64)",
        ),
        "verify.coins",
    ),
    "top_p is ignored": (
        CHAIN,
        Edit(target=f"{UTILS}.eagle_sample", match="if sampling_info.need_top_p_sampling:", replacement="if False:"),
        "verify.probabilities",
    ),
    "top_k is ignored": (
        TREE,
        Edit(target=f"{UTILS}.eagle_sample", match="if sampling_info.need_top_k_sampling:", replacement="if False:"),
        "verify.probabilities",
    ),
    "a request is verified at the temperature of another": (
        TREE,
        Edit(
            target=f"{UTILS}.eagle_sample",
            match="sampling_info.temperatures, verify_input",
            replacement="sampling_info.temperatures.flip(0), verify_input",
        ),
        "verify.probabilities",
    ),
    "requests that sample are verified greedily": (
        CHAIN,
        Edit(target=f"{UTILS}.eagle_sample", match="if _verify_uses_greedy(", replacement="if True or _verify_uses_greedy("),
        "verify.accept",
    ),
    "the draft ignores the temperature": (
        REJECTION,
        Edit(
            target=PROPOSAL,
            match="sampling_softmax(next_token_logits, temperatures=temperatures)",
            replacement="sampling_softmax(next_token_logits)",
        ),
        "draft.probabilities",
    ),
    "what drafts were drawn from is a step late": (
        REJECTION,
        Edit(
            target=f"{WORKER}.draft_forward",
            match="torch.stack(draft_probs_list, dim=1)",
            replacement="torch.stack(draft_probs_list, dim=1).roll(1, 1)",
        ),
        "draft.probabilities",
    ),
    "who leaves the batch leaves what its draft was drawn from": (
        REJECTION,
        Edit(
            target=f"{INPUT}.filter_batch",
            match="self.draft_probs[new_indices]",
            replacement="self.draft_probs[: len(new_indices)]",
        ),
        "draft.probabilities",
    ),
    "who joins the batch has what others' drafts were drawn from": (
        REJECTION,
        Edit(
            target=f"{INPUT}.merge_batch",
            match="torch.cat([self.draft_probs, spec_info.draft_probs])",
            replacement="torch.cat([spec_info.draft_probs, self.draft_probs])",
        ),
        "draft.probabilities",
    ),
    "greedy requests draft by chance": (
        REJECTION,
        Edit(target=PROPOSAL, match="if top_ks is not None:", replacement="if False:"),
        "draft.proposal",
    ),
    "the first token is drawn from all": (
        CHAIN,
        Edit(
            target="sglang.srt.layers.sampler.top_k_top_p_min_p_sampling_from_probs_torch",
            match="torch.gather(probs_idx, dim=1, index=sampled_index).view(-1)",
            replacement="torch.gather(probs_idx, dim=1, index=sampled_index).view(-1) * 0 + 17",
        ),
        "output.tokens",
    ),
}


@pytest.mark.parametrize("fault", spread(sorted(PLANTED), lambda fault: PLANTED[fault][-1]))
def test_a_fault_in_sampling_is_found_and_named(run: Runner, fault: str) -> None:
    case, edit, rule = PLANTED[fault]
    trace, verdict = run(case, edit)
    assert (verdict.status, verdict.rule) == ("diverged", rule), (verdict, trace.header.ending)


@pytest.fixture(scope="module")
def drawn(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return host.engine(REJECTION).run(REJECTION, tmp_path_factory.mktemp("drawn"))


@pytest.mark.parametrize(
    ("tensor", "value", "rule"),
    [
        ("coins", 1.0, "verify.coins"),
        ("final_coins", -0.1, "verify.coins"),
        ("coins", float("nan"), "verify.coins"),
        ("coins", 0.1, "verify.coins"),
        ("final_coins", float("nan"), "verify.coins"),
        ("target_probabilities", 0.5, "verify.probabilities"),
        ("draft_probabilities", 0.5, "draft.probabilities"),
        ("target_probabilities", float("nan"), "verify.probabilities"),
        ("target_logits", 0.5, "verify.probabilities"),
        ("target_logits", float("nan"), "verify.probabilities"),
    ],
)
def test_a_number_that_changes_is_seen(drawn: Trace, tensor: str, value: float, rule: str) -> None:
    """Of a round that accepted a draft token by a coin: its first number."""
    number = next(
        n
        for n, record in enumerate(drawn.header.records)
        if record.stage == "verify" and record.request == "r0" and record.numbers["accept_len"] > 1
    )
    changed = drawn.tensor(number, tensor).clone()
    changed.view(-1)[0] = value
    verdict = judge(Trace(drawn.header, drawn.tensors | {f"{number}.{tensor}": changed}))
    assert (verdict.status, verdict.rule) == ("diverged", rule), verdict


@pytest.mark.parametrize("tensor", ["coins", "final_coins"])
@pytest.mark.parametrize("stale", ["since the round before", "in all of the batch"])
def test_single_coins_that_are_drawn_too_rarely_are_seen(drawn: Trace, tensor: str, stale: str) -> None:
    """The last coin of each round, which decides nothing or the bonus token, as it was drawn for another one."""
    same, changed = {}, dict(drawn.tensors)
    for number, record in enumerate(drawn.header.records):
        if record.stage == "verify" and "coins" in record.tensors:
            coins = drawn.tensor(number, tensor).clone()
            key = record.request if stale == "since the round before" else record.forward
            coins[-1] = same.setdefault(key, coins[-1])
            changed[f"{number}.{tensor}"] = coins
    verdict = judge(Trace(drawn.header, changed))
    assert verdict.status == "diverged"
    assert "verify.coins" in {verdict.rule, *verdict.later}, verdict


@pytest.mark.parametrize(("tensor", "values"), [*long(("final_coins", (0.0, 0.9999))), ("coins", (0.9999999,))])
def test_other_coins_would_have_decided_otherwise(drawn: Trace, tensor: str, values: tuple[float, ...]) -> None:
    """Of each round of a request; but for some in which no coin decides (p > q)."""
    rounds = [n for n, record in enumerate(drawn.header.records) if record.stage == "verify" and record.request == "r0"]
    seen = 0
    for number in rounds:
        verdicts = []
        for value in values:
            coins = torch.full_like(drawn.tensor(number, tensor), value)
            verdicts.append(judge(Trace(drawn.header, drawn.tensors | {f"{number}.{tensor}": coins})))
        assert {verdict.rule for verdict in verdicts} <= {"verify.accept", ""}
        seen += any(verdict.status == "diverged" for verdict in verdicts)
    assert seen >= (len(rounds) if tensor == "final_coins" else 2), seen


def test_a_trace_without_its_coins_is_no_verdict(drawn: Trace) -> None:
    """A tap that records nothing looks like a worker that verified greedily: that is said, and is not equal."""
    records = tuple(
        replace(record, tensors=tuple(name for name in record.tensors if name != "coins")) for record in drawn.header.records
    )
    assert judge(Trace(replace(drawn.header, records=records), drawn.tensors)).status == "diverged"
    short = {name: tensor[:-1] if name.endswith(".draft_probabilities") else tensor for name, tensor in drawn.tensors.items()}
    assert judge(Trace(drawn.header, short)).status != "equal"


# Where top_k, top_p and min_p cut: told by the worker's own logits, where the bound of the reference's leaves it open.


SAMPLE = "sglang.srt.speculative.eagle_utils.eagle_sample"

# Each top_p is 0.0001 below a sum of the largest probabilities of the one distribution that its request is verified by. The
# logits are as large as 15: within their bound the token that reaches this sum may be the last one kept, or the next one.
CLOSE = Case(
    name="close",
    model="llama-tiny",
    num_steps=2,
    topk=1,
    requests=tuple(
        Request(id=f"r{n}", prompt=tokens(n, 5 + n, 96), max_new_tokens=2, sampling=Sampling(temperature=3.0, top_p=top_p))
        for n, top_p in enumerate((0.9039, 0.90324, 0.90575, 0.90001))
    ),
    engine=EngineSettings(sglang=SGLangSettings(random_seed=3)),
)
ONE_MORE = Edit(
    target=SAMPLE, match="sampling_info.top_ps, verify_input", replacement="sampling_info.top_ps + 2e-4, verify_input"
)


def rounds(trace: Trace) -> list[int]:
    return [number for number, record in enumerate(trace.header.records) if record.stage == "verify"]


def test_what_no_reference_can_tell_is_told_by_the_workers_own_logits(run: Runner) -> None:
    _, verdict = run(CLOSE)
    assert verdict.status == "equal", verdict
    assert verdict.checked["verify.probabilities"] == 4
    assert "verify.probabilities" not in verdict.unseen
    assert verdict.headroom < 0.5


def test_a_cut_that_keeps_one_token_more_is_named_where_it_was_excused(run: Runner) -> None:
    trace, verdict = run(CLOSE, ONE_MORE)
    assert (verdict.status, verdict.rule) == ("diverged", "verify.probabilities"), verdict
    assert verdict.first is not None
    assert verdict.first.index.startswith("logarithms of what follows accepted node 0")
    assert verdict.later["verify.probabilities"] == 3
    for number in rounds(trace):
        own, kept = trace.tensor(number, "target_logits")[0], trace.tensor(number, "target_probabilities")[0] > 0
        top_p = next(one for one in CLOSE.requests if one.id == trace.header.records[number].request).sampling.top_p  # type: ignore[union-attr]
        sums = (own.double() / 3).softmax(-1).sort(descending=True).values.cumsum(0)
        assert int(kept.sum()) == int((sums < top_p).sum()) + 2


def test_what_is_shown_of_a_wrong_cut_is_measured_by_its_own_bound(run: Runner) -> None:
    """Roundings of float32, and not a share of the largest logarithm."""
    trace, verdict = run(CLOSE, ONE_MORE)
    closer = rejudge_with_context(trace, verdict)
    assert closer is not None
    logits, chances = tables_of(closer, None)[0].rows
    assert logits.cells[1].text.endswith("times the bound")
    assert float(logits.cells[1].text.split()[0]) < 0.1
    assert float(chances.cells[1].text.split()[0]) > 1000
    assert (logits.kind, chances.kind) == ("", "wrong")


def test_a_trace_must_have_the_logits(run: Runner) -> None:
    trace, _ = run(CLOSE)
    records = tuple(
        replace(record, tensors=tuple(name for name in record.tensors if name != "target_logits"))
        for record in trace.header.records
    )
    verdict = judge(Trace(replace(trace.header, records=records), trace.tensors))
    assert (verdict.status, verdict.reason) == ("unknown", "the trace is not complete: no target_logits of a verify record")
    number = rounds(trace)[0]
    short = judge(Trace(trace.header, trace.tensors | {f"{number}.target_logits": trace.tensor(number, "target_logits")[:0]}))
    assert short.status == "unknown"
    assert "rows of target_logits" in short.reason


GRAMMAR = Case(
    name="forbidden",
    model="llama-tiny",
    num_steps=2,
    topk=1,
    requests=(
        Request(
            id="a",
            prompt=tokens(0, 5, 96),
            max_new_tokens=8,
            sampling=Sampling(temperature=1.6, top_p=0.9),
            grammar=Grammar(rules=("(a|b|c)*",)),
            logit_bias=(Bias(token=3, value=2.0), Bias(token=7, value=-100.0)),
        ),
        Request(id="b", prompt=tokens(1, 6, 96), max_new_tokens=8),
    ),
)


@pytest.fixture(scope="module")
def forbidden(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return host.engine(GRAMMAR).run(GRAMMAR, tmp_path_factory.mktemp("forbidden"))


def of_request(trace: Trace, request: str) -> int:
    return next(number for number in rounds(trace) if trace.header.records[number].request == request)


def with_logits(trace: Trace, number: int, logits: Tensor) -> Verdict:
    return judge(Trace(trace.header, trace.tensors | {f"{number}.target_logits": logits}))


def test_the_logits_are_those_that_a_request_wants_changed(forbidden: Trace) -> None:
    """A grammar forbids tokens, a bias is added; and the greedy request next to it has neither."""
    assert judge(forbidden).status == "equal", judge(forbidden)
    assert bool(forbidden.tensor(of_request(forbidden, "a"), "target_logits").isneginf().any())
    assert bool(forbidden.tensor(of_request(forbidden, "b"), "target_logits").isfinite().all())


@pytest.mark.parametrize("request_id", ["a", "b"])
@pytest.mark.parametrize("value", [0.5, float("nan"), float("inf"), float("-inf"), 1e38])
def test_a_logit_that_changes_is_seen(forbidden: Trace, request_id: str, value: float) -> None:
    """One that is finite."""
    number = of_request(forbidden, request_id)
    logits = forbidden.tensor(number, "target_logits").clone()
    at = int(logits[0].isfinite().nonzero()[0])
    logits[0, at] = value
    verdict = with_logits(forbidden, number, logits)
    assert (verdict.status, verdict.rule) == ("diverged", "verify.probabilities"), verdict
    assert verdict.first is not None
    assert verdict.first.index.startswith(f"logits of what follows accepted node 0, element {at}")


def test_a_token_that_is_no_longer_forbidden_is_seen(forbidden: Trace) -> None:
    number = of_request(forbidden, "a")
    logits = forbidden.tensor(number, "target_logits").clone()
    at = int(logits[0].isneginf().nonzero()[0])
    logits[0, at] = 0.0
    verdict = with_logits(forbidden, number, logits)
    assert (verdict.status, verdict.rule) == ("diverged", "verify.probabilities"), verdict


@pytest.mark.parametrize(("share", "status"), [(0.9, "equal"), (1.2, "diverged")])
def test_the_bound_of_logits_is_not_that_of_a_bias(forbidden: Trace, share: float, status: str) -> None:
    """It is a ten-thousandth of the largest logit without the bias of -100, which token 7 has."""
    number = of_request(forbidden, "a")
    logits = forbidden.tensor(number, "target_logits")
    assert float(logits[0, 7]) < -90
    before = logits[0].clone()
    before[7] += 100
    largest = float(before[before.isfinite()].abs().max())
    off = torch.zeros_like(logits)
    off[0, 7] = share * 1e-4 * largest
    verdict = with_logits(forbidden, number, logits + off)
    assert (verdict.status, verdict.rule) == (status, "verify.probabilities" if status == "diverged" else ""), verdict


@pytest.mark.parametrize(("share", "same"), [(0.9, True), (1.2, False)])
def test_a_bias_of_a_forbidden_token_widens_no_bound_of_two_traces(forbidden: Trace, share: float, same: bool) -> None:
    """Of the token that has a bias of -100 nothing is left, so its row's magnitude is that of the others."""
    number = of_request(forbidden, "a")
    logits = forbidden.tensor(number, "target_logits")
    gone = int(logits[0].isneginf().nonzero()[0])
    biased = replace(GRAMMAR.requests[0], logit_bias=(*GRAMMAR.requests[0].logit_bias, Bias(token=gone, value=-100.0)))
    header = replace(forbidden.header, case=replace(GRAMMAR, requests=(biased, *GRAMMAR.requests[1:])))
    story = replay_requests(with_full_prompts(forbidden), "slot_layout")["a"]
    assert story.target.plain is not None
    round = story.rounds[forbidden.header.records[number].round]
    off = torch.zeros_like(logits)
    finite = logits[0].isfinite()
    finite[7] = False
    largest = max(float(logits[0][finite].abs().max()), float(abs(story.target.plain[round.committed]).max()))
    off[0, int(finite.nonzero()[0])] = share * 1e-4 * largest
    moved = Trace(header, forbidden.tensors | {f"{number}.target_logits": logits + off})
    logits_apart = [one for one in diff(Trace(header, forbidden.tensors), moved).differences if "target_logits" in one.where]
    assert [one.bits for one in logits_apart] == [same]


NOT_AGAIN = """target_probs = torch.where(
    target_probs > 0, sampling_softmax(next_token_logits, temperatures=expanded_temperature), 0.0
)"""


@pytest.mark.parametrize(
    "edit",
    [
        Edit(target=SAMPLE, match="sampling_info.top_ks, verify_input", replacement="sampling_info.top_ks + 1, verify_input"),
        Edit(
            target=SAMPLE, match="sampling_info.top_ps, verify_input", replacement="sampling_info.top_ps * 0.97, verify_input"
        ),
        Edit(
            target=SAMPLE,
            match='maybe_detect_nan(target_probs, "v2 verify: target_probs after top_k_renorm")',
            replacement=NOT_AGAIN,
        ),
    ],
    ids=["top_k is off by one", "top_p is less", "top_p cuts what top_k left without making it 1 again"],
)
def test_a_cut_that_is_made_otherwise_is_named(run: Runner, edit: Edit) -> None:
    ways = Sampling(temperature=1.6, top_k=8), Sampling(temperature=3.0, top_k=24, top_p=0.9), Sampling(temperature=0.7)
    requests = tuple(
        Request(id=f"r{n}", prompt=tokens(n, 5 + n, 96), max_new_tokens=8, sampling=way) for n, way in enumerate(ways)
    )
    _, verdict = run(replace(CLOSE, name="cut", requests=requests), edit)
    assert (verdict.status, verdict.rule) == ("diverged", "verify.probabilities"), verdict
