"""A request gets the logprobs of its own prompt, even after a retracted request."""

import unittest
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

from sglang.srt.managers.scheduler_components import batch_result_processor
from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")


def _request(rid, retracted=False):
    req = MagicMock(rid=rid, is_retracted=retracted, inflight_middle_chunks=0)
    req.finished.return_value = False
    req.discard_output_reason = req.beam_group = req.grammar = None
    req.return_sampling_mask = False
    return req


def _taken_from(requests, lengths):
    """Return where each request reads the logprobs of a batch's prompts: the first
    place, and how many."""
    taken = {}

    def take(_i, req, logprob_pt, _next_token_ids, num_input_logprobs, _logits_output):
        taken[req.rid] = (logprob_pt, num_input_logprobs)

    processor = MagicMock(is_generation=True)
    processor.logprob_result_processor = SimpleNamespace(
        calculate_num_input_logprobs=lambda _req, length, start: length - start,
        add_logprob_return_values=take,
    )
    processor._apply_prefill_logprobs = lambda **given: (
        SchedulerBatchResultProcessor._apply_prefill_logprobs(processor, **given)
    )
    next_token_ids = MagicMock()
    next_token_ids.tolist.return_value = [5] * len(requests)
    result = SimpleNamespace(
        copy_done=None,
        auxiliary_host_output=None,
        routed_experts_output=None,
        indexer_topk_output=None,
        logits_output=None,
        next_token_ids=next_token_ids,
        extend_input_len_per_req=lengths,
        extend_logprob_start_len_per_req=[0] * len(lengths),
        grammar_advanced=False,
        can_run_cuda_graph=False,
    )
    batch = SimpleNamespace(
        reqs=requests,
        return_hidden_states=False,
        return_logprob=True,
        decoding_reqs=None,
        prefill_stats=None,
    )
    with patch.object(batch_result_processor, "get_memory") as memory:
        memory.return_value.enable_hisparse = False
        SchedulerBatchResultProcessor.process_batch_result_prefill(
            processor, batch, result
        )
    return taken


class TestRetractedLogprobs(unittest.TestCase):
    def test_after_a_retracted_request(self):
        requests = [_request("a", retracted=True), _request("b")]
        self.assertEqual(_taken_from(requests, [3, 2]), {"b": (3, 2)})

    def test_after_two(self):
        requests = [
            _request("a"),
            _request("b", retracted=True),
            _request("c", retracted=True),
            _request("d"),
        ]
        self.assertEqual(
            _taken_from(requests, [3, 2, 4, 1]), {"a": (0, 3), "d": (9, 1)}
        )

    def test_before_a_retracted_request(self):
        requests = [_request("a"), _request("b", retracted=True)]
        self.assertEqual(_taken_from(requests, [3, 2]), {"a": (0, 3)})


if __name__ == "__main__":
    unittest.main()
