"""Requests with grammars on the real worker, with xgrammar and llguidance and the candidate fixes of their bugs."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, grammar_from
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask
from msgspec.structs import replace

from eagletwin.cases.blocks import SearchConstraints, block_of
from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.case import Case, EngineSettings, Event, Grammar, Request, SGLangSettings
from eagletwin.harness.core.grammar import as_ebnf, word
from eagletwin.harness.core.patch import Edit
from eagletwin.harness.engines.sglang.grammars import words_of
from eagletwin.harness.families.dimensions.grammar import grammars
from eagletwin.harness.judge.request_logits import allowed_tokens

from ..rows import long, spread
from .conftest import Runner

# Requests with grammars on the real worker, with the candidate fix: what is allowed, what they get, and where they end.


REMEDY = LEDGER["grammar-end"].remedy
assert REMEDY is not None
FIXED = REMEDY.edits

# With the first, few drafts are refused; with the last, many.
GRAMMARS = (Grammar(rules=("((a|b|c|d)(a|b|c|d)(a|b|c|d)(b|c)?)+",)), None, Grammar(kind="ebnf", rules=("aAb|c|cB|bAA", "b*")))
REQUESTS = tuple(
    Request(id=name, prompt=prompt, max_new_tokens=12, arrive=arrive, grammar=grammar)
    for name, prompt, arrive, grammar in zip("abc", ((33, 8), (9, 1), (60, 2)), (0, 0, 2), GRAMMARS, strict=True)
)
CHAIN = Case(name="grammars", model="llama-tiny", num_steps=3, requests=REQUESTS)
TREE = replace(CHAIN, topk=4, num_draft_tokens=24, events=(Event(at=5, kind="retract"),))

UTILITIES, SAMPLE = "sglang.srt.speculative.spec_utils", "sglang.srt.speculative.eagle_utils.eagle_sample"
ENDS = ("grammar_refuses", "grammar_ends_in_tree", "grammar_ends_in_path")
PROCESSOR = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"

# Fault -> the edit, and the rule that names it.
PLANTED: dict[str, tuple[Edit, str]] = {
    "a round's tokens behind the end of a text are kept": (
        Edit(
            target=f"{PROCESSOR}._accept_grammar_tokens",
            match="if req.grammar.is_terminated():\n                break",
            replacement="pass",
        ),
        "output.grammar",
    ),
    "a text that has ended ends no request": (
        Edit(
            target="sglang.srt.managers.schedule_batch.Req.update_finish_state",
            match="if self.grammar is not None and self.grammar.is_terminated():",
            replacement="if False:",
        ),
        "output.grammar",
    ),
    "a tree is read with another request's grammar": (
        Edit(
            target=f"{UTILITIES}.generate_token_bitmask",
            match="                req.grammar,\n",
            replacement="                next(one.grammar for one in reversed(reqs) if one.grammar is not None),\n",
        ),
        "grammar.mask",
    ),
    "the masks of a batch are in another order": (
        Edit(
            target=f"{UTILITIES}.build_grammar_vocab_mask",
            match="vocab_mask = vocab_mask.to(device, non_blocking=True)",
            replacement="vocab_mask = vocab_mask.roll(len(vocab_mask) // len(reqs), 0)",
        ),
        "grammar.mask",
    ),
    "a grammar is not rolled back behind a node": (
        Edit(target=f"{UTILITIES}.traverse_tree", match="grammar.rollback(1)", replacement="pass"),
        "grammar.mask",
    ),
    "the mask of a node is its parent's": (
        Edit(
            target=f"{UTILITIES}.traverse_tree",
            match="grammar.fill_vocab_mask(allocate_token_bitmask, curr)",
            replacement="grammar.fill_vocab_mask(allocate_token_bitmask, curr) if curr == 0 else "
            "allocate_token_bitmask[curr].copy_(allocate_token_bitmask[parent_pos])",
        ),
        "grammar.mask",
    ),
    "a draft's bit is read in the word beside its own": (
        Edit(
            target=f"{UTILITIES}.traverse_tree",
            match="parent_bitmask[current_token // 32]",
            replacement="parent_bitmask[(current_token // 32 + 1) % len(parent_bitmask)]",
        ),
        "grammar.mask",
    ),
    "verify chooses without a mask": (
        Edit(target=SAMPLE, match="if grammar_mask is not None:", replacement="if False:"),
        "grammar.mask",
    ),
    "verify chooses before the mask": (
        Edit(
            target=SAMPLE,
            match="grammar_mask.apply(next_token_logits)",
            replacement="grammar_mask.apply(next_token_logits.clone())",
        ),
        "output.grammar",
    ),
    "a prefill chooses without a mask": (
        Edit(
            target="sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.apply_logits_bias",
            match="if self.grammar_mask is not None:",
            replacement="if False:",
        ),
        "grammar.mask",
    ),
}


@pytest.mark.parametrize("case", [*long(CHAIN), TREE], ids=["chain", "tree"])
def test_with_the_candidate_fix_all_is_equal_and_it_mattered(run: Runner, case: Case) -> None:
    _, verdict = run(case, *FIXED)
    assert verdict.status == "equal", verdict
    assert {"constrained", "grammar_refuses"} <= {*verdict.exercised}


@pytest.mark.long
def test_trees_end_texts_and_paths_go_on_behind_the_end(run: Runner) -> None:
    """Counted, so that the search's figures cannot become empty: drawn cases of one block, with the candidate fix."""
    held = {"model": "llama-tiny", "topk": 4, "grammar_backend": "xgrammar"}
    block = block_of(2, 0, SearchConstraints(held=held, sampling="", asks=("grammar",)))
    verdicts = [run(case, *FIXED)[1] for case in block.cases(8)]
    assert [verdict.status for verdict in verdicts] == ["equal"] * len(verdicts)
    counts = {name: sum(name in verdict.exercised for verdict in verdicts) for name in ENDS}
    print(counts)
    assert all(counts.values()), counts


