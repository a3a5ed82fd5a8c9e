"""Under rejection sampling the draft after a prefill is its argmax for a greedy request."""

import unittest
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch

from sglang.srt.environ import envs
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.speculative import eagle_worker_v2
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

BS, VOCAB_SIZE = 64, 32
BEST = 7


def _prefill(top_ks, rejection_sampling=True):
    """Prefill one token per request; the draft has no clear best."""
    logits = torch.zeros(BS, VOCAB_SIZE)
    logits[:, BEST] = 0.1
    logits_output = SimpleNamespace(
        next_token_logits=logits, hidden_states=torch.zeros(BS, 4)
    )
    worker = EagleDraftWorker.__new__(EagleDraftWorker)
    worker.speculative_algorithm = SpeculativeAlgorithm.from_string("EAGLE")
    worker.seed_dsa_topk_from_draft_extend = False
    worker.topk = 1
    worker.draft_runner = MagicMock(canary_manager=None)
    worker.draft_runner.forward.return_value.logits_output = logits_output
    batch = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        reqs=[None] * BS,
        chunked_req=None,
        chunked_req_next_prompt_token=None,
        input_ids=torch.zeros(BS, dtype=torch.int64),
        extend_lens=[1] * BS,
        seq_lens=torch.ones(BS, dtype=torch.int64),
        # A greedy request is one of temperature 1 and top_k 1.
        sampling_info=SimpleNamespace(
            temperatures=torch.ones(BS, 1), top_ks=top_ks, sampling_seed=None
        ),
    )
    spec = SimpleNamespace(speculative_use_rejection_sampling=rejection_sampling)
    with (
        patch.object(ForwardBatch, "init_new", return_value=MagicMock()),
        patch.object(eagle_worker_v2, "get_spec", return_value=spec),
    ):
        return worker._draft_extend_for_prefill(
            batch, torch.zeros(BS, 4), torch.zeros(BS, dtype=torch.int64)
        )


class TestGreedyDraftsAfterPrefill(unittest.TestCase):
    def setUp(self):
        # torch.multinomial samples, since a CPU cannot launch row_argmax.
        multinomial = envs.SGLANG_OPT_USE_GUMBEL_SAMPLE.override(False)
        multinomial.__enter__()
        self.addCleanup(multinomial.__exit__, None, None, None)
        torch.manual_seed(0)

    def test_greedy_requests(self):
        draft_input = _prefill(torch.ones(BS, dtype=torch.int32))
        self.assertEqual(draft_input.topk_index.shape, (BS, 1))
        self.assertEqual(draft_input.topk_index.unique().tolist(), [BEST])
        # Verify gets the probability of the proposed token.
        q = draft_input.draft_probs.gather(1, draft_input.topk_index)
        torch.testing.assert_close(draft_input.topk_p, q)

    def test_greedy_requests_among_others(self):
        top_ks = torch.tensor([1, 50] * (BS // 2), dtype=torch.int32)
        tokens = _prefill(top_ks).topk_index.flatten()
        self.assertEqual(tokens[::2].unique().tolist(), [BEST])
        self.assertGreater(len(tokens[1::2].unique()), 1)

    def test_without_rejection_sampling(self):
        top_ks = torch.full((BS,), 50, dtype=torch.int32)
        draft_input = _prefill(top_ks, rejection_sampling=False)
        self.assertEqual(draft_input.topk_index.unique().tolist(), [BEST])


if __name__ == "__main__":
    unittest.main()
