"""A request without new tokens gets its prompt's hidden states, if it wants all."""

import unittest
from types import SimpleNamespace
from unittest.mock import MagicMock

from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.managers.scheduler_components.output_streamer import (
    _GenerationStreamAccumulator,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

PROMPT = [[0.0], [1.0]]  # its rows, in one entry


def _given(wanted, entries, *, tokens, most):
    """Return the states of a request that ends with this many tokens and wants `most`."""
    req = MagicMock(
        beam_group=None,
        stream=False,
        output_ids=[5] * len(entries),
        output_ids_through_stop=[5] * tokens,
        send_token_offset=0,
        send_decode_id_offset=0,
        finished_len=tokens,
        finished_output=None,
        return_logprob=False,
        return_hidden_states=wanted,
        hidden_states=entries,
    )
    req.finished.return_value = True
    req.sampling_params.max_new_tokens = most
    req.init_incremental_detokenize.return_value = ([], 0)
    req.get_mm_token_counts.return_value = (0, 0, 0)
    accumulator = _GenerationStreamAccumulator(
        return_logprob=False,
        return_hidden_states=True,
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
    [given] = accumulator.output_hidden_states
    return given


class TestHiddenNoTokens(unittest.TestCase):
    def test_all_of_a_prompt(self):
        self.assertEqual(_given(True, [PROMPT], tokens=0, most=0), [PROMPT])

    def test_the_last_of_a_prompt(self):
        self.assertEqual(_given("last", [[1.0]], tokens=0, most=0), [1.0])

    def test_what_verify_commits_after_the_end_is_cut(self):
        entries = [PROMPT, [2.0], [3.0]]
        self.assertEqual(_given(True, entries, tokens=2, most=2), entries[:2])


if __name__ == "__main__":
    unittest.main()
