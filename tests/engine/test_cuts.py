"""Where top_k, top_p and min_p cut: told by the worker's own logits, where the bound of the reference's leaves it open."""

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
from eagletwin.harness.judge.rules.sessions import as_asked
from eagletwin.harness.judge.trace_diff import diff
from eagletwin.harness.page.run import tables_of

from .conftest import Runner
from .schemas import as_of_schema_3

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
    trace, verdict = run(CLOSE)
    assert verdict.status == "equal", verdict
    assert verdict.checked["verify.probabilities"] == 4
    assert "verify.probabilities" not in verdict.unseen
    assert verdict.headroom < 0.5
    before = judge(as_of_schema_3(trace))
    assert (before.status, before.undecided, before.unseen["verify.probabilities"]) == ("unknown", True, 4)
    assert before.reason == "where top_k and top_p cut cannot be told of 4 distributions, within the bound of float32"


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
    assert judge(as_of_schema_3(trace)).status == "unknown"


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


def test_a_trace_of_this_schema_must_have_the_logits(run: Runner) -> None:
    trace, _ = run(CLOSE)
    older = as_of_schema_3(trace)
    verdict = judge(Trace(replace(older.header, schema=trace.header.schema), older.tensors))
    assert (verdict.status, verdict.reason) == ("unknown", "the trace is not complete: no target_logits of a verify record")
    number = rounds(trace)[0]
    short = judge(Trace(trace.header, trace.tensors | {f"{number}.target_logits": trace.tensor(number, "target_logits")[:0]}))
    assert short.status == "unknown"
    assert "rows of target_logits" in short.reason


def test_a_trace_of_an_older_schema_is_compared_without_them(run: Runner) -> None:
    trace, _ = run(CLOSE)
    older = as_of_schema_3(trace)
    assert diff(trace, older).same
    assert not diff(trace, Trace(replace(older.header, schema=trace.header.schema), older.tensors)).same


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
    story = replay_requests(as_asked(forbidden), "slot_layout")["a"]
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
