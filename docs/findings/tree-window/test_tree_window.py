"""Verify of a draft tree: a node sees the sliding window of its own path."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # the kernel runs on a CPU

import unittest
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch

from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

HEADS = 1
HEAD_DIM = 16
# Each node's parent; nodes follow their parents.
CHAIN = [-1, 0, 1, 2, 3]
SIBLINGS = [-1, 0, 0, 0, 0]
TREE = [-1, 0, 0, 0, 1, 3, 4, 5, 6]


def _paths(parents):
    """Return the nodes on each node's path from the root, itself the last."""
    paths = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    return paths


def _expected(q, prefix, extend, paths, window):
    """Plain attention: a node sees itself and `window` rows before it on its path."""
    rows = []
    for node, path in enumerate(paths):
        seen = [
            torch.cat([old, new[path]])[-window - 1 :]
            for old, new in zip(prefix, extend)
        ]
        scores = torch.einsum("hd,nhd->hn", q[node], seen[0]) * HEAD_DIM**-0.5
        rows.append(torch.einsum("hn,nhd->hd", scores.softmax(-1), seen[1]))
    return torch.stack(rows)


def _verify(q, prefix, extend, paths, prefix_lens, window):
    """Run the Triton backend's verify, one tree per request."""
    nodes, bs = len(paths), len(prefix_lens)
    starts = torch.tensor([0, *prefix_lens]).cumsum(0)
    window_lens = torch.tensor([min(length, window) for length in prefix_lens])
    slots = [
        torch.arange(end - length, end)
        for end, length in zip(starts[1:].tolist(), window_lens.tolist())
    ]
    masks = []
    for length in prefix_lens:
        mask = torch.zeros(nodes, length + nodes, dtype=torch.bool)
        mask[:, :length] = True
        for node, path in enumerate(paths):
            mask[node, [length + number for number in path]] = True
        masks.append(mask.flatten())
    depths = torch.tensor([len(path) - 1 for path in paths])

    backend = MagicMock(spec=TritonAttnBackend)
    backend._can_run_dense_fp8_chunked_mha.return_value = False
    backend._forward_extend_kernel = lambda layer, *args, **kwargs: (
        extend_attention_fwd(*args, **kwargs)
    )
    backend.dllm_attention = None
    backend.enable_deterministic = False
    backend.use_verify_shared_kv = backend.use_verify_splitkv = False
    backend.dcp_size = backend.page_size = 1
    backend.num_draft_tokens = nodes
    backend.token_to_kv_pool = MagicMock()
    backend.token_to_kv_pool.get_key_buffer.return_value = prefix[0]
    backend.token_to_kv_pool.get_value_buffer.return_value = prefix[1]
    backend.forward_metadata = SimpleNamespace(
        qo_indptr=torch.arange(bs + 1) * nodes,
        window_kv_indptr=torch.tensor([0, *window_lens]).cumsum(0),
        window_kv_indices=torch.cat(slots),
        window_kv_offsets=torch.tensor(prefix_lens) - window_lens,
        custom_mask=torch.cat(masks),
        mask_indptr=torch.tensor([0, *map(len, masks)]).cumsum(0),
        max_extend_len=nodes,
        swa_out_cache_loc=None,
    )
    forward_batch = MagicMock(
        batch_size=bs,
        seq_lens=torch.tensor(prefix_lens),
        positions=torch.cat([length + depths for length in prefix_lens]),
        extend_seq_lens_cpu=None,
        mha_one_shot=False,
        _attn_output=None,
    )
    layer = SimpleNamespace(
        layer_id=0,
        tp_q_head_num=HEADS,
        qk_head_dim=HEAD_DIM,
        v_head_dim=HEAD_DIM,
        scaling=HEAD_DIM**-0.5,
        sliding_window_size=window,
        logit_cap=0.0,
        logit_capping_method="tanh",
        k_scale=None,
        v_scale=None,
        xai_temperature_len=-1,
        attn_type=AttentionType.DECODER,
        is_cross_attention=False,
    )
    out = TritonAttnBackend.forward_extend(
        backend,
        q.flatten(1),
        *extend,
        layer,
        forward_batch,
        save_kv_cache=False,
    )
    return out.view(-1, HEADS, HEAD_DIM)


class TestTreeWindow(unittest.TestCase):
    def _assert_windows(self, parents, prefix_lens, window):
        torch.manual_seed(0)
        paths = _paths(parents)
        rows = len(prefix_lens) * len(paths)
        prefix = [torch.randn(sum(prefix_lens), HEADS, HEAD_DIM) for _ in range(2)]
        q, *extend = [torch.randn(rows, HEADS, HEAD_DIM) for _ in range(3)]
        out = _verify(q, prefix, extend, paths, prefix_lens, window)
        begin = 0
        for n, length in enumerate(prefix_lens):
            own = slice(n * len(paths), (n + 1) * len(paths))
            expected = _expected(
                q[own],
                [buffer[begin : begin + length] for buffer in prefix],
                [buffer[own] for buffer in extend],
                paths,
                window,
            )
            torch.testing.assert_close(out[own], expected, rtol=1e-4, atol=1e-4)
            begin += length

    def test_chain(self):
        self._assert_windows(CHAIN, [12, 7], 4)

    def test_siblings_see_as_much_of_the_prefix(self):
        self._assert_windows(SIBLINGS, [12], 4)

    def test_ancestors_are_counted_along_the_path(self):
        self._assert_windows(TREE, [12], 2)

    def test_batch(self):
        self._assert_windows(TREE, [12, 3, 7], 4)


if __name__ == "__main__":
    unittest.main()
