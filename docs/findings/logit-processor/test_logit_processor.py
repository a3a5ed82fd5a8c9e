"""EAGLE's verify applies the custom logit processors of its requests."""

import unittest
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch

from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor
from sglang.srt.sampling.sampling_batch_info import ProcessorEntry, SamplingBatchInfo
from sglang.srt.speculative import eagle_utils
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

BS, DRAFT_TOKENS, VOCAB_SIZE = 3, 4, 16


class _Forbid(CustomLogitProcessor):
    """Forbids the tokens that each request names."""

    def __call__(self, logits, custom_param_list=None):
        for row, params in zip(logits, custom_param_list):
            row[params["token_ids"]] = -float("inf")
        return logits


def _predictions(logits, forbidden):
    """Return verify's prediction for the token after each node.

    forbidden: tokens per request, or None for no processor.
    """
    rows = [i for i, token_ids in enumerate(forbidden) if token_ids is not None]
    sampling_info = SamplingBatchInfo(
        temperatures=torch.ones(BS, 1),
        top_ps=torch.ones(BS),
        top_ks=torch.ones(BS, dtype=torch.int32),
        min_ps=torch.zeros(BS),
        is_all_greedy=True,
        is_any_greedy=True,
        need_top_p_sampling=False,
        need_top_k_sampling=False,
        need_min_p_sampling=False,
        vocab_size=VOCAB_SIZE,
        has_custom_logit_processor=bool(rows),
        custom_params=[{"token_ids": token_ids} for token_ids in forbidden],
        custom_logit_processor={0: ProcessorEntry(_Forbid(), rows, torch.tensor(rows))},
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

    def verify_tree_greedy(*, predicts, accept_index, accept_token_num, **kwargs):
        seen.append(kwargs["target_predict"])
        return predicts, accept_index, torch.zeros(BS, dtype=torch.int32)

    spec = SimpleNamespace(speculative_use_rejection_sampling=False)
    with (
        patch.object(eagle_utils, "get_spec", return_value=spec),
        patch.object(eagle_utils, "verify_tree_greedy_func", verify_tree_greedy),
    ):
        eagle_utils.eagle_sample(
            verify_input, batch, SimpleNamespace(next_token_logits=logits.clone())
        )
    return seen[0]


class TestLogitProcessor(unittest.TestCase):
    def setUp(self):
        generator = torch.Generator().manual_seed(0)
        self.logits = torch.randn(BS * DRAFT_TOKENS, VOCAB_SIZE, generator=generator)
        self.best = self.logits.argmax(-1).view(BS, DRAFT_TOKENS)

    def _second_best(self, request):
        rows = self.logits.view(BS, DRAFT_TOKENS, VOCAB_SIZE)[request].clone()
        rows[:, self.best[request]] = -float("inf")
        return rows.argmax(-1)

    def test_every_node_of_a_request(self):
        forbidden = [self.best[request].tolist() for request in range(BS)]
        found = _predictions(self.logits, forbidden)
        for request in range(BS):
            torch.testing.assert_close(found[request], self._second_best(request))

    def test_no_other_request(self):
        found = _predictions(self.logits, [None, self.best[1].tolist(), None])
        torch.testing.assert_close(found[1], self._second_best(1))
        torch.testing.assert_close(found[[0, 2]], self.best[[0, 2]])

    def test_without_processors(self):
        found = _predictions(self.logits, [None] * BS)
        torch.testing.assert_close(found, self.best)


if __name__ == "__main__":
    unittest.main()
