"""Each draft step's row of KV indices has room for the step's own tokens."""

import unittest
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch

from sglang.srt.layers.attention import triton_backend
from sglang.srt.layers.attention.triton_backend import TritonMultiStepDraftBackend
from sglang.srt.runtime_context import get_parallel
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

CONTEXT_LEN = 16


class _Kernel:
    """Stands for generate_draft_decode_kv_indices: keeps the length of its row."""

    def __getitem__(self, grid):
        def launch(row_ids, ids, seq_lens, kv_indices, *args, **kwargs):
            self.width = kv_indices.shape[1]

        return launch


def _make_backend(topk, num_steps):
    model_runner = MagicMock(device="cpu", sliding_window_size=None)
    model_runner.req_to_token_pool = SimpleNamespace(
        size=8, req_to_token=torch.zeros(9, CONTEXT_LEN + 4 + num_steps + 1)
    )
    model_runner.model_config.get_max_num_attention_heads.return_value = 1
    with (
        patch.object(
            triton_backend,
            "TritonAttnBackend",
            return_value=MagicMock(max_context_len=CONTEXT_LEN, max_kv_splits=1),
        ),
        patch.object(triton_backend, "get_schedule"),
        patch.object(
            triton_backend, "resolve_draft_decode_window", return_value=(0, 0)
        ),
        get_parallel().override(attn_tp_size=1),
    ):
        return TritonMultiStepDraftBackend(model_runner, topk, num_steps)


class TestDraftKvIndicesWidth(unittest.TestCase):
    def _assert_rows_hold_the_last_step(self, width, seq_lens, topk, num_steps):
        # Step i attends to the committed tokens and to i + 1 of its own, on each
        # branch; the kernel writes a row for each of num_steps steps.
        last = sum(seq_lens) * topk + len(seq_lens) * topk * num_steps
        self.assertGreaterEqual(width, last)

    def _width(self, seq_lens, topk, num_steps):
        backend = _make_backend(topk, num_steps)
        kernel = _Kernel()
        forward_batch = MagicMock(
            batch_size=len(seq_lens),
            seq_lens=torch.tensor(seq_lens),
            seq_lens_sum=sum(seq_lens),
            out_cache_loc=None,
        )
        with patch.object(triton_backend, "generate_draft_decode_kv_indices", kernel):
            backend.init_forward_metadata(forward_batch)
        return kernel.width

    def test_requests_near_the_context_length(self):
        # A request's last round begins four tokens before the end, or earlier.
        for topk in (1, 4):
            for seq_lens in ([12], [12, 12, 12]):
                with self.subTest(topk=topk, seq_lens=seq_lens):
                    width = self._width(seq_lens, topk, num_steps=5)
                    self._assert_rows_hold_the_last_step(width, seq_lens, topk, 5)

    def test_requests_far_from_the_context_length(self):
        width = self._width([3, 5], 2, num_steps=3)
        self._assert_rows_hold_the_last_step(width, [3, 5], 2, 3)

    def test_buffer_of_cuda_graphs(self):
        backend = _make_backend(topk=2, num_steps=5)
        backend.init_cuda_graph_state(max_bs=3, max_num_tokens=6)
        width = backend.cuda_graph_kv_indices.shape[1]
        self._assert_rows_hold_the_last_step(width, [12] * 3, 2, 5)


if __name__ == "__main__":
    unittest.main()
