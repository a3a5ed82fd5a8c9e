"""With overlap a finished request is verified once more: its rows fit the tree's mask."""

import unittest
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch

from sglang.srt.layers.attention import triton_backend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

CONTEXT_LEN = 16
NUM_STEPS = 5
NUM_DRAFT_TOKENS = NUM_STEPS + 1


def _make_backend():
    model_runner = MagicMock(device="cpu", sliding_window_size=None, page_size=1)
    model_runner.model_config.context_len = CONTEXT_LEN
    model_runner.model_config.head_dim = 64
    model_runner.model_config.get_max_num_attention_heads.return_value = 1
    model_runner.model_config.get_num_kv_heads.return_value = 1
    model_runner.req_to_token_pool = SimpleNamespace(
        size=8, req_to_token=torch.zeros(9, CONTEXT_LEN + 4 + NUM_DRAFT_TOKENS)
    )
    with (
        patch.object(triton_backend, "get_spec", MagicMock()),
        patch.object(triton_backend, "get_exec", MagicMock()),
        patch.object(triton_backend, "get_schedule", MagicMock()),
        patch.object(triton_backend, "get_parallel") as parallel,
        patch.object(triton_backend, "get_device_core_count", return_value=1),
    ):
        parallel.return_value = MagicMock(attn_tp_size=1, attn_dcp_size=1)
        return TritonAttnBackend(model_runner)


class TestAfterTheContext(unittest.TestCase):
    """The last round began at token 11, before the context's end, and accepted all
    drafts; the next round is launched before the scheduler sees the end."""

    def setUp(self):
        self.max_context_len = _make_backend().max_context_len
        self.committed = CONTEXT_LEN - NUM_STEPS + NUM_STEPS + 1

    def test_the_mask_of_the_tree_has_room_for_all_rows(self):
        # build_eagle_verify_input, if the host does not know seq_lens_sum.
        made_for = self.max_context_len * NUM_DRAFT_TOKENS + NUM_DRAFT_TOKENS**2
        written = (self.committed + NUM_DRAFT_TOKENS) * NUM_DRAFT_TOKENS
        self.assertGreaterEqual(made_for, written)

    def test_draft_decode_has_room_for_the_indices_of_its_last_step(self):
        # TritonMultiStepDraftBackend: batch * topk * max_context_len for a step.
        self.assertGreaterEqual(self.max_context_len, self.committed + NUM_STEPS)

    def test_it_is_as_many_as_a_request_can_have_rows(self):
        self.assertEqual(self.max_context_len, CONTEXT_LEN + 4 + NUM_DRAFT_TOKENS)


if __name__ == "__main__":
    unittest.main()
