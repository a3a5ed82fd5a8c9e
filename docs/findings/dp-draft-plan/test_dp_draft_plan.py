"""A draft step whose batch DP attention has padded decodes the rows that it planned."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # the kernel runs on a CPU

import unittest
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch

from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.model_executor import forward_batch_info
from sglang.srt.model_executor.cuda_graph_config import CudaGraphConfig
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

HEADS, HEAD_DIM, SPLITS = 2, 16, 4


def _draft_step(lens, topk):
    """Build the batch of a draft step, for requests with these numbers of rows."""
    rows = len(lens) * topk
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=len(lens),
        input_ids=torch.zeros(rows, dtype=torch.int64),
        req_pool_indices=torch.arange(len(lens)),
        seq_lens=torch.tensor(lens),
        seq_lens_cpu=torch.tensor(lens),
        seq_lens_sum=sum(lens),
        out_cache_loc=torch.arange(rows),
        positions=torch.zeros(rows, dtype=torch.int64),
        spec_info=EagleDraftInput(
            hidden_states=torch.zeros(rows, 4),
            topk_p=torch.zeros(len(lens), topk),
            topk_index=torch.zeros(len(lens), topk, dtype=torch.int64),
            bonus_tokens=torch.zeros(len(lens), dtype=torch.int64),
            num_tokens_per_req=topk,
            num_tokens_for_logprob_per_req=topk,
        ),
    )


def _pad(forward_batch, of_ranks, attn_tp_size):
    """Pad as ModelRunner does before each eager forward; this rank is the first."""
    forward_batch.global_num_tokens_cpu = list(of_ranks)
    forward_batch.global_num_tokens_for_logprob_cpu = list(of_ranks)
    forward_batch.global_num_tokens_gpu = torch.tensor(of_ranks)
    runner = MagicMock(is_draft_worker=True)
    runner.model_config.hf_config.mtp_hybrid_override_pattern = None
    runner.attn_backend.get_cpu_graph_seq_len_fill_value.return_value = 1
    tp_size = len(of_ranks) * attn_tp_size
    ranks = {
        "tp_size": tp_size,
        "moe_tp_size": tp_size,
        "attn_tp_size": attn_tp_size,
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


def _decode(q, pool, slots, forward_batch):
    """Run attention of a padded step with the plan for `slots`."""
    planned = len(slots)
    backend = MagicMock(spec=TritonAttnBackend)
    backend.decode_attention_fwd = decode_attention_fwd
    backend.use_mla = backend.use_pdl = backend.enable_lean_attention = False
    backend.enable_deterministic = False
    backend.dcp_size = backend.page_size = 1
    backend.max_kv_splits = SPLITS
    backend.token_to_kv_pool = MagicMock()
    backend.token_to_kv_pool.get_key_buffer.return_value = pool[0]
    backend.token_to_kv_pool.get_value_buffer.return_value = pool[1]
    backend.forward_metadata = SimpleNamespace(
        kv_indptr=torch.tensor([0, *map(len, slots)]).cumsum(0),
        kv_indices=torch.cat(slots),
        attn_logits=torch.zeros(planned, HEADS, SPLITS, HEAD_DIM),
        attn_lse=torch.zeros(planned, HEADS, SPLITS),
        num_kv_splits=torch.full((planned,), SPLITS, dtype=torch.int32),
        swa_attn_logits=None,
        lean_Mp=None,
        lean_Lp=None,
        lean_Op=None,
        lean_locks=None,
        uneven_batch=None,
    )
    layer = SimpleNamespace(
        layer_id=0,
        tp_q_head_num=HEADS,
        tp_k_head_num=HEADS,
        qk_head_dim=HEAD_DIM,
        v_head_dim=HEAD_DIM,
        scaling=HEAD_DIM**-0.5,
        sliding_window_size=None,
        logit_cap=0.0,
        logit_capping_method="tanh",
        k_scale=None,
        v_scale=None,
        xai_temperature_len=-1,
    )
    out = TritonAttnBackend.forward_decode(
        backend, q.flatten(1), None, None, layer, forward_batch, save_kv_cache=False
    )
    return out.view(-1, HEADS, HEAD_DIM)


class TestPaddedDraftStep(unittest.TestCase):
    def _assert_decodes(self, lens, of_ranks, padded=None, topk=1, attn_tp_size=1):
        # padded: the number of rows, where the fix does not decide it
        torch.manual_seed(0)
        forward_batch = _draft_step(lens, topk)
        _pad(forward_batch, of_ranks, attn_tp_size)
        rows = forward_batch.input_ids.shape[0]
        if padded is not None:
            self.assertEqual(rows, padded)
        pool = [torch.randn(32, HEADS, HEAD_DIM) for _ in range(2)]
        slots = [torch.randperm(32)[:n] for n in lens for _ in range(topk)]
        q = torch.randn(rows, HEADS, HEAD_DIM)
        out = _decode(q, pool, slots, forward_batch)
        self.assertEqual(out.shape, q.shape)
        self.assertTrue(out.isfinite().all())
        for row, own in enumerate(slots):
            keys, values = (buffer[own] for buffer in pool)
            scores = torch.einsum("hd,nhd->hn", q[row], keys) * HEAD_DIM**-0.5
            expected = torch.einsum("hn,nhd->hd", scores.softmax(-1), values)
            torch.testing.assert_close(out[row], expected, rtol=1e-4, atol=1e-4)

    def test_another_rank_has_more_requests(self):
        self._assert_decodes([5], [1, 2])

    def test_another_rank_has_more_branches(self):
        self._assert_decodes([5, 3], [4, 6], topk=2)

    def test_rows_are_padded_to_the_ranks_of_attention(self):
        self._assert_decodes([5], [1, 1], padded=2, attn_tp_size=2)

    def test_ranks_have_as_many_requests(self):
        self._assert_decodes([5, 3], [2, 2], padded=2)


if __name__ == "__main__":
    unittest.main()
