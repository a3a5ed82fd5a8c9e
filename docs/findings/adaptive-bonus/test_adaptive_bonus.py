"""Without drafts, verify gets its tokens in the dtype that its kernel takes."""

import unittest
from unittest.mock import MagicMock

import torch

from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=12, suite="base-a-test-cpu")

TOKENS = [5, 2, 7]


def _verify_input(bonus_tokens):
    """Build verify's input for a round of 0 steps, after a forward left these tokens."""
    worker = MagicMock(spec=EAGLEWorkerV2)
    worker.device = "cpu"
    worker.topk = 1
    worker._target_worker = worker.target_worker = MagicMock()
    worker._target_worker.model_runner.attn_backend.verify_mask = None
    bs = len(bonus_tokens)
    batch = MagicMock()
    batch.forward_mode.is_idle.return_value = False
    batch.device = "cpu"
    batch.seq_lens = torch.full((bs,), 3)
    batch.seq_lens_sum = 3 * bs
    batch.spec_info.bonus_tokens = bonus_tokens
    return EAGLEWorkerV2._build_trivial_verify_input(worker, batch)


class TestTokensOfARoundWithoutDrafts(unittest.TestCase):
    def _assert_as_the_kernel_takes_it(self, dtype):
        """verify_tree_greedy of kernels/jit/csrc/speculative/tree.cuh takes int64."""
        verify_input = _verify_input(torch.tensor(TOKENS, dtype=dtype))
        for name in (
            "draft_token",
            "retrieve_index",
            "retrieve_next_token",
            "retrieve_next_sibling",
        ):
            self.assertEqual(getattr(verify_input, name).dtype, torch.int64, name)
        self.assertEqual(verify_input.draft_token.tolist(), TOKENS)

    def test_after_a_verify(self):
        # Verify produces int32 bonus tokens; without the overlap scheduler the next
        # round gets them unchanged.
        self._assert_as_the_kernel_takes_it(torch.int32)

    def test_after_a_prefill_or_with_overlap(self):
        self._assert_as_the_kernel_takes_it(torch.int64)


if __name__ == "__main__":
    unittest.main()
