"""Each step of a DSA draft chain may choose its own row, and those before it."""

import unittest
from contextlib import ExitStack
from types import SimpleNamespace
from unittest.mock import patch

import torch

from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnMultiStepBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

NUM_STEPS, COMMITTED, COLUMNS, TOPK = 5, (5, 63), 128, 64
TABLE = torch.arange(len(COMMITTED) * COLUMNS, dtype=torch.int32).view(-1, COLUMNS)


def _backend():
    pool = SimpleNamespace(
        dsa_kv_cache_store_fp8=False, kv_cache_dim=576, dtype=torch.bfloat16
    )
    hf_config = SimpleNamespace(
        architectures=["DeepseekV3ForCausalLMNextN"], index_topk=TOPK
    )
    config = SimpleNamespace(
        hf_config=hf_config,
        context_len=COLUMNS,
        num_attention_heads=16,
        qk_nope_head_dim=128,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
    )
    runner = SimpleNamespace(
        device="cpu",
        page_size=64,
        model_config=config,
        req_to_token_pool=SimpleNamespace(req_to_token=TABLE, size=len(COMMITTED)),
        token_to_kv_pool=pool,
        hisparse_coordinator=None,
        is_draft_worker=True,
        kv_cache_dtype=torch.bfloat16,
        max_running_requests=len(COMMITTED),
    )
    return DeepseekSparseAttnMultiStepBackend(runner, 1, NUM_STEPS)


def _batch(committed):
    lengths = torch.tensor(committed)
    slots = [TABLE[r, m : m + NUM_STEPS] for r, m in enumerate(committed)]
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=len(committed),
        input_ids=torch.zeros_like(lengths),
        req_pool_indices=torch.arange(len(committed)),
        seq_lens=lengths,
        seq_lens_cpu=lengths,
        seq_lens_sum=sum(committed),
        out_cache_loc=torch.cat(slots).long(),
        positions=lengths.clone(),
    )


class TestDsaDraftReads(unittest.TestCase):
    def setUp(self):
        arguments = {
            "attention_backend": "dsa",
            "device": "cpu",
            "dsa_prefill_backend": "flashmla_sparse",
            "dsa_decode_backend": "fa3",
            "dsa_topk_backend": "torch",
            "speculative_dsa_topk_backend": "torch",
            "speculative_algorithm": "EAGLE",
            "speculative_eagle_topk": 1,
            "speculative_num_steps": NUM_STEPS,
            "speculative_num_draft_tokens": NUM_STEPS + 1,
        }
        one_rank = {
            "attn_tp_size": 1,
            "attn_tp_rank": 0,
            "attn_cp_size": 1,
            "attn_cp_rank": 0,
        }
        stack = self.enterContext(ExitStack())
        stack.enter_context(get_parallel().override(**one_rank))
        stack.enter_context(get_context().override_server_args(**arguments))
        stack.enter_context(
            patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        )
        self.backend = _backend()

    def _check(self):
        for step, of in enumerate(self.backend.attn_backends, 1):
            plan = of.forward_metadata
            lengths = [m + step for m in COMMITTED]
            self.assertEqual(plan.cache_seqlens_int32.tolist(), lengths)
            self.assertEqual(plan.dsa_seqlens_expanded.tolist(), lengths)
            chosen = [min(length, TOPK) for length in lengths]
            self.assertEqual(plan.dsa_cache_seqlens_int32.tolist(), chosen)
            for r, length in enumerate(lengths):
                slots = plan.page_table_1[r, :length].tolist()
                self.assertEqual(slots, TABLE[r, :length].tolist())
                pages = plan.real_page_table[r, : -(-length // 64)].tolist()
                self.assertEqual(pages, (TABLE[r, :length:64] // 64).tolist())

    def test_without_a_graph_each_step_reads_up_to_its_own_row(self):
        self.backend.init_forward_metadata(_batch(COMMITTED))
        self._check()

    def test_before_a_replay_each_step_reads_up_to_its_own_row(self):
        self.backend.init_cuda_graph_state(len(COMMITTED), len(COMMITTED))
        captured = _batch((1,) * len(COMMITTED))
        self.backend.init_forward_metadata_out_graph(captured, in_capture=True)
        self.backend.init_forward_metadata_out_graph(_batch(COMMITTED))
        self._check()


if __name__ == "__main__":
    unittest.main()
