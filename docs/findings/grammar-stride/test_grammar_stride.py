"""A grammar's mask applies to its own row of logits, whatever the row stride is."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # the kernel that applies masks runs on a CPU

import unittest

import torch

from sglang.kernels.ops.grammar.bitmask_ops import apply_token_bitmask_inplace_triton
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

VOCAB_SIZE = 96
PADDED = 128  # VocabParallelEmbedding pads a vocabulary to a multiple of 64
FORBIDDEN = float("-inf")


def _pack(allowed):
    """Pack one bit per token, 32 per integer, as grammar backends do."""
    words = []
    for begin in range(0, VOCAB_SIZE, 32):
        word = sum(1 << (n - begin) for n in allowed if begin <= n < begin + 32)
        words.append(word - (1 << 32) if word >= 1 << 31 else word)
    return words


class TestMaskOfAGrammar(unittest.TestCase):
    def _assert_own_tokens_alone(self, padded, allowed, indices=None):
        """padded: one row of logits per request, cut to the vocabulary here.

        allowed: tokens per request; None if no mask applies.
        """
        logits = padded[:, :VOCAB_SIZE]
        before = padded.clone()
        mask = torch.tensor(
            [_pack(tokens or ()) for tokens in allowed], dtype=torch.int32
        )
        apply_token_bitmask_inplace_triton(logits, mask, indices)
        for row, tokens in enumerate(allowed):
            expected = before[row, :VOCAB_SIZE].clone()
            if tokens is not None:
                refused = [n for n in range(VOCAB_SIZE) if n not in tokens]
                expected[refused] = FORBIDDEN
            self.assertEqual(logits[row].tolist(), expected.tolist())
        # The columns after the vocabulary belong to no row.
        self.assertTrue(
            torch.equal(padded[:, VOCAB_SIZE:], before[:, VOCAB_SIZE:]),
            "the padding was written to",
        )

    def _make(self, rows, width):
        return torch.arange(rows * width, dtype=torch.float32).view(rows, width)

    def test_logits_that_are_a_view_of_padded_ones(self):
        self._assert_own_tokens_alone(self._make(2, PADDED), [{1}, {2, 40, 95}])

    def test_three_requests(self):
        self._assert_own_tokens_alone(self._make(3, PADDED), [{31}, {32}, {63, 64}])

    def test_masks_of_some_rows_of_a_view(self):
        self._assert_own_tokens_alone(
            self._make(3, PADDED), [{5}, None, {7, 70}], indices=[0, 2]
        )

    def test_one_request(self):
        self._assert_own_tokens_alone(self._make(1, PADDED), [{2, 40, 95}])

    def test_logits_without_padding(self):
        self._assert_own_tokens_alone(self._make(2, VOCAB_SIZE), [{1}, {2, 40, 95}])

    def test_logits_of_one_dimension(self):
        logits = self._make(1, VOCAB_SIZE)[0]
        mask = torch.tensor(_pack({3}), dtype=torch.int32)
        apply_token_bitmask_inplace_triton(logits, mask)
        self.assertEqual(logits.isfinite().nonzero().flatten().tolist(), [3])


if __name__ == "__main__":
    unittest.main()