@pytest.mark.long
def test_a_greedy_request_with_a_grammar_shows_a_retracted_chunk_s_tail_as_well(run: Runner) -> None:
    """Its first token is an `a`. When it comes back its grammar wants a `c`, and the target gives one behind the prompt too."""
    entry = LEDGER["retracted-chunk-tail"]
    case, remedy = entry.also[1], entry.remedy
    assert remedy is not None
    _, red = run(case)
    assert (red.status, red.rule) == ("diverged", entry.rule)
    assert red.first is not None
    assert [word(int(token)) for token in (red.first.expected, red.first.actual)] == ["a", "c"]
    _, green = run(case, *remedy.edits)
    assert green.status == "equal"
    [request] = case.requests
    assert run(replace(case, requests=(replace(request, grammar=None),)))[1].status == "equal"


@pytest.mark.parametrize("fault", spread(sorted(PLANTED), lambda fault: PLANTED[fault][-1]))
def test_a_fault_is_named(run: Runner, fault: str) -> None:
    edit, rule = PLANTED[fault]
    # after a retraction the rows of a text that went on would be held to another one
    trace, verdict = run(replace(TREE, events=()), *FIXED, edit)
    assert (verdict.status, verdict.rule) == ("diverged", rule), (verdict, trace.header.ending)


def test_the_kernel_of_a_gpu_lays_masks_over_gaps_between_rows_of_float32_logits(run: Runner) -> None:
    """`grammar-stride`, on a CPU: SGLang has xgrammar's own mask here, and with the GPU's kernel in its place it shows."""
    entry = LEDGER["grammar-stride"]
    there = Edit(
        target="sglang.srt.constrained.xgrammar_backend.XGrammarGrammar.apply_vocab_mask",
        match='{"cuda", "xpu", "musa"}',
        replacement='{"cuda", "xpu", "musa", "cpu"}',
    )
    assert run(entry.case)[1].status == "equal"
    _, wrong = run(entry.case, there)
    assert (wrong.status, wrong.rule) == ("diverged", "kernel.memory")
    assert wrong.first is not None
    assert "in a gap between the view's rows" in str(wrong.first)
    assert entry.remedy is not None
    assert run(entry.case, there, *entry.remedy.edits)[1].status == "equal"


