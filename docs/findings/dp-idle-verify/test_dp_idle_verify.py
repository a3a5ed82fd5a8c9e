"""A rank without requests plans the forward that it joins while another verifies."""

import unittest
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch

from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.speculative.eagle_info import (
    EagleDraftExtendInput,
    EagleDraftInput,
    EagleVerifyInput,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

NUM_STEPS, NUM_DRAFT_TOKENS = 2, 3


def _make_backend():
    backend = TritonAttnBackend.__new__(TritonAttnBackend)
    backend.device = "cpu"
    backend.dllm_attention = backend.window_kv_indptr = backend.swa_v_head_dim = None
    backend.use_sliding_window_kv_pool = backend.enable_deterministic = False
    backend.sliding_window_size = None
    backend.dcp_size = backend.num_head = backend.v_head_dim = 1
    backend.static_kv_splits, backend.max_kv_splits = True, 8
    backend.lean_total_programs = backend.lean_block_m = 1
    backend.kv_indptr = torch.zeros(9, dtype=torch.int32)
    backend.kv_index_translator = MagicMock()
    return backend


def _plan(spec_info, padded_bs):
    """Plan an idle batch, which DP attention may have padded."""
    backend = _make_backend()
    seq_lens = torch.ones(padded_bs, dtype=torch.int64)
    backend.init_forward_metadata(
        ForwardBatch(
            forward_mode=ForwardMode.IDLE,
            batch_size=padded_bs,
            input_ids=torch.zeros_like(seq_lens),
            req_pool_indices=torch.zeros_like(seq_lens),
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens,
            seq_lens_sum=padded_bs,
            out_cache_loc=torch.zeros_like(seq_lens),
            kv_loc_plan=SimpleNamespace(),
            spec_info=spec_info,
        )
    )
    return backend.forward_metadata


class TestIdleVerify(unittest.TestCase):
    def _assert_planned(self, make_input):
        for padded_bs in (1, 2):
            with self.subTest(padded_bs=padded_bs):
                try:
                    plan = _plan(make_input(), padded_bs)
                except AttributeError as error:
                    self.fail(f"the rank ends: {error}")
                # Each request that padding adds has one row.
                self.assertEqual(plan.kv_indptr.tolist(), [*range(padded_bs + 1)])
                self.assertEqual(plan.kv_indices.shape[0], padded_bs)
                self.assertEqual(plan.attn_logits.shape[0], padded_bs)
                self.assertIsNone(plan.custom_mask)

    def test_while_another_rank_verifies(self):
        for topk in (1, 2):
            with self.subTest(topk=topk):
                self._assert_planned(
                    lambda: EagleVerifyInput.create_idle_input(
                        topk, NUM_STEPS, NUM_DRAFT_TOKENS, "cpu"
                    )
                )

    def test_while_another_rank_runs_draft_extend(self):
        self._assert_planned(lambda: EagleDraftExtendInput(torch.zeros(0, 4)))

    def test_while_another_rank_decodes_without_speculation(self):
        self._assert_planned(lambda: None)

    def test_plan_of_a_draft_step_is_kept(self):
        indptr, indices = torch.tensor([0, 3, 5]), torch.arange(5)
        plan = _plan(EagleDraftInput(kv_indptr=indptr, kv_indices=indices), 2)
        self.assertIs(plan.kv_indptr, indptr)
        self.assertIs(plan.kv_indices, indices)


if __name__ == "__main__":
    unittest.main()
