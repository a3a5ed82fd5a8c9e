"""With overlap, running requests in a prefill batch are masked by up-to-date grammars."""

import unittest
from unittest.mock import MagicMock, patch

import torch

from sglang.srt.constrained.xgrammar_backend import (
    GrammarCompiler,
    GrammarMatcher,
    TokenizerInfo,
    VocabType,
    XGrammarGrammar,
)
from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor,
)
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=12, suite="base-a-test-cpu")

TOKENS = ["a", "b", "</s>"]
A, B, END = range(3)


def _grammar(regex):
    vocabulary = TokenizerInfo(TOKENS, VocabType.RAW, stop_token_ids=[END])
    compiled = GrammarCompiler(vocabulary).compile_regex(regex)
    matcher = GrammarMatcher(compiled, max_rollback_tokens=8)
    return XGrammarGrammar(matcher, len(TOKENS), compiled, None, regex)


def _allowed(grammar):
    mask = grammar.allocate_vocab_mask(len(TOKENS), 1, "cpu")
    grammar.fill_vocab_mask(mask, 0)
    return [token for token in range(len(TOKENS)) if int(mask[0, 0]) >> token & 1]


class _Sampled(Exception):
    """Leaves the worker where the target samples."""


def _allowed_when_sampling(regex, *, running, mode="extend"):
    """Return the tokens that a running request's mask allows when the target samples.

    The previous batch sampled an `a`; its result is not processed yet.
    running: the batch's `decoding_reqs` has the request. mode: the batch's.
    """
    grammar = _grammar(regex)
    req = MagicMock(inflight_middle_chunks=0, is_retracted=False, grammar=grammar)
    req.finished.return_value = False
    before = MagicMock(reqs=[req], has_grammar=True)
    before.forward_mode.is_decode.return_value = False
    result = MagicMock(
        next_token_ids=torch.tensor([A]), copy_done=None, grammar_advanced=False
    )
    processor = MagicMock()
    for name in ("advance_grammar_fsm", "_accept_grammar_tokens"):
        own = getattr(SchedulerBatchResultProcessor, name)
        setattr(processor, name, own.__get__(processor))

    seen = []

    def sample(*args, **kwargs):
        seen.extend(_allowed(grammar))
        raise _Sampled

    worker = MagicMock(enable_dp_spec_prefill_coordination=False)
    if mode == "extend":
        worker.target_worker.forward_batch_generation.side_effect = sample
        for name in ("_forward_prefill_batch", "forward_batch_generation"):
            setattr(worker, name, getattr(EAGLEWorkerV2, name).__get__(worker))
    else:
        worker.forward_batch_generation.side_effect = sample
    scheduler = MagicMock(
        is_generation=True,
        enable_overlap=True,
        forward_ct=0,
        processed_tokens_counter=0,
        forward_sleep_time=None,
        _confidence_budget_prepare=None,
        result_queue=[(before, result)],
        batch_result_processor=processor,
        model_worker=worker,
    )
    scheduler._advance_pending_grammar = Scheduler._advance_pending_grammar.__get__(
        scheduler
    )
    scheduler.forward_stream_ctx.__exit__.return_value = False
    scheduler._forward_isolation.return_value.__exit__.return_value = False
    batch = MagicMock(
        reqs=[MagicMock(), req],
        decoding_reqs=[req] if running else None,
        extend_num_tokens=2,
        has_grammar=True,
    )
    batch.forward_mode.is_split_prefill.return_value = False
    batch.forward_mode.is_prebuilt.return_value = False
    batch.forward_mode.is_extend.return_value = mode == "extend"
    batch.spec_algorithm.is_none.return_value = False
    batch.spec_algorithm.supports_grammar_overlap.return_value = True
    with patch.object(scheduler_module, "resolve_forward_inputs"):
        try:
            Scheduler.run_batch(scheduler, batch)
        except _Sampled:
            return seen
    raise AssertionError("the target did not sample")


class TestMixedGrammar(unittest.TestCase):
    def test_a_running_request_of_a_mixed_batch_gets_the_next_token(self):
        self.assertEqual(_allowed_when_sampling("ab", running=True), [B])

    def test_its_grammar_ends_where_the_text_ends(self):
        self.assertEqual(_allowed_when_sampling("a", running=True), [END])

    def test_a_prefill_without_running_requests_does_not_wait(self):
        self.assertEqual(_allowed_when_sampling("ab", running=False), [A])

    def test_a_decode_after_a_mixed_batch_does_not_wait(self):
        # The mixed batch becomes the running batch and keeps its decoding_reqs.
        # verify() calls the barrier itself, while the target's forward runs.
        allowed = _allowed_when_sampling("ab", running=True, mode="decode")
        self.assertEqual(allowed, [A])


if __name__ == "__main__":
    unittest.main()
