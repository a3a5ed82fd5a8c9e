"""With an EAGLE-3 head, return_hidden_states returns the target's last layer."""

import unittest
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch

from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
from sglang.srt.managers.scheduler_components import batch_result_processor
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.runtime_context import get_context
from sglang.srt.speculative import eagle_worker_common
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

LAST = torch.arange(4.0)[:, None]
AUX = torch.cat([LAST + 10, LAST + 20, LAST + 30], -1)


def _output():
    return LogitsProcessorOutput(
        next_token_logits=None, hidden_states=AUX, last_hidden_states=LAST
    )


class TestHiddenAux(unittest.TestCase):
    def test_a_server_that_returns_hidden_states_keeps_the_last_layer(self):
        with get_context().override_server_args(enable_return_hidden_states=True):
            kept = LogitsProcessor._get_last_hidden_states_to_store(
                SimpleNamespace(keep_last_hidden_states=False),
                LAST,
                [AUX],
                SimpleNamespace(capture_hidden_mode=CaptureHiddenMode.FULL),
            )
        self.assertIs(kept, LAST)

    def test_the_accepted_path_of_a_tree_is_moved_in_both(self):
        output = _output()
        with patch.object(
            eagle_worker_common, "move_accept_tokens_to_target_kvcache"
        ):
            eagle_worker_common._finalize_accept_tree_path(
                None,
                torch.tensor([[0, 3]]),
                torch.tensor([2]),
                torch.arange(4),
                output,
                1,
                token_to_kv_pool_allocator=None,
                num_draft_tokens=4,
            )
        self.assertEqual(output.hidden_states[:2, 0].tolist(), [10.0, 13.0])
        self.assertEqual(output.last_hidden_states[:2, 0].tolist(), [0.0, 3.0])

    def test_a_request_is_given_the_last_layer(self):
        processor = MagicMock(enable_overlap=False, enable_overlap_mlx=False)
        processor._normalize_decode_outputs.return_value = [[5, 6]], None
        req = MagicMock(
            beam_group=None,
            return_sampling_mask=False,
            return_logprob=False,
            return_hidden_states=True,
            grammar=None,
        )
        batch = MagicMock(reqs=[req])
        batch.spec_algorithm.is_none.return_value = False
        result = MagicMock(logits_output=_output(), speculative_output_stride=4)
        with patch.object(batch_result_processor, "get_observability", MagicMock()):
            owner = batch_result_processor.SchedulerBatchResultProcessor
            owner.process_batch_result_decode(processor, batch, result)
        given = processor._append_decode_hidden_states.call_args.kwargs
        self.assertEqual(given["hidden_states"].tolist(), LAST.tolist())


if __name__ == "__main__":
    unittest.main()
