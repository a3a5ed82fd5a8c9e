"""The token of a prefill that ends a grammar ends its request."""

import unittest
from array import array
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch

from sglang.srt.constrained.xgrammar_backend import (
    GrammarCompiler,
    GrammarMatcher,
    TokenizerInfo,
    VocabType,
    XGrammarGrammar,
)
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor,
)
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

TOKENS = ["a", "b", "</s>"]
A, B, END = range(3)


class _Processed(Exception):
    """Leaves the processor after it looked for the end of the request."""


class _Req(Req):
    def update_finish_state(self, new_accepted_len=1):
        super().update_finish_state(new_accepted_len)
        raise _Processed


def _request(regex, output=()):
    """A request with `ignore_eos` whose grammar has read these output tokens."""
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    params.normalize(None)
    req = _Req("a", "", array("q", [B]), params, vocab_size=len(TOKENS))
    vocabulary = TokenizerInfo(TOKENS, VocabType.RAW, stop_token_ids=[END])
    compiled = GrammarCompiler(vocabulary).compile_regex(regex)
    matcher = GrammarMatcher(compiled, max_rollback_tokens=8)
    req.grammar = XGrammarGrammar(matcher, len(TOKENS), compiled, None, regex)
    for token in output:
        req.output_ids.append(token)
        req.grammar.accept_token(token)
    return req


def _prefill(req, token):
    """Process a prefill that gave the request this token."""
    batch = MagicMock(reqs=[req], has_grammar=True, return_hidden_states=False)
    batch.forward_mode.is_decode.return_value = False
    result = MagicMock(
        next_token_ids=torch.tensor([token]),
        copy_done=None,
        routed_experts_output=None,
        indexer_topk_output=None,
        grammar_advanced=False,
        logits_output=SimpleNamespace(hidden_states=None),
    )
    processor = MagicMock(is_generation=True)
    for name in ("advance_grammar_fsm", "_accept_grammar_tokens"):
        own = getattr(SchedulerBatchResultProcessor, name)
        setattr(processor, name, own.__get__(processor))
    try:
        SchedulerBatchResultProcessor.process_batch_result_prefill(
            processor, batch, result
        )
    except _Processed:
        return
    raise AssertionError("the end of the request was not looked for")


class TestGrammarEnd(unittest.TestCase):
    def test_a_grammar_of_the_empty_text_ends_with_its_first_token(self):
        req = _request("()")
        _prefill(req, END)
        self.assertTrue(req.finished())

    def test_a_grammar_that_ends_after_a_retraction(self):
        req = _request("ab", output=[A, B])
        _prefill(req, END)
        self.assertTrue(req.finished())

    def test_a_grammar_that_continues_does_not_end(self):
        req = _request("ab")
        _prefill(req, A)
        self.assertFalse(req.finished())


if __name__ == "__main__":
    unittest.main()
