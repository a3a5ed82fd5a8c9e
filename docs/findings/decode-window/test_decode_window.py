"""Decode of the Triton backend attends to all rows of a sliding window."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # the kernel runs on a CPU

import unittest
from types import SimpleNamespace

import torch

from sglang.kernels.ops.attention.decode_attention import decode_attention_fwd
from sglang.srt.layers.attention.triton_backend import update_sliding_window_buffer
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=12, suite="base-a-test-cpu")

WINDOW = 8  # config.sliding_window - 1: rows before the query's own
HEADS, HEAD_DIM, SPLITS = 2, 16, 2


class _Translator(SimpleNamespace):
    """Row i of a request lies in slot i."""

    window_kv_kind = None

    def pack_read_stream(self, plan, *, seq_lens, kv_start_idx, out, **kwargs):
        rows = [
            torch.arange(first, first + length)
            for first, length in zip(kv_start_idx.tolist(), seq_lens.tolist())
        ]
        out[: sum(map(len, rows))] = torch.cat(rows)
        return True


def _decode(q, keys, values, lengths):
    """Run the decode kernel on the rows that the backend lists."""
    bs = len(lengths)
    indptr, indices, _, _ = update_sliding_window_buffer(
        torch.zeros(bs + 1, dtype=torch.int32),
        _Translator(),
        None,
        torch.arange(bs),
        WINDOW,
        torch.tensor(lengths),
        bs,
        "cpu",
    )
    out = torch.empty_like(q)
    decode_attention_fwd(
        q,
        keys,
        values,
        out,
        indptr,
        indices,
        torch.zeros(bs, HEADS, SPLITS, HEAD_DIM),
        torch.zeros(bs, HEADS, SPLITS),
        torch.full((bs,), SPLITS, dtype=torch.int32),
        SPLITS,
        HEAD_DIM**-0.5,
        1.0,
        1.0,
    )
    return out


class TestDecodeWindow(unittest.TestCase):
    def _assert_window(self, *lengths):
        torch.manual_seed(0)
        q = torch.randn(len(lengths), HEADS, HEAD_DIM)
        keys, values = torch.randn(2, max(lengths), HEADS, HEAD_DIM)
        out = _decode(q, keys, values, lengths)
        for row, length in enumerate(lengths):
            seen = slice(max(length - 1 - WINDOW, 0), length)
            scores = torch.einsum("hd,nhd->hn", q[row], keys[seen]) * HEAD_DIM**-0.5
            right = torch.einsum("hn,nhd->hd", scores.softmax(-1), values[seen])
            with self.subTest(length=length):
                self.assertTrue(torch.allclose(out[row], right, atol=1e-5))

    def test_a_context_longer_than_the_window(self):
        self._assert_window(20)
        self._assert_window(WINDOW + 1)

    def test_requests_of_different_lengths(self):
        self._assert_window(5, 20, 9)

    def test_a_short_context(self):
        self._assert_window(5)


if __name__ == "__main__":
    unittest.main()
