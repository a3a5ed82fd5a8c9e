"""EAGLE's verify samples from no token below min_p."""

import unittest
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch

from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative import eagle_utils
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

BS, DRAFT_TOKENS, VOCAB_SIZE = 3, 4, 16
TEMPERATURE = 2.0


def _sampled_from(logits, min_ps):
    """Return the distributions that verify passes to the sampling function."""
    sampling_info = SamplingBatchInfo(
        temperatures=torch.full((BS, 1), TEMPERATURE),
        top_ps=torch.ones(BS),
        top_ks=torch.full((BS,), VOCAB_SIZE, dtype=torch.int32),
        min_ps=torch.tensor(min_ps),
        is_all_greedy=False,
        is_any_greedy=False,
        need_top_p_sampling=False,
        need_top_k_sampling=False,
        need_min_p_sampling=any(min_ps),
        vocab_size=VOCAB_SIZE,
        device="cpu",
    )
    batch = MagicMock(
        device="cpu", seq_lens=torch.ones(BS), sampling_info=sampling_info
    )
    batch.forward_mode.is_idle.return_value = False
    verify_input = SimpleNamespace(
        draft_token=torch.zeros(BS * DRAFT_TOKENS, dtype=torch.int64),
        draft_token_num=DRAFT_TOKENS,
        max_tree_depth=DRAFT_TOKENS,
        tree_topk=1,
        retrieve_index=None,
        retrieve_next_token=None,
        retrieve_next_sibling=None,
    )
    seen = []

    def sample(*, accept_token_num, target_probs, **kwargs):
        seen.append(target_probs.clone())
        accept_token_num.zero_()

    spec = SimpleNamespace(
        speculative_use_rejection_sampling=False,
        speculative_accept_threshold_single=1.0,
        speculative_accept_threshold_acc=1.0,
    )
    with (
        patch.object(eagle_utils, "get_spec", return_value=spec),
        # A CPU verifies greedily and has no sampling function.
        patch.object(eagle_utils, "_verify_uses_greedy", return_value=False),
        patch.object(
            eagle_utils, "tree_speculative_sampling_target_only", sample, create=True
        ),
        patch("sglang.srt.runtime_context.get_parallel") as get_parallel,
        patch(
            "sglang.srt.layers.dp_attention.is_dp_attention_enabled",
            return_value=False,
        ),
    ):
        get_parallel.return_value.tp_group.world_size = 1
        eagle_utils.eagle_sample(
            verify_input, batch, SimpleNamespace(next_token_logits=logits.clone())
        )
    return seen[0]


def _expected(logits, min_ps):
    probs = (logits / TEMPERATURE).softmax(-1).view(BS, DRAFT_TOKENS, VOCAB_SIZE)
    least = probs.amax(-1, keepdim=True) * torch.tensor(min_ps).view(BS, 1, 1)
    kept = torch.where(probs >= least, probs, 0.0)
    return kept / kept.sum(-1, keepdim=True)


class TestMinP(unittest.TestCase):
    def setUp(self):
        generator = torch.Generator().manual_seed(0)
        self.logits = torch.randn(BS * DRAFT_TOKENS, VOCAB_SIZE, generator=generator)

    def _assert_cut(self, min_ps):
        found = _sampled_from(self.logits, min_ps)
        torch.testing.assert_close(found, _expected(self.logits, min_ps))

    def test_every_node_of_a_request(self):
        self._assert_cut([0.3, 0.3, 0.3])

    def test_each_request_has_its_own(self):
        self._assert_cut([0.3, 0.0, 1.0])

    def test_without_min_p(self):
        self._assert_cut([0.0, 0.0, 0.0])


if __name__ == "__main__":
    unittest.main()
