"""Verify of a tree with latent attention reads its nodes' own rows, with FlashAttention."""

import importlib.util
import sys
import unittest
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

if importlib.util.find_spec("sgl_kernel") is None:  # torch stands in for its kernels
    sys.modules["sgl_kernel"] = sys.modules["sgl_kernel.flash_attn"] = MagicMock()

import torch

from sglang.srt.layers.attention import flashattention_backend
from sglang.srt.layers.attention.flashattention_backend import (
    FlashAttentionBackend,
    FlashAttentionMetadata,
)
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

HEADS, LATENT, ROPE, SCALE = 2, 4, 2, 0.5
PAGE_SIZE = 2
PAGES = [1, 2]  # of the committed rows
PREFIX = [2, 3, 4, 5]  # their slots
NODES = [6, 7, 8]  # the root and its two children
SEEN = [[6], [6, 7], [6, 8]]  # by each node


def _attend(q, rows):
    """Outputs [heads, latent] over latent rows, and log-sums [heads]."""
    scores = q @ rows.T * SCALE
    return scores.softmax(-1) @ rows[:, :LATENT], scores.logsumexp(-1)


def _flash_attention(
    q,
    k_cache,
    v_cache,
    qv,
    page_table,
    cache_seqlens,
    cu_seqlens_q,
    **_,
):
    """As documented: rows lie in pages, and nothing is masked."""
    size = k_cache.shape[1]
    stored = torch.cat([v_cache, k_cache], -1).flatten(0, 2)
    out, sums = torch.empty_like(qv), torch.empty(HEADS, len(q), dtype=q.dtype)
    for n, length in enumerate(cache_seqlens.tolist()):
        order = torch.arange(length)
        slots = page_table[n, order // size] * size + order % size
        for row in range(cu_seqlens_q[n], cu_seqlens_q[n + 1]):
            query = torch.cat([qv[row], q[row]], -1)
            out[row], sums[:, row] = _attend(query, stored[slots])
    return out, sums


def _merge(v_a, s_a, v_b, s_b):
    total = torch.logaddexp(s_a, s_b)
    merged = v_a * (s_a - total).exp()[..., None] + v_b * (s_b - total).exp()[..., None]
    return merged, total


def _metadata(tables, lengths, bounds):
    return FlashAttentionMetadata(
        cache_seqlens_int32=torch.tensor(lengths).int(),
        cu_seqlens_q=torch.tensor(bounds).int(),
        page_table=torch.tensor([table + [0] * (4 - len(table)) for table in tables]),
    )


class TestNodesOfTrees(unittest.TestCase):
    def _assert_right(self, page_size, pages):
        torch.manual_seed(0)
        q = torch.randn(len(NODES), HEADS, LATENT + ROPE, dtype=torch.float64)
        rows = torch.randn(20, 1, LATENT + ROPE, dtype=torch.float64)
        backend = FlashAttentionBackend.__new__(FlashAttentionBackend)
        vars(backend).update(
            topk=2,
            use_mla=True,
            page_size=page_size,
            fa_impl_ver=3,
            num_splits=0,
            kv_cache_dtype_str="auto",
            kv_cache_is_mxfp8=False,
            local_attn_builder=None,
            use_sliding_window_kv_pool=False,
            full_cg_prefill_metadata=None,
            token_to_kv_pool=MagicMock(get_key_buffer=lambda _: rows),
            forward_metadata=_metadata([pages], [len(PREFIX)], [0, len(NODES)]),
            forward_metadata_spec_decode_expand=_metadata(
                SEEN, [len(seen) for seen in SEEN], [0, 1, 2, 3]
            ),
        )
        layer = SimpleNamespace(
            layer_id=0,
            sliding_window_size=-1,
            is_cross_attention=False,
            attn_type=AttentionType.DECODER,
            tp_q_head_num=HEADS,
            tp_k_head_num=1,
            head_dim=LATENT + ROPE,
            v_head_dim=LATENT,
            scaling=SCALE,
            logit_cap=0.0,
            k_scale=None,
        )
        batch = MagicMock(
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=1,
            attn_attend_prefix_cache=None,
            _attn_output=None,
        )
        with (
            patch.object(
                flashattention_backend, "flash_attn_with_kvcache", _flash_attention
            ),
            patch.object(flashattention_backend, "merge_state_v2_wrapper", _merge),
            patch.object(flashattention_backend, "is_cp_active", lambda _: False),
        ):
            found = backend.forward_extend(q.flatten(1), None, None, layer, batch)
        expected = torch.stack(
            [
                _attend(query, rows[PREFIX + seen, 0])[0]
                for query, seen in zip(q, SEEN)
            ]
        )
        torch.testing.assert_close(found.view_as(expected), expected)

    def test_nodes_in_pages(self):
        self._assert_right(PAGE_SIZE, PAGES)

    def test_nodes_in_pages_of_one_row(self):
        self._assert_right(1, PREFIX)


if __name__ == "__main__":
    unittest.main()
