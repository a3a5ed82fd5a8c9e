"""Requests that ask for what cannot be, on the real worker with the candidate fixes: they are judged as far as it can be, and
the verdict says from where on they are not. What the next request gets is judged as ever. Two ways in which such a request
ends SGLang's server are entries of the ledger.
"""

from pathlib import Path

import pytest
from msgspec.structs import replace

from eagletwin.cases.entry import Entry
from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.check.argument import argue
from eagletwin.harness.check.known import KnownBugMatcher
from eagletwin.harness.core.case import Case, EngineSettings, Grammar, Processor, Request, Sampling, SGLangSettings
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.run_spec import DEFAULT_RUN
from eagletwin.harness.core.verdict import DECLARED_VIEW
from eagletwin.harness.engines.host import Host
from eagletwin.harness.judge.judge import judge

from ..rows import long, spread
from .conftest import Runner
from .test_grammars import SAMPLE

OF_GUIDANCE = ("grammar-end", "guidance-end", "guidance-rollback")


def _fixes(*names: str) -> tuple[Edit, ...]:
    remedies = [LEDGER[name].remedy for name in names]
    return tuple(edit for remedy in remedies if remedy is not None for edit in remedy.edits)


GUIDANCE = EngineSettings(sglang=SGLangSettings(grammar_backend="llguidance", max_total_tokens=256))
# llguidance allows one token behind two letters, number 3, which is a d; this processor forbids it, and leaves other ds.
GRAMMAR, FORBIDS = Grammar(rules=("(a|b)(c|d)d(a|b)",)), Processor(kind="forbid", seed=10)
ASKS = Request(id="a", prompt=(33, 8, 7), max_new_tokens=8, grammar=GRAMMAR, processor=FORBIDS)
OTHER = Request(id="o", prompt=(49, 53, 5, 33), max_new_tokens=9)
CHAIN = Case(name="impossible", model="llama-tiny", num_steps=2, requests=(ASKS, OTHER), engine=GUIDANCE)
SAMPLED = Sampling(temperature=1.0, top_p=0.9, seed=3)
# Tokens that end a text, all of them stop tokens: until min_new_tokens are there, none may come.
ENDS = (7, 15, 23, 31, 38, 46, 54, 62, 69, 77, 85, 93)
TOO_LONG = replace(ASKS, processor=None, grammar=Grammar(rules=("(a|b)(c|d)",)), min_new_tokens=5, stop=ENDS)


def _with(**fields: object) -> EngineSettings:
    return replace(GUIDANCE, sglang=replace(GUIDANCE.sglang, **fields))


def _of(asks: Request, **fields: object) -> Case:
    return replace(CHAIN, requests=(asks, OTHER), **fields)


FORBIDDEN = _fixes("logit-processor", *OF_GUIDANCE)
CASES: dict[str, tuple[Case, tuple[Edit, ...]]] = {
    "chain": (CHAIN, FORBIDDEN),
    "tree": (replace(CHAIN, topk=4, num_draft_tokens=8), FORBIDDEN),
    "sampled": (_of(replace(ASKS, sampling=SAMPLED), engine=_with(deterministic=True)), FORBIDDEN),
    "with plain decode": (replace(CHAIN, engine=_with(plain_decode=True)), FORBIDDEN),
    "min_new_tokens": (_of(TOO_LONG), _fixes("penalties-2", *OF_GUIDANCE)),
    "min_new_tokens with xgrammar": (
        _of(TOO_LONG, engine=_with(grammar_backend="xgrammar")),
        _fixes("penalties-2", "grammar-end"),
    ),
}


# Left out of `a` in each of them: what gave a token where none is allowed, and all that says how it ended.
LEFT_OUT = {"output.grammar": 1, "output.tokens": 1, "output.finish": 1, "output.counts": 7, "output.stream": 3}


@pytest.mark.parametrize("name", spread(sorted(CASES), lambda name: name in ("sampled", "with plain decode")))
def test_what_cannot_be_is_not_judged_and_the_verdict_says_so(run: Runner, name: str) -> None:
    case, edits = CASES[name]
    trace, verdict = run(case, *edits)
    assert verdict.status == "equal", verdict
    assert verdict.impossible == {"a": 2}
    assert verdict.unjudged.items() >= LEFT_OUT.items(), verdict.unjudged
    aborted = {one.request: one.numbers["aborted"] for one in trace.header.records if one.stage == "finished"}
    assert aborted == {"a": 1, "o": 0}, "SGLang aborts a request whose grammar refuses a token"
    assert "request a from its output token 2 on" in " ".join(argue(trace.header, verdict).split())


