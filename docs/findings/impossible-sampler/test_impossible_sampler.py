"""A sampling request for which no token is allowed ends no other request."""

import unittest
from types import SimpleNamespace
from unittest.mock import patch

import torch

from sglang.srt.layers import sampler as sampler_module
from sglang.srt.layers.sampler import Sampler
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

VOCAB_SIZE = 16
NONE = [float("-inf")] * VOCAB_SIZE  # what a grammar and min_new_tokens leave
THREE = [0.0 if token == 3 else float("-inf") for token in range(VOCAB_SIZE)]


def _sampler():
    sampler = Sampler.__new__(Sampler)
    torch.nn.Module.__init__(sampler)
    sampler.rl_on_policy_target = None
    sampler.enable_deterministic = False
    sampler.use_log_softmax_logprob = False
    sampler.use_ascend_backend = False
    return sampler


def _sampled(rows, top_ps, top_ks):
    """Return the tokens of a batch with these logits, or None if the sampler raises."""
    sampling_info = SamplingBatchInfo(
        temperatures=torch.ones(len(rows), 1),
        top_ps=torch.tensor(top_ps),
        top_ks=torch.tensor(top_ks, dtype=torch.int32),
        min_ps=torch.zeros(len(rows)),
        is_all_greedy=False,
        is_any_greedy=1 in top_ks,
        need_top_p_sampling=True,
        need_top_k_sampling=any(top_k < VOCAB_SIZE for top_k in top_ks),
        need_min_p_sampling=False,
        vocab_size=VOCAB_SIZE,
        device="cpu",
    )
    logits = SimpleNamespace(next_token_logits=torch.tensor(rows))
    executor = SimpleNamespace(kernel=SimpleNamespace(sampling_backend="pytorch"))
    with patch.object(sampler_module, "get_exec", return_value=executor):
        try:
            found = _sampler()(logits, sampling_info, False, [], [], torch.arange(0))
        except RuntimeError:
            return None
    return found.tolist()


class TestImpossibleSampler(unittest.TestCase):
    def test_the_other_request_gets_its_token(self):
        tokens = _sampled([NONE, THREE], [0.9, 0.9], [VOCAB_SIZE, VOCAB_SIZE])
        self.assertIsNotNone(tokens, "the sampler raised")
        self.assertEqual(tokens[1], 3)
        self.assertIn(tokens[0], range(VOCAB_SIZE))

    def test_a_greedy_request_beside_one_that_samples(self):
        tokens = _sampled([NONE, THREE], [1.0, 0.9], [1, VOCAB_SIZE])
        self.assertIsNotNone(tokens, "the sampler raised")
        self.assertEqual(tokens[1], 3)

    def test_what_is_forbidden_stays_forbidden(self):
        rows = [THREE, THREE[:1] + [0.0] + THREE[2:]]
        for seed in range(20):
            torch.manual_seed(seed)
            first, second = _sampled(rows, [0.9, 1.0], [VOCAB_SIZE, VOCAB_SIZE])
            self.assertEqual(first, 3)
            self.assertIn(second, (1, 3))

    def test_nan_logits_are_not_hidden(self):
        nan = [float("nan")] + NONE[1:]
        self.assertIsNone(_sampled([nan, THREE], [0.9, 0.9], [VOCAB_SIZE, VOCAB_SIZE]))


if __name__ == "__main__":
    unittest.main()