# Requests with grammars on the real worker with llguidance, with the candidate fixes of its bugs: what is allowed, and where
# a text ends. What the judge expects is what llguidance says of drawn grammars, asked by itself.


REMEDIES = [LEDGER[name].remedy for name in ("grammar-end", "guidance-end", "guidance-rollback")]
GUIDANCE_FIXED = tuple(edit for remedy in REMEDIES if remedy is not None for edit in remedy.edits)
assert len(GUIDANCE_FIXED) == len(REMEDIES)

BACKEND = "sglang.srt.constrained.llguidance_backend"
# With the second, most places have one way to go on, which is written in one way alone. With the third of CHAIN llguidance may
# take minutes for a mask (docs/records/detection.md).
GUIDANCE_GRAMMARS = (
    CHAIN.requests[0].grammar,
    Grammar(kind="ebnf", rules=("cabd(a|b)ca|cabd(a|b)caA",)),
    Grammar(kind="ebnf", rules=("aAb|cB|bA", "b|d")),
)
GUIDED = replace(
    CHAIN,
    requests=tuple(replace(request, grammar=own) for request, own in zip(CHAIN.requests, GUIDANCE_GRAMMARS, strict=True)),
    engine=EngineSettings(sglang=SGLangSettings(grammar_backend="llguidance")),
)
GUIDANCE_TREE = replace(GUIDED, topk=4, num_draft_tokens=24)

# Fault -> the edit, and the rule that names it.
GUIDANCE_PLANTED: dict[str, tuple[Edit, str]] = {
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
    **{name: PLANTED[name] for name in ("the mask of a node is its parent's", "verify chooses without a mask")},
}


@pytest.mark.parametrize("case", [GUIDED, replace(GUIDANCE_TREE, events=(Event(at=5, kind="retract"),))], ids=["chain", "tree"])
def test_with_the_candidate_fixes_all_is_equal_and_it_mattered(run: Runner, case: Case) -> None:
    _, verdict = run(case, *GUIDANCE_FIXED)
    assert verdict.status == "equal", verdict
    assert {"constrained", "grammar_refuses"} <= {*verdict.exercised}


@pytest.mark.long
def test_trees_end_texts_and_paths_go_on_behind_the_end_in_guidance(run: Runner) -> None:
    held = {"model": "llama-tiny", "topk": 4, "grammar_backend": "llguidance"}
    block = block_of(2, 0, SearchConstraints(held=held, sampling="", asks=("grammar",)))
    verdicts = [run(case, *GUIDANCE_FIXED)[1] for case in block.cases(8)]
    verdicts = [verdict for verdict in verdicts if not verdict.vacuous]  # some have no round, and so ask for no mask of a node
    assert [verdict.status for verdict in verdicts] == ["equal"] * len(verdicts)
    counts = {name: sum(name in verdict.exercised for verdict in verdicts) for name in ENDS}
    assert all(counts.values()), counts


@pytest.mark.parametrize("fault", spread(sorted(GUIDANCE_PLANTED), lambda fault: GUIDANCE_PLANTED[fault][-1]))
def test_a_fault_is_named_in_guidance(run: Runner, fault: str) -> None:
    edit, rule = GUIDANCE_PLANTED[fault]
    trace, verdict = run(GUIDANCE_TREE, *GUIDANCE_FIXED, edit)
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
        own = np.unpackbits(mask.view(np.uint8), axis=-1, bitorder="little")[0, :SIZE].astype(bool)
        assert not matcher.is_error(), matcher.get_error()
        np.testing.assert_array_equal(own, allowed_tokens(grammar, sent, SIZE, "llguidance"))
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
        assert (allowed_tokens(free, text, SIZE, "llguidance") == allowed_tokens(free, text, SIZE, "xgrammar")).all()
    both = [
        [word(int(n)) for n in np.flatnonzero(allowed_tokens(forced, "", SIZE, name))] for name in ("llguidance", "xgrammar")
    ]
    assert both[0] == ["ab"]
    assert {*both[1]} == {"a", "ab"}