@pytest.mark.long
@pytest.mark.parametrize("name", ["chain", "min_new_tokens with xgrammar"])
def test_with_overlap_too(overlapped: Host, tmp_path: Path, name: str) -> None:
    """The round that is launched when a token is refused has a mask of its grammar, as it was before."""
    case, edits = CASES[name]
    edits = (*edits, *(_fixes("guidance-refused") if name == "chain" else ()))
    verdict = judge(overlapped.engine(case, (Patch(name="fixes", edits=edits),)).run(case, tmp_path))
    assert (verdict.status, verdict.impossible) == ("equal", {"a": 2}), verdict


def test_what_can_be_is_judged_to_its_end(run: Runner) -> None:
    """xgrammar allows any token that is a d, and the processor forbids some of them."""
    case = replace(CHAIN, engine=_with(grammar_backend="xgrammar"))
    _, verdict = run(case, *_fixes("logit-processor", "grammar-end"))
    assert (verdict.status, verdict.impossible, verdict.unjudged) == ("equal", {}, {}), verdict


# The worst of the tokens that are allowed is chosen, in these rows of a batch: those of all requests, or of the first.
WORST = "; rows = next_token_logits[{}]; rows.copy_(torch.where(rows.isinf(), rows, -rows))"
MASKED = "grammar_mask.apply(next_token_logits)"


@pytest.mark.parametrize(("rows", "request_id"), [(":", "a"), (":3", "o")], ids=["before it", "of another request"])
def test_a_fault_where_a_token_is_allowed_is_named(run: Runner, rows: str, request_id: str) -> None:
    _, verdict = run(CHAIN, *FORBIDDEN, Edit(target=SAMPLE, match=MASKED, replacement=MASKED + WORST.format(rows)))
    assert (verdict.status, verdict.rule) == ("diverged", "verify.accept"), verdict
    assert verdict.impossible == {"a": 2}
    assert verdict.first is not None
    assert (verdict.first.request, verdict.first.round, verdict.first.index) == (
        request_id,
        0,
        "token committed after node 0",
    )


def test_a_request_of_which_the_end_was_never_compared_is_equal_only_where_the_case_declares_it(run: Runner) -> None:
    alone = replace(CHAIN, requests=(ASKS,))
    _, verdict = run(alone, *FORBIDDEN)
    assert (verdict.status, verdict.vacuous) == ("unknown", True)
    assert verdict.reason == verdict.gap
    assert verdict.reason.startswith("stage finished of request a was never compared (output.counts, ")
    share = verdict.shares["a"]
    assert (share.rounds_compared, share.rounds, share.rows_compared, share.rows) == (2, 2, 4, 5)
    _, declared = run(replace(alone, exercises=("impossible",)), *FORBIDDEN)
    assert (declared.status, declared.gap, declared.shares) == ("equal", "", verdict.shares)


SAMPLER, REFUSED = LEDGER["impossible-sampler"], LEDGER["guidance-refused"]
[HELD_BACK] = SAMPLER.also
[FORBIDDEN_FIRST] = SAMPLER.case.requests


def _beside(case: Case, other: Sampling | None = None, **fields: object) -> Case:
    """The case with another request, which is answered only if the server goes on. other: how that one samples."""
    [request] = case.requests
    return replace(case, requests=(replace(request, **fields), replace(OTHER, max_new_tokens=4, sampling=other)))


def _without(request: Request, **fields: object) -> Case:
    return replace(SAMPLER.case, requests=(replace(request, **fields),))


ENDS_A_SERVER = {
    "a processor": (SAMPLER, SAMPLER.case),
    "min_new_tokens": (SAMPLER, HELD_BACK),
    "beside a request": (SAMPLER, _beside(SAMPLER.case)),
    "greedy, beside one that samples": (SAMPLER, _beside(HELD_BACK, Sampling(top_k=4), sampling=None)),
    "in a tree": (SAMPLER, replace(_beside(HELD_BACK), num_steps=2, topk=2, num_draft_tokens=4)),
    "refused by llguidance": (REFUSED, REFUSED.case),
    "refused beside a request": (REFUSED, _beside(REFUSED.case)),
    "refused, with min_new_tokens": (
        REFUSED,
        replace(HELD_BACK, requests=(replace(HELD_BACK.requests[0], sampling=None, max_new_tokens=2),), engine=GUIDANCE),
    ),
}
SAYS = {SAMPLER.id: "probability tensor contains either", REFUSED.id: "doesn't satisfy the grammar"}


