"""Requests that ask for what cannot be, on the real worker with the candidate fixes: they are judged as far as it can be, and
the verdict says from where on they are not. What the next request gets is judged as ever.
"""

from pathlib import Path

import pytest
from msgspec.structs import replace

from eagletwin.cases.regressions import LEDGER
from eagletwin.harness.check.argument import argue
from eagletwin.harness.core.case import Case, EngineSettings, Grammar, Processor, Request, Sampling, SGLangSettings
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.engines.host import Host
from eagletwin.harness.judge.judge import judge

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


@pytest.mark.parametrize("name", sorted(CASES))
def test_what_cannot_be_is_not_judged_and_the_verdict_says_so(run: Runner, name: str) -> None:
    case, edits = CASES[name]
    trace, verdict = run(case, *edits)
    assert verdict.status == "equal", verdict
    assert verdict.impossible == {"a": 2}
    assert verdict.unjudged.items() >= LEFT_OUT.items(), verdict.unjudged
    aborted = {one.request: one.numbers["aborted"] for one in trace.header.records if one.stage == "finished"}
    assert aborted == {"a": 1, "o": 0}, "SGLang aborts a request whose grammar refuses a token"
    assert "request a from its output token 2 on" in " ".join(argue(trace.header, verdict).split())


def test_with_overlap_too(overlapped: Host, tmp_path: Path) -> None:
    """With llguidance a refused token ends the server there: its next mask is asked of a matcher that has failed."""
    case, edits = CASES["min_new_tokens with xgrammar"]
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
