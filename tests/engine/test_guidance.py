"""Requests with grammars on the real worker with llguidance, with the candidate fixes of its bugs: what is allowed, and where a
text ends. What the judge expects is what llguidance says of drawn grammars, asked by itself.
"""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, grammar_from
from llguidance.torch import allocate_token_bitmask, fill_next_token_bitmask
from msgspec.structs import replace

from eagletwin.cases.blocks import Asked, block_of
from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.case import Case, EngineSettings, Event, Grammar, SGLangSettings
from eagletwin.harness.core.grammar import as_ebnf, word
from eagletwin.harness.core.patch import Edit
from eagletwin.harness.engines.sglang.grammars import words_of
from eagletwin.harness.families.dimensions.grammar import grammars
from eagletwin.harness.judge.request_logits import allowed

from ..rows import spread
from .conftest import Runner
from .test_grammars import CHAIN, ENDS
from .test_grammars import PLANTED as OF_ANY_BACKEND

REMEDIES = [LEDGER[name].remedy for name in ("grammar-end", "guidance-end", "guidance-rollback")]
FIXED = tuple(edit for remedy in REMEDIES if remedy is not None for edit in remedy.edits)
assert len(FIXED) == len(REMEDIES)

BACKEND = "sglang.srt.constrained.llguidance_backend"
# With the second, most places have one way to go on, which is written in one way alone. With the third of CHAIN llguidance may
# take minutes for a mask (docs/records/detection.md).
GRAMMARS = (
    CHAIN.requests[0].grammar,
    Grammar(kind="ebnf", rules=("cabd(a|b)ca|cabd(a|b)caA",)),
    Grammar(kind="ebnf", rules=("aAb|cB|bA", "b|d")),
)
GUIDED = replace(
    CHAIN,
    requests=tuple(replace(request, grammar=own) for request, own in zip(CHAIN.requests, GRAMMARS, strict=True)),
    engine=EngineSettings(sglang=SGLangSettings(grammar_backend="llguidance")),
)
TREE = replace(GUIDED, topk=4, num_draft_tokens=24)

# Fault -> the edit, and the rule that names it.
PLANTED: dict[str, tuple[Edit, str]] = {
    "a text may be written in any way where one way to go on is left": (
        Edit(
            target=f"{BACKEND}.GuidanceBackend.dispatch_ebnf",
            match='grammar_from("ebnf", key_string)',
            replacement='grammar_from("ebnf", key_string).replace("{}", \'{"no_forcing": true}\', 1)',
        ),
        "grammar.mask",
    ),
    "a mask allows one token more": (
        Edit(
            target=f"{BACKEND}.GuidanceGrammar.fill_vocab_mask",
            match="self._check_err()",
            replacement="vocab_mask[idx, 0] |= 1 << 5",
        ),
        "grammar.mask",
    ),
    "the masks of a prefill begin a row late": (
        Edit(
            target=f"{BACKEND}.fill_token_bitmask_batched",
            match="(e.grammar.ll_matcher, e.row)",
            replacement="(e.grammar.ll_matcher, (e.row + 1) % len(vocab_mask))",
        ),
        "grammar.mask",
    ),
    "an end that is taken back is taken back twice": (
        Edit(target=f"{BACKEND}.GuidanceGrammar.rollback", match="num_tokens -= 1", replacement="pass"),
        "grammar.mask",
    ),
    "a mask is applied to a copy": (
        Edit(
            target=f"{BACKEND}.GuidanceGrammar.apply_vocab_mask",
            match="apply_token_bitmask_inplace(logits, vocab_mask)",
            replacement="apply_token_bitmask_inplace(logits.clone(), vocab_mask)",
        ),
        "output.grammar",
    ),
    # and two that have nothing to do with the backend
    **{name: OF_ANY_BACKEND[name] for name in ("the mask of a node is its parent's", "verify chooses without a mask")},
}


@pytest.mark.parametrize("case", [GUIDED, replace(TREE, events=(Event(at=5, kind="retract"),))], ids=["chain", "tree"])
def test_with_the_candidate_fixes_all_is_equal_and_it_mattered(run: Runner, case: Case) -> None:
    _, verdict = run(case, *FIXED)
    assert verdict.status == "equal", verdict
    assert {"constrained", "grammar_refuses"} <= {*verdict.exercised}


@pytest.mark.long
def test_trees_end_texts_and_paths_go_on_behind_the_end(run: Runner) -> None:
    held = {"model": "llama-tiny", "topk": 4, "grammar_backend": "llguidance"}
    block = block_of(2, 0, Asked(held=held, sampling="", asks=("grammar",)))
    verdicts = [run(case, *FIXED)[1] for case in block.cases(8)]
    verdicts = [verdict for verdict in verdicts if not verdict.vacuous]  # some have no round, and so ask for no mask of a node
    assert [verdict.status for verdict in verdicts] == ["equal"] * len(verdicts)
    counts = {name: sum(name in verdict.exercised for verdict in verdicts) for name in ENDS}
    assert all(counts.values()), counts


@pytest.mark.parametrize("fault", spread(sorted(PLANTED), lambda fault: PLANTED[fault][-1]))
def test_a_fault_is_named(run: Runner, fault: str) -> None:
    edit, rule = PLANTED[fault]
    trace, verdict = run(TREE, *FIXED, edit)
    assert (verdict.status, verdict.rule) == ("diverged", rule), (verdict, trace.header.ending)


SIZE = 96
TOKENIZER = words_of(SIZE)
TRIED = [0, 0]  # masks, and those of one token


@settings(max_examples=200, database=None, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(grammars(), st.lists(st.integers(0, SIZE), min_size=6, max_size=6))
def _follow(grammar: Grammar, choices: list[int]) -> None:
    """Along one text, chosen from what llguidance allows."""
    text = grammar.rules[0] if grammar.kind == "regex" else as_ebnf(grammar)
    matcher, sent = LLMatcher(TOKENIZER, grammar_from(grammar.kind, text), log_level=0), ""
    for choice in choices:
        mask = allocate_token_bitmask(1, SIZE)
        fill_next_token_bitmask(matcher, mask)
        own = np.unpackbits(mask.view(torch.uint8).numpy(), axis=-1, bitorder="little")[0, :SIZE].astype(bool)
        assert not matcher.is_error(), matcher.get_error()
        np.testing.assert_array_equal(own, allowed(grammar, sent, SIZE, "llguidance"))
        TRIED[0], TRIED[1] = TRIED[0] + 1, TRIED[1] + (own.sum() == 1)
        may = np.flatnonzero(own)
        token = int(may[choice % len(may)])
        if not word(token):
            break
        matcher.consume_token(token)
        sent += word(token)


def test_the_judge_expects_what_llguidance_allows_along_texts_of_drawn_grammars() -> None:
    TRIED[:] = [0, 0]
    _follow()
    assert TRIED[0] > 300, TRIED
    assert TRIED[1] > 20, TRIED


def test_the_two_backends_allow_the_same_but_where_one_way_to_go_on_is_left() -> None:
    free, forced = Grammar(rules=("a(b|c)",)), Grammar(rules=("ab(c|d)",))
    for text in ("", "a"):
        assert (allowed(free, text, SIZE, "llguidance") == allowed(free, text, SIZE, "xgrammar")).all()
    both = [[word(int(n)) for n in np.flatnonzero(allowed(forced, "", SIZE, name))] for name in ("llguidance", "xgrammar")]
    assert both[0] == ["ab"]
    assert {*both[1]} == {"a", "ab"}
