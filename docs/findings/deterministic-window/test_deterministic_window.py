"""Deterministic verify: a layer with a sliding window reads the mask of its own keys."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # the kernel runs on a CPU

import unittest
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch

from sglang.kernels.ops.attention.extend_attention import (
    build_unified_kv_indices,
    extend_attention_fwd_unified,
)
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

HEADS = 1
HEAD_DIM = 16
DRAFTS = 4


def _expected(q, prefix, extend, window):
    """Plain attention: a draft of a chain sees itself and `window` rows before it."""
    rows = []
    for n in range(DRAFTS):
        end = len(prefix[0]) + n + 1
        seen = [
            torch.cat([old, new])[max(end - window - 1, 0) : end]
            for old, new in zip(prefix, extend)
        ]
        scores = torch.einsum("hd,nhd->hn", q[n], seen[0]) * HEAD_DIM**-0.5
        rows.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), seen[1]))
    return torch.stack(rows)


def _causal_masks(prefix_lens):
    """Return each request's chain mask, over its whole prefix and its drafts."""
    masks = []
    for length in prefix_lens:
        mask = torch.ones(DRAFTS, length + DRAFTS, dtype=torch.bool)
        masks.append(mask.tril(length).flatten())
    return masks


def _verify(q, buffers, slots, out_slots, prefix_lens, window):
    """Run the Triton backend's deterministic verify, one chain per request."""
    bs = len(prefix_lens)
    kept = [own[-window:] for own in slots]
    masks = _causal_masks(prefix_lens)
    backend = MagicMock(spec=TritonAttnBackend)
    backend.build_unified_kv_indices = build_unified_kv_indices
    backend.extend_attention_fwd_unified = extend_attention_fwd_unified
    backend.device = "cpu"
    backend.page_size = 1
    backend.token_to_kv_pool = MagicMock()
    backend.token_to_kv_pool.get_key_buffer.return_value = buffers[0]
    backend.token_to_kv_pool.get_value_buffer.return_value = buffers[1]
    backend.forward_metadata = SimpleNamespace(
        qo_indptr=torch.arange(bs + 1) * DRAFTS,
        kv_indptr=torch.tensor([0, *prefix_lens]).cumsum(0),
        kv_indices=torch.cat(slots),
        window_kv_indptr=torch.tensor([0, *map(len, kept)]).cumsum(0),
        window_kv_indices=torch.cat(kept),
        aligned_window_kv_indptr=None,
        aligned_window_kv_indices=None,
        custom_mask=torch.cat(masks),
        mask_indptr=torch.tensor([0, *map(len, masks)]).cumsum(0),
        max_extend_len=DRAFTS,
        swa_out_cache_loc=None,
    )
    forward_batch = MagicMock(
        batch_size=bs,
        seq_lens=torch.tensor(prefix_lens),
        out_cache_loc=out_slots,
        extend_prefix_lens=None,
        extend_seq_lens=None,
        extend_start_loc=None,
    )
    forward_batch.forward_mode.is_target_verify.return_value = True
    layer = SimpleNamespace(
        layer_id=0,
        tp_q_head_num=HEADS,
        qk_head_dim=HEAD_DIM,
        v_head_dim=HEAD_DIM,
        scaling=HEAD_DIM**-0.5,
        sliding_window_size=window,
        k_scale=None,
        v_scale=None,
        xai_temperature_len=-1,
        attn_type=AttentionType.DECODER,
    )
    out = torch.zeros_like(q)
    TritonAttnBackend._forward_extend_unified(
        backend, q, out, layer, forward_batch, True, 0.0, None
    )
    return out


class TestDeterministicWindow(unittest.TestCase):
    def _assert_windows(self, prefix_lens, window):
        torch.manual_seed(0)
        bs, total = len(prefix_lens), sum(prefix_lens)
        buffers = [
            torch.randn(total + bs * DRAFTS, HEADS, HEAD_DIM) for _ in range(2)
        ]
        slots = list(torch.arange(total).split(prefix_lens))
        out_slots = torch.arange(total, total + bs * DRAFTS)
        q = torch.randn(bs * DRAFTS, HEADS, HEAD_DIM)
        out = _verify(q, buffers, slots, out_slots, prefix_lens, window)
        for n, own in enumerate(slots):
            drafts = slice(n * DRAFTS, (n + 1) * DRAFTS)
            expected = _expected(
                q[drafts],
                [buffer[own] for buffer in buffers],
                [buffer[out_slots[drafts]] for buffer in buffers],
                window,
            )
            torch.testing.assert_close(out[drafts], expected, rtol=1e-4, atol=1e-4)

    def test_prefix_within_the_window(self):
        self._assert_windows([5], 8)

    def test_prefix_longer_than_the_window(self):
        self._assert_windows([12], 8)

    def test_batch(self):
        self._assert_windows([12, 5, 30], 8)


if __name__ == "__main__":
    unittest.main()