@pytest.mark.parametrize("overlap", [False, *long(True)], ids=["no overlap", "overlap"])
@pytest.mark.parametrize("name", spread(sorted(ENDS_A_SERVER), lambda name: ENDS_A_SERVER[name][0].id))
def test_it_ends_the_server_and_with_the_candidate_fix_itself_alone(
    host: Host, overlapped: Host, tmp_path: Path, name: str, overlap: bool
) -> None:
    entry, case = ENDS_A_SERVER[name]
    assert entry.remedy is not None
    on = overlapped if overlap else host
    for side, patches in (("red", ()), ("green", (entry.remedy,))):
        (tmp_path / side).mkdir()
        trace = on.engine(case, patches).run(case, tmp_path / side)
        verdict = judge(trace)
        if not patches:
            assert (verdict.status, verdict.rule) == ("unknown", "engine.crash"), verdict
            assert SAYS[entry.id] in verdict.reason
            continue
        assert (verdict.status, verdict.impossible) == ("equal", {"a": 0}), verdict
        ended = {one.request: one.numbers["aborted"] for one in trace.header.records if one.stage == "finished"}
        assert set(ended) == {request.id for request in case.requests}
        assert not ended.get("o", 0)


@pytest.mark.long
@pytest.mark.parametrize("entry", [SAMPLER, REFUSED], ids=["no round", "a round"])
def test_where_nothing_that_a_request_was_sent_could_be_right_the_case_says_so_or_it_is_unknown(
    host: Host, tmp_path: Path, entry: Entry
) -> None:
    assert entry.remedy is not None
    undeclared = replace(entry.case, exercises=())
    verdicts = []
    for number, case in enumerate((undeclared, entry.case, _beside(undeclared))):
        folder = tmp_path / str(number)
        folder.mkdir()
        verdicts.append(judge(host.engine(case, (entry.remedy,)).run(case, folder)))
    assert [verdict.status for verdict in verdicts] == ["unknown", "equal", "equal"]
    assert verdicts[0].reason.startswith("output.* of request a was never compared (output.counts, ")
    rounds = [(verdict.shares["a"].rounds_compared, verdict.shares["a"].rounds) for verdict in verdicts]
    assert rounds == [(0, 1 if entry is REFUSED else 0)] * 3


@pytest.mark.parametrize(
    "case",
    spread(
        [
            _without(FORBIDDEN_FIRST, processor=None),
            _without(FORBIDDEN_FIRST, grammar=None),
            _without(FORBIDDEN_FIRST, sampling=None),
            _without(FORBIDDEN_FIRST, sampling=Sampling()),
            _without(HELD_BACK.requests[0], min_new_tokens=0),
            replace(
                REFUSED.case, requests=(replace(REFUSED.case.requests[0], processor=None, grammar=Grammar(rules=("d*",))),)
            ),
        ]
    ),
    ids=["no processor", "no grammar", "greedy", "neither top_p nor top_k nor min_p", "no min_new_tokens", "it may go on"],
)
def test_nothing_ends_without_what_it_takes(run: Runner, case: Case) -> None:
    trace, _ = run(case)
    assert trace.header.ending.kind == "finished", trace.header.ending


@pytest.mark.parametrize(
    ("case", "overlap", "known"),
    [
        (SAMPLER.case, False, [SAMPLER.id]),
        *long((HELD_BACK, False, [SAMPLER.id]), (CHAIN, True, ["logit-processor", REFUSED.id])),
    ],
    ids=["a processor", "min_new_tokens", "refused in a round"],
)
def test_a_search_knows_them(host: Host, overlapped: Host, case: Case, overlap: bool, known: list[str]) -> None:
    on = overlapped if overlap else host
    matcher = KnownBugMatcher(on, replace(DEFAULT_RUN, mode=on.mode))
    one = matcher.explain(matcher.trials().look(case), DECLARED_VIEW)
    assert [entry.id for entry in one.known] == known
    assert one.trial.clean
