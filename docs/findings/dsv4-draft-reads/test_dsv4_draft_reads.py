"""Each step of a DeepSeek-V4 draft chain reads its own row, and those before it."""

import unittest
from types import SimpleNamespace
from unittest.mock import patch

import torch

from sglang.srt.layers.attention import deepseek_v4_backend
from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4MultiStepBackend
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

NUM_STEPS, COMMITTED, COLUMNS = 4, (5, 255), 512


def _backend(req_to_token):
    slots = req_to_token.numel()
    pool = DeepSeekV4TokenToKVPool(
        max_num_reqs=len(COMMITTED),
        swa_size=slots,
        c4_size=256,
        c128_size=256,
        c4_state_pool_size=1,
        c128_state_pool_size=1,
        page_size=256,
        swa_page_size=256,
        dtype=torch.float8_e4m3fn,
        c4_state_dtype=torch.float32,
        c128_state_dtype=torch.float32,
        qk_nope_head_dim=448,
        qk_rope_head_dim=64,
        indexer_head_dim=128,
        layer_num=1,
        device="cpu",
        enable_memory_saver=False,
        compression_ratios=[0],
        is_draft_worker=True,
    )
    pool.register_mapping(torch.arange(slots + 1))
    config = SimpleNamespace(
        context_len=COLUMNS,
        head_dim=512,
        v_head_dim=512,
        hf_text_config=SimpleNamespace(index_topk=512),
    )
    runner = SimpleNamespace(
        device="cpu",
        page_size=256,
        model_config=config,
        req_to_token_pool=SimpleNamespace(req_to_token=req_to_token),
        token_to_kv_pool=pool,
        hisparse_coordinator=None,
        is_draft_worker=True,
        spec_algorithm=SpeculativeAlgorithm.EAGLE,
    )
    return DeepseekV4MultiStepBackend(runner, 1, NUM_STEPS)


def _planned():
    """Return the slots that each step writes and reads, per request."""
    table = torch.arange(len(COMMITTED) * COLUMNS, dtype=torch.int32).view(-1, COLUMNS)
    slots = [table[r, m : m + NUM_STEPS] for r, m in enumerate(COMMITTED)]
    lengths = torch.tensor(COMMITTED)
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=len(COMMITTED),
        input_ids=torch.zeros_like(lengths),
        req_pool_indices=torch.arange(len(COMMITTED)),
        seq_lens=lengths,
        seq_lens_cpu=lengths,
        seq_lens_sum=sum(COMMITTED),
        out_cache_loc=torch.cat(slots).long(),
        positions=lengths.clone(),
    )
    arguments = {
        "attention_backend": "dsv4",
        "device": "cpu",
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
    with (
        get_parallel().override(**one_rank),
        get_context().override_server_args(**arguments),
        # FlashMLA's schedule, which holds no slot.
        patch.object(deepseek_v4_backend, "_create_flashmla_metadata", lambda: None),
    ):
        backend = _backend(table)
        backend.init_forward_metadata(batch)
    for step in backend.attn_backends[: NUM_STEPS - 1]:
        core = step.forward_metadata.core_attn_metadata
        counts = core.swa_topk_lengths.tolist()
        rows = core.swa_page_indices.tolist()
        reads = [row[:count][::-1] for row, count in zip(rows, counts)]
        yield core.swa_out_cache_loc.tolist(), reads


class TestDsv4DraftReads(unittest.TestCase):
    def test_each_step_reads_up_to_its_own_row(self):
        for step, (writes, reads) in enumerate(_planned(), 1):
            for request, m in enumerate(COMMITTED):
                last = request * COLUMNS + m + step
                self.assertEqual(writes[request], last - 1)
                window = list(range(last - min(m + step, 128), last))
                self.assertEqual(reads[request], window)


if __name__ == "__main__":
    unittest.main()
