"""Verify of a batch that DP attention has padded: each request has a tree."""

import unittest
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch

from sglang.srt.layers.attention.hybrid_linear_attn_backend import MambaAttnBackendBase
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.model_executor import forward_batch_info
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

TOPK, NODES, NUM_STEPS = 2, 3, 1
# A root with two children: the tree's links, and which node sees which.
NEXT_TOKEN, NEXT_SIBLING = [1, -1, -1], [-1, 2, -1]
SEEN = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)


def _verify(lens):
    """Build the batch of a verify, for requests with these numbers of tokens."""
    if not lens:
        spec_info = EagleVerifyInput.create_idle_input(TOPK, NUM_STEPS, NODES, "cpu")
    else:
        masks = [
            torch.cat([torch.ones(NODES, n, dtype=torch.bool), SEEN], dim=1).flatten()
            for n in lens
        ]
        spec_info = EagleVerifyInput(
            draft_token=torch.zeros(len(lens) * NODES, dtype=torch.int64),
            custom_mask=torch.cat(masks),
            positions=torch.zeros(len(lens) * NODES, dtype=torch.int64),
            retrieve_index=torch.arange(len(lens) * NODES).view(-1, NODES),
            retrieve_next_token=torch.tensor([NEXT_TOKEN] * len(lens)),
            retrieve_next_sibling=torch.tensor([NEXT_SIBLING] * len(lens)),
            retrieve_cum_len=None,
            topk=TOPK,
            draft_token_num=NODES,
            spec_steps=NUM_STEPS,
            capture_hidden_mode=None,
            seq_lens_sum=sum(lens),
            seq_lens_cpu=torch.tensor(lens),
        )
    return ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY if lens else ForwardMode.IDLE,
        batch_size=len(lens),
        input_ids=spec_info.draft_token,
        req_pool_indices=torch.arange(1, len(lens) + 1),
        seq_lens=torch.tensor(lens, dtype=torch.int64),
        seq_lens_cpu=torch.tensor(lens, dtype=torch.int64),
        seq_lens_sum=sum(lens),
        out_cache_loc=torch.arange(len(lens) * NODES),
        positions=spec_info.positions,
        kv_loc_plan=SimpleNamespace(),
        spec_info=spec_info,
    )


def _pad(forward_batch, of_ranks, hybrid):
    """Pad as ModelRunner does before each eager forward; this rank is the first."""
    rows = [bs * NODES for bs in of_ranks]
    forward_batch.global_num_tokens_cpu = list(rows)
    forward_batch.global_num_tokens_for_logprob_cpu = list(rows)
    forward_batch.global_num_tokens_gpu = torch.tensor(rows)
    # A draft with Mamba layers counts as a hybrid model, like its target.
    pattern = "*E" if hybrid else None
    runner = MagicMock(is_draft_worker=hybrid)
    runner.model_config.hf_config.mtp_hybrid_override_pattern = pattern
    runner.attn_backend.get_cpu_graph_seq_len_fill_value.return_value = 1
    ranks = {
        "tp_size": len(of_ranks),
        "moe_tp_size": len(of_ranks),
        "attn_tp_size": 1,
        "attn_dp_size": len(of_ranks),
        "attn_dp_rank": 0,
    }
    arguments = {
        "device": "cpu",
        "speculative_algorithm": "EAGLE",
        "cuda_graph_config": CudaGraphConfig(),
    }
    with (
        get_context().override_server_args(**arguments),
        get_parallel().override(**ranks),
        patch.object(forward_batch_info, "_is_cpu", True),  # no memory to pin
    ):
        forward_batch.prepare_mlp_sync_batch(runner)


def _plan(forward_batch):
    """Return the Triton backend's plan."""
    backend = TritonAttnBackend.__new__(TritonAttnBackend)
    backend.device = "cpu"
    backend.dllm_attention = backend.window_kv_indptr = None
    backend.use_sliding_window_kv_pool = False
    backend.sliding_window_size = None
    backend.kv_indptr = torch.zeros(9, dtype=torch.int32)
    backend.mask_indptr = torch.zeros(9, dtype=torch.int64)
    backend.kv_index_translator = MagicMock()
    backend.init_forward_metadata(forward_batch)
    return backend.forward_metadata


def _plan_of_states(forward_batch):
    """Return the plan of layers that keep a state."""
    backend = MagicMock(spec=MambaAttnBackendBase)
    backend.device = "cpu"
    backend.topk = TOPK
    backend.req_to_token_pool = MagicMock()
    backend._has_cpu_prefill_track_metadata.return_value = False
    return MambaAttnBackendBase._forward_metadata(backend, forward_batch)


class TestPaddedVerify(unittest.TestCase):
    def _assert_masks(self, lens, of_ranks, hybrid=False):
        forward_batch = _verify(lens)
        own = forward_batch.spec_info.custom_mask
        _pad(forward_batch, of_ranks, hybrid)
        plan = _plan(forward_batch)
        bs = max(of_ranks)
        self.assertEqual(plan.qo_indptr.shape[0], bs + 1)
        self.assertEqual(plan.mask_indptr[len(lens)], own.shape[0])
        # The buffer holds the masks of all requests, one after the other.
        self.assertGreaterEqual(plan.custom_mask.shape[0], plan.mask_indptr[-1].item())
        self.assertTrue(torch.equal(plan.custom_mask[: own.shape[0]], own))

    def _assert_links(self, lens, of_ranks):
        forward_batch = _verify(lens)
        _pad(forward_batch, of_ranks, hybrid=True)
        plan = _plan_of_states(forward_batch)
        padding = max(of_ranks) - len(lens)
        none = [[-1] * NODES] * padding
        self.assertEqual(
            plan.retrieve_next_token.tolist(), [NEXT_TOKEN] * len(lens) + none
        )
        self.assertEqual(
            plan.retrieve_next_sibling.tolist(), [NEXT_SIBLING] * len(lens) + none
        )
        self.assertEqual(plan.retrieve_parent_token.shape[0], max(of_ranks))

    def test_mask_where_another_rank_has_more_requests(self):
        self._assert_masks([5], [1, 2])
        self._assert_masks([5, 3], [2, 4])

    def test_mask_of_an_idle_rank_of_a_hybrid_model(self):
        self._assert_masks([], [0, 2], hybrid=True)

    def test_mask_where_ranks_have_as_many_requests(self):
        self._assert_masks([5, 3], [2, 2])

    def test_links_where_another_rank_has_more_requests(self):
        self._assert_links([5], [1, 2])

    def test_links_of_an_idle_rank(self):
        self._assert_links([], [0, 2])

    def test_links_where_ranks_have_as_many_requests(self):
        self._assert_links([5, 3], [2, 2])


if __name__ == "__main__":
    unittest.main()
