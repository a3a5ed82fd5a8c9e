"""Under rejection sampling a multi-layer draft proposes its argmax to greedy requests."""

import contextlib
import unittest
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch

from sglang.srt.environ import envs
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.speculative import multi_layer_eagle_worker_v2
from sglang.srt.speculative.multi_layer_eagle_worker_v2 import (
    MultiLayerEagleDraftWorker,
)
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

BS, VOCAB_SIZE, NUM_STEPS = 64, 32, 2
BEST = 7


class _Runner:
    """A draft layer without a clear best: any token but BEST is nearly as likely."""

    def __init__(self):
        self.req_to_token_pool = self.token_to_kv_pool = None
        self.attn_backend = MagicMock()
        self.model_config = SimpleNamespace(
            hf_config=SimpleNamespace(architectures=["MiMoV2MTP"])
        )

    def forward(self, forward_batch):
        return SimpleNamespace(logits_output=_logits_output())


def _logits_output():
    logits = torch.zeros(BS, VOCAB_SIZE)
    logits[:, BEST] = 0.1
    return SimpleNamespace(next_token_logits=logits, hidden_states=None)


class _GraphRunner:
    """Replays a layer's graph; the worker samples after it."""

    rotates_in_graph = False
    prune_draft_extend_logits = True
    raw_bs = raw_num_tokens = BS
    buffers = MagicMock()
    can_run_graph = MagicMock(return_value=True)

    def prepare(self, forward_batch, staged):
        pass

    def replay(self, step):
        return _logits_output(), None, None


def _make_worker():
    worker = MultiLayerEagleDraftWorker.__new__(MultiLayerEagleDraftWorker)
    worker.speculative_algorithm = SpeculativeAlgorithm.from_string("EAGLE")
    worker.speculative_num_steps = NUM_STEPS
    worker.speculative_num_draft_tokens = NUM_STEPS + 1
    worker.topk = 1
    worker.device = "cpu"
    worker.use_rejection_sampling = True
    worker.chain_mtp_hidden_states = False
    worker.draft_extend_num_front_tokens = 0
    worker.model_config = SimpleNamespace(vocab_size=VOCAB_SIZE)
    worker.draft_runner_list = [_Runner() for _ in range(NUM_STEPS)]
    worker.draft_runner = worker.draft_runner_list[0]
    worker.cuda_graph_runner_for_draft_extend = None
    worker.plan_stream = None
    worker.plan_stream_ctx = contextlib.nullcontext()
    return worker


def _make_forward_batch(mode, top_k):
    lens = torch.ones(BS, dtype=torch.int64)
    return ForwardBatch(
        forward_mode=mode,
        batch_size=BS,
        input_ids=torch.zeros(BS, dtype=torch.int64),
        req_pool_indices=torch.arange(BS),
        seq_lens=lens,
        out_cache_loc=torch.arange(BS),
        seq_lens_sum=BS,
        extend_seq_lens=lens,
        extend_start_loc=torch.arange(BS),
        # A greedy request is one of temperature 1 and top_k 1.
        sampling_info=SimpleNamespace(
            temperatures=torch.ones(BS, 1),
            top_ks=torch.full((BS,), top_k, dtype=torch.int32),
            sampling_seed=None,
        ),
        spec_info=SimpleNamespace(),
    )


def _prefill(top_k):
    worker = _make_worker()
    forward_batch = _make_forward_batch(ForwardMode.EXTEND, top_k)
    batch = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND, reqs=[None] * BS, chunked_req=None
    )
    with (
        patch.object(ForwardBatch, "init_new", return_value=forward_batch),
        patch.object(multi_layer_eagle_worker_v2, "rotate_input_ids"),
    ):
        return worker._draft_extend_for_prefill(
            batch, torch.zeros(BS, 4), torch.zeros(BS, dtype=torch.int64)
        )


def _decode(top_k, graph):
    worker = _make_worker()
    if graph:
        worker.cuda_graph_runner_for_draft_extend = _GraphRunner()
    forward_batch = _make_forward_batch(ForwardMode.DRAFT_EXTEND_V2, top_k)
    batch = SimpleNamespace(
        forward_mode=ForwardMode.DECODE, seq_lens=forward_batch.seq_lens
    )
    result = SimpleNamespace(
        logits_output=SimpleNamespace(hidden_states=torch.zeros(BS, 4)),
        next_token_ids=torch.zeros(BS, dtype=torch.int64),
        accept_lens=torch.ones(BS, dtype=torch.int64),
        next_draft_input=SimpleNamespace(),
        can_run_cuda_graph=graph,
    )
    with patch.multiple(
        multi_layer_eagle_worker_v2,
        prepare_for_draft_extend=MagicMock(return_value=forward_batch),
        require_gathered_buffer=MagicMock(return_value=False),
        profile_range=MagicMock(return_value=contextlib.nullcontext()),
        build_step_span_name=MagicMock(),
        rotate_input_ids=MagicMock(),
    ):
        worker._draft_extend_for_decode(batch, result)
    return result.next_draft_input


class TestGreedyDraftsOfLayers(unittest.TestCase):
    def setUp(self):
        # torch.multinomial samples, since a CPU cannot launch row_argmax.
        multinomial = envs.SGLANG_OPT_USE_GUMBEL_SAMPLE.override(False)
        multinomial.__enter__()
        self.addCleanup(multinomial.__exit__, None, None, None)
        torch.manual_seed(0)

    def _assert_greedy(self, draft_input):
        self.assertEqual(draft_input.topk_index.shape, (BS, NUM_STEPS))
        self.assertEqual(draft_input.topk_index.unique().tolist(), [BEST])
        # Verify gets the probability of the proposed token.
        q = draft_input.draft_probs.gather(2, draft_input.topk_index.unsqueeze(2))
        torch.testing.assert_close(draft_input.topk_p, q.squeeze(2))

    def test_prefill(self):
        self._assert_greedy(_prefill(top_k=1))

    def test_decode(self):
        self._assert_greedy(_decode(top_k=1, graph=False))

    def test_decode_in_a_graph_per_layer(self):
        self._assert_greedy(_decode(top_k=1, graph=True))

    def test_request_that_samples_draws_its_drafts(self):
        for draft_input in (_prefill(top_k=50), _decode(top_k=50, graph=False)):
            self.assertGreater(len(draft_input.topk_index.unique()), 1)


if __name__ == "__main__":
    unittest.main()
