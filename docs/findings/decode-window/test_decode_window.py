"""Decode of the Triton backend lists all rows of a sliding window, the query's own among them."""

import unittest
from types import SimpleNamespace

import torch

from sglang.srt.layers.attention.triton_backend import update_sliding_window_buffer
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

BACK = 8  # config.sliding_window - 1: rows before the query's own


def _listed(length):
    """How many rows are listed for a query behind so many rows, its own among them."""
    translator = SimpleNamespace(
        window_kv_kind=None, pack_read_stream=lambda *args, **kwargs: True
    )
    _, _, lengths, first = update_sliding_window_buffer(
        torch.zeros(2, dtype=torch.int32),
        translator,
        None,
        torch.tensor([0]),
        BACK,
        torch.tensor([length]),
        1,
        "cpu",
    )
    return int(lengths[0]), int(first[0])


class TestDecodeWindow(unittest.TestCase):
    def test_a_window_that_ended(self):
        self.assertEqual(_listed(20), (BACK + 1, 20 - BACK - 1))

    def test_a_short_context(self):
        self.assertEqual(_listed(5), (5, 0))


if __name__ == "__main__":
    unittest.main()
