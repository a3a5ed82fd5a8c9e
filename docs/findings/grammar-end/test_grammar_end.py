"""The token of a prefill that ends a grammar ends its request."""

import unittest
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch

from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")


class _Ended(Exception):
    """Leaves the processor where the end of the request was looked for."""


class TestGrammarEnd(unittest.TestCase):
    def test_the_grammar_reads_the_token_before_the_end_is_looked_for(self):
        read = []
        grammar = MagicMock()
        grammar.accept_token.side_effect = read.append

        def update_finish_state(*args):
            raise _Ended

        req = MagicMock(grammar=grammar, is_retracted=False, inflight_middle_chunks=0)
        req.finished.return_value = False
        req.discard_output_reason = req.beam_group = None
        req.return_sampling_mask = False
        req.update_finish_state = update_finish_state
        batch = MagicMock(reqs=[req], has_grammar=True, return_hidden_states=False)
        batch.forward_mode.is_decode.return_value = False
        result = MagicMock(
            next_token_ids=torch.tensor([7]),
            copy_done=None,
            routed_experts_output=None,
            indexer_topk_output=None,
            grammar_advanced=False,
            logits_output=SimpleNamespace(hidden_states=None),
        )
        processor = MagicMock(is_generation=True)
        for name in ("advance_grammar_fsm", "_accept_grammar_tokens"):
            own = getattr(SchedulerBatchResultProcessor, name)
            setattr(
                processor, name, own.__get__(processor, SchedulerBatchResultProcessor)
            )
        with self.assertRaises(_Ended):
            SchedulerBatchResultProcessor.process_batch_result_prefill(
                processor, batch, result
            )
        self.assertEqual(read, [7])


if __name__ == "__main__":
    unittest.main()
