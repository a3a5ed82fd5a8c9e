"""Requests with grammars on the real worker, with the candidate fix: what is allowed, what they get, and where they end."""

import pytest
from msgspec.structs import replace

from eagletwin.cases.blocks import Asked, block_of
from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.case import Case, Event, Grammar, Request
from eagletwin.harness.core.grammar import word
from eagletwin.harness.core.patch import Edit

from ..rows import long, spread
from .conftest import Runner

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
    block = block_of(2, 0, Asked(held=held, sampling="", asks=("grammar",)))
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
