"""With gathered buffers a multi-layer draft proposes from the logits of accepted rows."""

import contextlib
import unittest
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch

from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.speculative import multi_layer_eagle_worker_v2
from sglang.srt.speculative.multi_layer_eagle_worker_v2 import (
    MultiLayerEagleDraftWorker,
)
from sglang.srt.speculative.spec_info import (
    SpeculativeAlgorithm,
    spec_scale_global_num_tokens,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

NUM_STEPS, VOCAB_SIZE = 2, 100
WIDTH = NUM_STEPS + 1


class _Runner:
    """A draft layer whose best token at row n is n + 1."""

    def __init__(self):
        self.req_to_token_pool = self.token_to_kv_pool = None
        self.attn_backend = MagicMock()
        self.model_config = SimpleNamespace(
            hf_config=SimpleNamespace(architectures=["MiMoV2MTP"])
        )

    def forward(self, forward_batch):
        spec_info, bs = forward_batch.spec_info, forward_batch.batch_size
        logits = torch.nn.functional.one_hot(
            torch.arange(len(forward_batch.input_ids)) + 1, VOCAB_SIZE
        ).float()
        if spec_info.select_index is not None:
            logits = logits[spec_info.select_index]
        # As LogitsProcessor: this is a rank's share of the gathered buffer.
        _, (gathered,) = spec_scale_global_num_tokens(spec_info, [bs], [bs])
        logits[gathered:] = 0
        return SimpleNamespace(
            logits_output=SimpleNamespace(next_token_logits=logits, hidden_states=None)
        )


def _make_worker(num_front_tokens):
    worker = MultiLayerEagleDraftWorker.__new__(MultiLayerEagleDraftWorker)
    worker.speculative_algorithm = SpeculativeAlgorithm.from_string("EAGLE")
    worker.speculative_num_steps = NUM_STEPS
    worker.speculative_num_draft_tokens = WIDTH
    worker.topk = 1
    worker.device = "cpu"
    worker.use_rejection_sampling = False
    worker.chain_mtp_hidden_states = False
    worker.draft_extend_num_front_tokens = num_front_tokens
    worker.model_config = SimpleNamespace(vocab_size=VOCAB_SIZE)
    worker.draft_runner_list = [_Runner() for _ in range(NUM_STEPS)]
    worker.draft_runner = worker.draft_runner_list[0]
    worker.cuda_graph_runner_for_draft_extend = None
    worker.plan_stream = None
    worker.plan_stream_ctx = contextlib.nullcontext()
    worker._compute_boundary_kv_locs_positions = lambda batch: (None, None)
    worker._fill_boundary_kv_front_and_update_stash = lambda *args: None
    return worker


def _proposals(accept_lens, gathers, num_front_tokens):
    """Return the token that each layer proposes for each request."""
    bs = len(accept_lens)
    width = WIDTH + num_front_tokens
    rows = bs * width

    def prepare(draft_extend_input, *args, **kwargs):
        return ForwardBatch(
            forward_mode=ForwardMode.DRAFT_EXTEND_V2,
            batch_size=bs,
            input_ids=torch.zeros(rows, dtype=torch.int64),
            req_pool_indices=torch.arange(bs),
            seq_lens=torch.full((bs,), width),
            out_cache_loc=torch.arange(rows),
            seq_lens_sum=rows,
            extend_seq_lens=torch.full((bs,), width),
            extend_start_loc=torch.arange(0, rows, width),
            spec_info=draft_extend_input,
        )

    result = SimpleNamespace(
        logits_output=SimpleNamespace(hidden_states=torch.zeros(bs * WIDTH, 4)),
        next_token_ids=torch.zeros(bs * WIDTH, dtype=torch.int64),
        accept_lens=torch.tensor(accept_lens),
        next_draft_input=SimpleNamespace(),
        can_run_cuda_graph=False,
    )
    batch = SimpleNamespace(
        forward_mode=ForwardMode.DECODE, seq_lens=torch.full((bs,), 4)
    )
    module = multi_layer_eagle_worker_v2
    with (
        patch.object(module, "prepare_for_draft_extend", prepare),
        patch.object(module, "require_gathered_buffer", return_value=gathers),
        patch.object(module, "rotate_input_ids"),
    ):
        _make_worker(num_front_tokens)._draft_extend_for_decode(batch, result)
    return result.next_draft_input.topk_index.tolist()


class TestGatheredLogits(unittest.TestCase):
    def _assert_last_accepted_row_proposes(self, accept_lens, gathers):
        for front in (0, 1):
            with self.subTest(num_front_tokens=front):
                expected = [
                    [n * (WIDTH + front) + front + length] * NUM_STEPS
                    for n, length in enumerate(accept_lens)
                ]
                proposals = _proposals(accept_lens, gathers, front)
                self.assertEqual(proposals, expected)

    def test_gathered_buffer(self):
        self._assert_last_accepted_row_proposes([2], gathers=True)
        self._assert_last_accepted_row_proposes([3, 1, 2], gathers=True)

    def test_pruned_logits(self):
        self._assert_last_accepted_row_proposes([2], gathers=False)
        self._assert_last_accepted_row_proposes([3, 1, 2], gathers=False)


if __name__ == "__main__":
    unittest.main()
