"""A round without drafts samples from the target under rejection sampling."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # the kernel runs on a CPU

import unittest
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch

from sglang.srt import runtime_context
from sglang.srt.layers import dp_attention
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative import eagle_utils
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

VOCABULARY = 8


def _round_without_drafts(logits):
    """Return the tokens that a round of 0 steps commits for sampling requests."""
    bs = len(logits)
    worker = MagicMock(spec=EAGLEWorkerV2)
    worker.device = "cpu"
    worker.topk = 1
    worker._target_worker = worker.target_worker = MagicMock()
    worker.target_worker.model_config.vocab_size = VOCABULARY
    worker._target_worker.model_runner.attn_backend.verify_mask = None
    batch = MagicMock()
    batch.forward_mode.is_idle.return_value = False
    batch.device = "cpu"
    batch.seq_lens = torch.full((bs,), 3)
    batch.seq_lens_sum = 3 * bs
    batch.spec_info.bonus_tokens = torch.zeros(bs, dtype=torch.int64)
    sampling = MagicMock(spec=SamplingBatchInfo)
    sampling.is_all_greedy = False
    sampling.temperatures = torch.ones(bs, 1)
    sampling.acc_additive_penalties = sampling.acc_scaling_penalties = None
    sampling.logit_bias = sampling.sampling_seed = None
    sampling.need_top_k_sampling = sampling.need_top_p_sampling = False
    sampling.has_watermark_candidates = False
    batch.sampling_info = sampling
    verify_input = EAGLEWorkerV2._build_trivial_verify_input(worker, batch)
    spec = SimpleNamespace(
        speculative_use_rejection_sampling=True,
        speculative_use_block_verification=False,
        speculative_accept_threshold_single=1.0,
        speculative_accept_threshold_acc=1.0,
    )
    one_rank = SimpleNamespace(tp_group=SimpleNamespace(world_size=1))
    with (
        patch.object(eagle_utils, "get_spec", lambda: spec),
        patch.object(runtime_context, "get_parallel", lambda: one_rank),
        patch.object(dp_attention, "is_dp_attention_enabled", lambda: False),
        patch.object(
            eagle_utils, "sampling_softmax", lambda x, temperatures: x.softmax(-1)
        ),
    ):
        predict, accept_lens, _ = eagle_utils.eagle_sample(
            verify_input, batch, LogitsProcessorOutput(next_token_logits=logits)
        )
    return predict.tolist(), accept_lens.tolist()


class TestRoundWithoutDrafts(unittest.TestCase):
    def test_the_bonus_token_is_drawn_from_the_target(self):
        logits = torch.full((2, VOCABULARY), -1e9)
        logits[0, 5] = logits[1, 2] = 0.0  # each has one token that may be drawn
        try:
            tokens, accept_lens = _round_without_drafts(logits)
        except ValueError as error:
            self.fail(f"the server ends at its first round without drafts: {error}")
        self.assertEqual(tokens, [5, 2])
        self.assertEqual(accept_lens, [1, 1])


if __name__ == "__main__":
    unittest.main()
