"""Verify of a tree counts an attention sink once, with FlashAttention's two calls."""

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

HEADS, DIM, SCALE = 2, 4, 0.5
PREFIX = [2, 3, 4]  # slots of the committed rows
NODES = [5, 6, 7]  # the root and its two children
SEEN = [[5], [5, 6], [5, 7]]  # by each node


def _attend(q, k, v, sinks):
    """Outputs [heads, dim] over rows k, v [rows, heads, dim], and log-sums [heads]."""
    scores = torch.einsum("hd,khd->hk", q, k) * SCALE
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None].to(scores.dtype)], 1)
    weights = scores.softmax(-1)[:, : len(k)]
    return torch.einsum("hk,khd->hd", weights, v), scores.logsumexp(-1)


def _flash_attention(
    q,
    k_cache,
    v_cache,
    page_table,
    cache_seqlens,
    cu_seqlens_q,
    sinks=None,
    **_,
):
    """As documented: pages of one slot, no causal mask. The sums of a kernel have the sinks that it was given."""
    out, sums = torch.empty_like(q), torch.empty(HEADS, len(q), dtype=q.dtype)
    for n, length in enumerate(cache_seqlens.tolist()):
        slots = page_table[n, :length].long()
        for row in range(cu_seqlens_q[n], cu_seqlens_q[n + 1]):
            out[row], sums[:, row] = _attend(
                q[row], k_cache[slots, 0], v_cache[slots, 0], sinks
            )
    return out, sums


def _merge(v_a, s_a, v_b, s_b):
    total = torch.logaddexp(s_a, s_b)
    merged = v_a * (s_a - total).exp()[..., None] + v_b * (s_b - total).exp()[..., None]
    return merged, total


def _metadata(tables, bounds):
    return FlashAttentionMetadata(
        cache_seqlens_int32=torch.tensor([len(table) for table in tables]).int(),
        cu_seqlens_q=torch.tensor(bounds).int(),
        page_table=torch.tensor([table + [0] * (3 - len(table)) for table in tables]),
    )


class TestSinksOfTrees(unittest.TestCase):
    def _assert_right(self, sinks):
        torch.manual_seed(0)
        q = torch.randn(len(NODES), HEADS, DIM, dtype=torch.float64)
        k, v = torch.randn(2, 8, HEADS, DIM, dtype=torch.float64)
        backend = FlashAttentionBackend.__new__(FlashAttentionBackend)
        vars(backend).update(
            topk=2,
            use_mla=False,
            page_size=1,
            fa_impl_ver=3,
            num_splits=0,
            kv_cache_dtype_str="auto",
            kv_cache_is_mxfp8=False,
            fa_skip_kv_cache=False,
            local_attn_builder=None,
            use_sliding_window_kv_pool=False,
            full_cg_prefill_metadata=None,
            token_to_kv_pool=MagicMock(get_kv_buffer=lambda _: (k, v)),
            forward_metadata=_metadata([PREFIX], [0, len(NODES)]),
            forward_metadata_spec_decode_expand=_metadata(SEEN, [0, 1, 2, 3]),
        )
        layer = SimpleNamespace(
            layer_id=0,
            sliding_window_size=-1,
            is_cross_attention=False,
            attn_type=AttentionType.DECODER,
            tp_q_head_num=HEADS,
            tp_k_head_num=HEADS,
            tp_v_head_num=HEADS,
            head_dim=DIM,
            v_head_dim=DIM,
            scaling=SCALE,
            logit_cap=0.0,
            k_scale=None,
        )
        batch = MagicMock(
            forward_mode=ForwardMode.TARGET_VERIFY, batch_size=1, _attn_output=None
        )
        batch.spec_algorithm.is_uno.return_value = False
        with (
            patch.object(
                flashattention_backend, "flash_attn_with_kvcache", _flash_attention
            ),
            patch.object(flashattention_backend, "merge_state_v2_wrapper", _merge),
            patch.object(flashattention_backend, "is_cp_active", lambda _: False),
        ):
            found = backend.forward_extend(
                q.flatten(1), None, None, layer, batch, sinks=sinks
            )
        expected = torch.stack(
            [
                _attend(query, k[PREFIX + seen], v[PREFIX + seen], sinks)[0]
                for query, seen in zip(q, SEEN)
            ]
        )
        torch.testing.assert_close(found.view_as(expected), expected)

    def test_a_sink_is_counted_once(self):
        self._assert_right(torch.tensor([0.5, 1.5]))

    def test_a_tree_without_sinks(self):
        self._assert_right(None)


if __name__ == "__main__":
    unittest.main()
