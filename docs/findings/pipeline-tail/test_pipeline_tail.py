"""A pipeline's last stage drafts past a context's end: rows of KV indices have room."""

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
NUM_STEPS = 4


class _Kernel:
    """Stands for generate_draft_decode_kv_indices: keeps the length of its row."""

    def __getitem__(self, grid):
        def launch(row_ids, ids, seq_lens, kv_indices, *args, **kwargs):
            self.width = kv_indices.shape[1]

        return launch


def _make_backend(topk):
    model_runner = MagicMock(device="cpu", sliding_window_size=None)
    model_runner.req_to_token_pool = SimpleNamespace(
        size=8, req_to_token=torch.zeros(9, CONTEXT_LEN + 4 + NUM_STEPS + 1)
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
        return TritonMultiStepDraftBackend(model_runner, topk, NUM_STEPS)


class TestDraftAfterTheContext(unittest.TestCase):
    def _assert_holds_the_last_step(self, width, seq_lens, topk):
        # Step i attends to the committed tokens and to i + 1 of its own, on each
        # branch; the kernel writes a row for each of NUM_STEPS steps.
        last = sum(seq_lens) * topk + len(seq_lens) * topk * NUM_STEPS
        self.assertGreaterEqual(width, last)

    def test_a_round_that_ends_the_request_is_drafted_for(self):
        # The round began before the context's end and accepted all its drafts.
        for topk in (1, 4):
            for seq_lens in ([CONTEXT_LEN + 1], [CONTEXT_LEN + NUM_STEPS] * 3):
                with self.subTest(topk=topk, seq_lens=seq_lens):
                    backend = _make_backend(topk)
                    kernel = _Kernel()
                    forward_batch = MagicMock(
                        batch_size=len(seq_lens),
                        seq_lens=torch.tensor(seq_lens),
                        seq_lens_sum=sum(seq_lens),
                        out_cache_loc=None,
                    )
                    with patch.object(
                        triton_backend, "generate_draft_decode_kv_indices", kernel
                    ):
                        backend.init_forward_metadata(forward_batch)
                    self._assert_holds_the_last_step(kernel.width, seq_lens, topk)

    def test_buffer_of_cuda_graphs(self):
        backend = _make_backend(topk=2)
        backend.init_cuda_graph_state(max_bs=3, max_num_tokens=6)
        width = backend.cuda_graph_kv_indices.shape[1]
        self._assert_holds_the_last_step(width, [CONTEXT_LEN + NUM_STEPS] * 3, 2)


if __name__ == "__main__":
    unittest.main()
