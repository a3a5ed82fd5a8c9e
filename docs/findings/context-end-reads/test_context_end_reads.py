"""With CUDA graphs FlashAttention finds a request's drafts beyond its context length."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # the kernel that fills page tables runs on a CPU

import importlib.util
import sys
import unittest
from types import SimpleNamespace
from unittest.mock import MagicMock

if importlib.util.find_spec("sgl_kernel") is None:  # its kernels are not launched here
    sys.modules["sgl_kernel"] = sys.modules["sgl_kernel.flash_attn"] = MagicMock()

import torch

from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend
from sglang.srt.mem_cache.allocation_sizing import get_req_to_token_extra_context_len
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=20, suite="base-a-test-cpu")

CONTEXT_LEN = 16
NUM_DRAFT_TOKENS = 5


def _make_backend(page_size, max_bs):
    """Build a target's backend with its CUDA graph state; rows hold their slots."""
    with (
        get_context().override_server_args(
            speculative_algorithm="EAGLE",
            speculative_num_steps=NUM_DRAFT_TOKENS - 1,
            speculative_eagle_topk=1,
            speculative_num_draft_tokens=NUM_DRAFT_TOKENS,
            page_size=page_size,
        ),
        get_parallel().override(
            attn_dcp_size=1,
            attn_cp_size=1,
            attn_tp_size=1,
            enable_prefill_cp=False,
            attn_dp_enabled=False,
        ),
    ):
        # As KVCacheConfigurator builds it: with room for drafts after the context.
        row_len = CONTEXT_LEN + get_req_to_token_extra_context_len()
        pool = ReqToTokenPool(max_bs, row_len, "cpu", enable_memory_saver=False)
        stride = row_len + -row_len % page_size
        slots = torch.arange(stride, stride * (max_bs + 1), dtype=torch.int32)
        pool.req_to_token[1:] = slots.view(max_bs, stride)[:, :row_len]
        model_runner = MagicMock(
            device="cpu",
            page_size=page_size,
            sliding_window_size=None,
            is_draft_worker=False,
            prefill_aware_swa=False,
            req_to_token_pool=pool,
        )
        model_runner.model_config.is_encoder_decoder = False
        model_runner.model_config.is_local_attention_model = False
        model_runner.model_config.context_len = CONTEXT_LEN
        model_runner.model_config.hf_text_config.num_attention_heads = 1
        model_runner.model_config.hf_text_config.attn_logit_softcapping = None
        model_runner.kv_index_translator.reads_are_translated = False
        model_runner.kv_index_translator.is_translating = False
        backend = FlashAttentionBackend(model_runner)
        backend.init_cuda_graph_state(max_bs, max_bs * NUM_DRAFT_TOKENS)
    return backend


class TestPageTablesOfCudaGraphs(unittest.TestCase):
    def _assert_reads_own_pages(self, forward_mode, seq_lens, page_size=1):
        """FlashAttention reads only the request's own pages of a page table.

        seq_lens: the batch's lengths, before verify's drafts.
        """
        bs = len(seq_lens)
        backend = _make_backend(page_size, max_bs=bs)
        rows = torch.arange(1, bs + 1)
        lens = torch.tensor(seq_lens)
        if forward_mode.is_draft_extend_v2():  # its batch counts the drafts already
            lens = lens + NUM_DRAFT_TOKENS
        forward_batch = MagicMock(
            batch_size=bs,
            forward_mode=forward_mode,
            req_pool_indices=rows,
            seq_lens=lens,
            extend_seq_lens=torch.full((bs,), NUM_DRAFT_TOKENS),
            spec_info=SimpleNamespace(num_tokens_per_req=NUM_DRAFT_TOKENS),
            positions=torch.zeros(bs * NUM_DRAFT_TOKENS),
            encoder_lens=None,
            out_cache_loc=None,
        )
        backend.init_forward_metadata_out_graph(forward_batch, in_capture=True)
        backend.init_forward_metadata_out_graph(forward_batch)  # replay
        backend.init_forward_metadata_in_graph(forward_batch)
        if forward_mode.is_target_verify():
            metadata = backend.target_verify_metadata[bs]
        else:
            metadata = backend.draft_extend_metadata[bs]

        read = [length + NUM_DRAFT_TOKENS for length in seq_lens]
        self.assertEqual(metadata.cache_seqlens_int32.tolist(), read)
        width = metadata.page_table.shape[1]
        entries = metadata.page_table.flatten().tolist()
        req_to_token = backend.req_to_token
        for n, length in enumerate(read):
            expected = (req_to_token[n + 1, :length:page_size] // page_size).tolist()
            begin = n * width  # the kernel continues past the row's end
            self.assertEqual(entries[begin : begin + len(expected)], expected)

    def test_verify_at_the_end_of_the_context(self):
        # Without overlap a request's last round begins four tokens before the end.
        self._assert_reads_own_pages(ForwardMode.TARGET_VERIFY, [12, 3])

    def test_verify_after_the_end_of_the_context(self):
        # With overlap a finished request takes part in one more round.
        self._assert_reads_own_pages(ForwardMode.TARGET_VERIFY, [16, 3])

    def test_verify_in_the_last_row(self):
        self._assert_reads_own_pages(ForwardMode.TARGET_VERIFY, [12])

    def test_verify_with_pages(self):
        self._assert_reads_own_pages(ForwardMode.TARGET_VERIFY, [12, 3], page_size=4)

    def test_draft_extend_at_the_end_of_the_context(self):
        self._assert_reads_own_pages(ForwardMode.DRAFT_EXTEND_V2, [12, 3])

    def test_requests_far_from_the_end(self):
        for forward_mode in (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2):
            for page_size in (1, 4):
                with self.subTest(forward_mode=forward_mode, page_size=page_size):
                    self._assert_reads_own_pages(forward_mode, [7, 11], page_size)


if __name__ == "__main__":
    unittest.main()
