"""A request without a new token gets no message."""

import unittest
from types import SimpleNamespace
from unittest.mock import MagicMock

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.scheduler_components.output_streamer import (
    _GenerationStreamAccumulator,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")


def _sent(output_ids, sent, *, stream=True, finished=False, interval=1):
    """Return the messages to a request with these tokens, of which `sent` were sent."""
    req = MagicMock(
        beam_group=None,
        stream=stream,
        output_ids=output_ids,
        output_ids_through_stop=output_ids,
        send_token_offset=sent,
        send_decode_id_offset=0,
        finished_len=None,
        finished_output=None,
        return_logprob=False,
    )
    req.finished.return_value = finished
    req.sampling_params.stream_interval = interval
    req.check_match_stop_str_prefix.return_value = False
    req.init_incremental_detokenize.return_value = (output_ids, 0)
    req.get_mm_token_counts.return_value = (0, 0, 0)
    accumulator = _GenerationStreamAccumulator(
        return_logprob=False,
        return_hidden_states=False,
        return_routed_experts=False,
        return_indexer_topk=False,
        spec_algorithm=SimpleNamespace(is_none=lambda: True),
        disaggregation_mode=DisaggregationMode.NULL,
        default_stream_interval=1,
        default_force_stream_interval=50,
        get_cached_tokens_details=lambda _req: None,
        is_request_level_customized_info_key=lambda _key: False,
        current_weight_version=None,
    )
    accumulator.accept(req=req)
    return accumulator.output_ids


class TestRetractedStream(unittest.TestCase):
    def test_no_token_yet(self):
        """Retracted before the result of its prefill was processed."""
        self.assertEqual(_sent([], 0), [])

    def test_all_tokens_were_sent(self):
        """Retracted before the result of a decode was processed."""
        self.assertEqual(_sent([5, 7], 2), [])

    def test_not_streamed(self):
        self.assertEqual(_sent([], 0, stream=False), [])
        self.assertEqual(_sent([5] * 50, 50, stream=False), [])

    def test_tokens_are_sent(self):
        self.assertEqual(_sent([5], 0), [[5]])
        self.assertEqual(_sent([5, 7, 9], 1), [[7, 9]])
        self.assertEqual(_sent([5] * 50, 0, stream=False), [[5] * 50])

    def test_the_end_is_told(self):
        self.assertEqual(_sent([5, 7], 2, finished=True), [[]])


if __name__ == "__main__":
    unittest.main()
