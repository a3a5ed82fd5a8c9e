"""After multi-layer EAGLE's verify the accepted path is at the front of each block."""

import contextlib
import unittest
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch

from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative import eagle_worker_common
from sglang.srt.speculative.multi_layer_eagle_worker_v2 import MultiLayerEagleWorkerV2
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

NUM_DRAFT_TOKENS = 3


def _fill_bonus_tokens(accept_tokens, accept_lens, bonus_tokens, stride, bs):
    rows = accept_tokens.view(bs, stride)
    last = (accept_lens - 1).to(torch.int64).unsqueeze(1)
    bonus_tokens.copy_(rows.gather(1, last).squeeze(1))


def _verify(topk, predict, accept_index, accept_lens):
    """Run the worker's verify with a given target forward and given samples."""
    bs = accept_index.shape[0]
    hidden_states = torch.arange(predict.numel(), dtype=torch.float32).unsqueeze(1)
    logits_output = SimpleNamespace(
        next_token_logits=torch.zeros(predict.numel(), 4), hidden_states=hidden_states
    )
    target_worker = MagicMock()
    target_worker.forward_batch_generation.return_value = SimpleNamespace(
        logits_output=logits_output,
        routed_experts_output=None,
        indexer_topk_output=None,
    )
    target_worker.model_runner.watermark_state = None
    batch = MagicMock(
        forward_mode=ForwardMode.DECODE,
        seq_lens=torch.full((bs,), 4, dtype=torch.int64),
        spec_info=SimpleNamespace(),
        has_grammar=False,
        return_logprob=False,
        hisparse_coordinator=None,
        mamba_track_indices=None,
    )
    worker = SimpleNamespace(
        target_worker=target_worker,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: None),
        plan_stream=None,
        plan_stream_ctx=contextlib.nullcontext(),
        topk=topk,
        speculative_num_draft_tokens=NUM_DRAFT_TOKENS,
        device="cpu",
    )
    move = MagicMock()
    with patch.multiple(
        eagle_worker_common,
        eagle_prepare_for_verify=MagicMock(return_value=(MagicMock(), False)),
        eagle_sample=MagicMock(return_value=(predict, accept_lens, accept_index)),
        commit_mamba_states_after_verify=MagicMock(),
        fill_bonus_tokens_func=_fill_bonus_tokens,
        move_accept_tokens_to_target_kvcache=move,
    ):
        result = MultiLayerEagleWorkerV2.verify(worker, batch)
    return result, move


class TestMultiLayerVerifyTreePath(unittest.TestCase):
    def test_accepted_path_is_moved_to_the_front(self):
        # Nodes of each block: the root and its two children. Request 0 accepts
        # the second child, request 1 the first, request 2 the root alone.
        # 0 is the target's prediction after a rejected child.
        result, move = _verify(
            topk=2,
            predict=torch.tensor([84, 0, 66, 12, 13, 0, 31, 0, 0], dtype=torch.int32),
            accept_index=torch.tensor([[0, 2, -1], [3, 4, -1], [6, -1, -1]]),
            accept_lens=torch.tensor([2, 2, 1], dtype=torch.int32),
        )
        blocks = result.next_token_ids.view(3, NUM_DRAFT_TOKENS).tolist()
        lens = result.accept_lens.tolist()
        self.assertEqual(
            [row[:n] for row, n in zip(blocks, lens)], [[84, 66], [12, 13], [31]]
        )
        # Draft extend gets the states of the same nodes.
        states = result.logits_output.hidden_states.view(3, NUM_DRAFT_TOKENS).tolist()
        self.assertEqual(
            [row[:n] for row, n in zip(states, lens)], [[0, 2], [3, 4], [6]]
        )
        # The target's KV rows are those of the same nodes.
        move.assert_called_once()

    def test_chain_is_left_as_it_is(self):
        predict = torch.tensor([84, 66, 0], dtype=torch.int32)
        result, move = _verify(
            topk=1,
            predict=predict,
            accept_index=torch.tensor([[0, 1, -1]]),
            accept_lens=torch.tensor([2], dtype=torch.int32),
        )
        self.assertEqual(result.next_token_ids.tolist(), [84, 66, 0])
        move.assert_not_called()


if __name__ == "__main__":
    unittest.main()
