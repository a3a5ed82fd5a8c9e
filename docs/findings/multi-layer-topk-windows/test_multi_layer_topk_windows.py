"""Between two layers of a multi-layer draft each request's window ends in its own proposal."""

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
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

VOCAB_SIZE = 100
NUM_STEPS = 2
# First and second choice of either layer, for two requests.
CHOICES = [[[71, 72], [81, 82]], [[73, 74], [83, 84]]]


def _rotate(input_ids, start_loc, seq_lens, tokens, select_index=None):
    """rotate_input_ids, whose kernel a CPU cannot launch: request n gets entry n."""
    tokens = tokens.reshape(-1)
    for n, (start, length) in enumerate(zip(start_loc.tolist(), seq_lens.tolist())):
        rows = input_ids[start : start + length]
        rows[:-1] = rows[1:].clone()
        rows[-1 if select_index is None else select_index[n] - start] = tokens[n]
    return input_ids


class _Runner:
    """A draft layer that proposes given tokens and keeps what it consumed."""

    def __init__(self, choices, topk):
        self.choices, self.topk = choices, topk
        self.req_to_token_pool = self.token_to_kv_pool = None
        self.attn_backend = MagicMock()
        self.model_config = SimpleNamespace(
            hf_config=SimpleNamespace(architectures=["MiMoV2MTP"])
        )

    def logits(self, bs):
        logits = torch.zeros(bs, VOCAB_SIZE)
        for row, (first, second) in zip(logits, self.choices):
            row[first], row[second] = 9.0, 8.0
        return logits

    def forward(self, forward_batch):
        self.consumed = forward_batch.input_ids.tolist()
        return SimpleNamespace(
            logits_output=SimpleNamespace(
                next_token_logits=self.logits(forward_batch.batch_size),
                hidden_states=None,
            )
        )


class _GraphRunner:
    """Replays a layer's graph: the layer reads the shared window."""

    rotates_in_graph = False
    can_run_graph = MagicMock(return_value=True)

    def __init__(self, worker):
        self.worker = worker

    def prepare(self, forward_batch, staged):
        self.raw_num_tokens = forward_batch.input_ids.numel()
        self.raw_bs = forward_batch.batch_size
        self.buffers = SimpleNamespace(
            input_ids=forward_batch.input_ids,
            extend_start_loc=forward_batch.extend_start_loc,
            extend_seq_lens=forward_batch.extend_seq_lens,
            select_index=forward_batch.extend_start_loc
            + forward_batch.spec_info.num_accept_tokens
            - 1,
        )

    def replay(self, step):
        runner = self.worker.draft_runner_list[step]
        runner.consumed = self.buffers.input_ids.tolist()
        topk = runner.logits(self.raw_bs).softmax(-1).topk(self.worker.topk)
        return None, topk.values, topk.indices


def _make_worker(topk):
    worker = MultiLayerEagleDraftWorker.__new__(MultiLayerEagleDraftWorker)
    worker.speculative_algorithm = SpeculativeAlgorithm.from_string("EAGLE")
    worker.speculative_num_steps = NUM_STEPS
    worker.speculative_num_draft_tokens = NUM_STEPS + 1
    worker.topk = topk
    worker.device = "cpu"
    worker.use_rejection_sampling = False
    worker.chain_mtp_hidden_states = False
    worker.draft_extend_num_front_tokens = 0
    worker.model_config = SimpleNamespace(vocab_size=VOCAB_SIZE)
    worker.draft_runner_list = [_Runner(choices, topk) for choices in CHOICES]
    worker.draft_runner = worker.draft_runner_list[0]
    worker.cuda_graph_runner_for_draft_extend = None
    worker.plan_stream = None
    worker.plan_stream_ctx = contextlib.nullcontext()
    return worker


def _make_forward_batch(mode, input_ids, lens):
    ends = torch.tensor(lens).cumsum(0)
    return ForwardBatch(
        forward_mode=mode,
        batch_size=len(lens),
        input_ids=torch.tensor(input_ids),
        req_pool_indices=torch.arange(len(lens)),
        seq_lens=torch.tensor(lens),
        out_cache_loc=torch.arange(sum(lens)),
        seq_lens_sum=sum(lens),
        extend_seq_lens=torch.tensor(lens),
        extend_start_loc=ends - torch.tensor(lens),
        spec_info=SimpleNamespace(),
    )


def _prefill(topk):
    """Two requests of two tokens each; return what either layer consumed."""
    worker = _make_worker(topk)
    forward_batch = _make_forward_batch(ForwardMode.EXTEND, [1, 2, 5, 6], [2, 2])
    batch = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND, reqs=[None] * 2, chunked_req=None
    )
    with (
        patch.object(ForwardBatch, "init_new", return_value=forward_batch),
        patch.object(multi_layer_eagle_worker_v2, "rotate_input_ids", _rotate),
    ):
        worker._draft_extend_for_prefill(
            batch, torch.zeros(4, 4), torch.tensor([3, 7])
        )
    return [runner.consumed for runner in worker.draft_runner_list]


def _decode(topk, graph):
    """Both requests accept one draft; return what either layer consumed."""
    worker = _make_worker(topk)
    if graph:
        worker.cuda_graph_runner_for_draft_extend = _GraphRunner(worker)
    tokens = [1, 2, 0, 5, 6, 0]
    forward_batch = _make_forward_batch(ForwardMode.DRAFT_EXTEND_V2, tokens, [3, 3])
    batch = SimpleNamespace(
        forward_mode=ForwardMode.DECODE, seq_lens=torch.tensor([4, 4])
    )
    result = SimpleNamespace(
        logits_output=SimpleNamespace(hidden_states=torch.zeros(6, 4)),
        next_token_ids=torch.tensor(tokens),
        accept_lens=torch.tensor([2, 2]),
        next_draft_input=SimpleNamespace(),
        can_run_cuda_graph=graph,
    )
    with (
        patch.object(
            multi_layer_eagle_worker_v2,
            "prepare_for_draft_extend",
            return_value=forward_batch,
        ),
        patch.object(
            multi_layer_eagle_worker_v2, "require_gathered_buffer", return_value=False
        ),
        patch.object(
            multi_layer_eagle_worker_v2,
            "profile_range",
            return_value=contextlib.nullcontext(),
        ),
        patch.object(multi_layer_eagle_worker_v2, "build_step_span_name"),
        patch.object(multi_layer_eagle_worker_v2, "rotate_input_ids", _rotate),
    ):
        worker._draft_extend_for_decode(batch, result)
    return [runner.consumed for runner in worker.draft_runner_list]


class TestMultiLayerWindows(unittest.TestCase):
    def _assert_windows(self, consumed, ends):
        """Compare each request's rows up to its end: the last is the previous layer's proposal."""
        windows = [
            [rows[begin:end] for begin, end in ends]
            for rows in consumed[1:]  # layer 0 consumes what the target said
        ]
        self.assertEqual([[row[-1] for row in rows] for rows in windows], [[71, 81]])

    def test_prefill(self):
        for topk in (1, 2):
            with self.subTest(topk=topk):
                self._assert_windows(_prefill(topk), [(0, 2), (2, 4)])

    def test_decode(self):
        for topk in (1, 2):
            with self.subTest(topk=topk):
                self._assert_windows(_decode(topk, graph=False), [(0, 2), (3, 5)])

    def test_decode_in_a_graph_per_layer(self):
        for topk in (1, 2):
            with self.subTest(topk=topk):
                self._assert_windows(_decode(topk, graph=True), [(0, 2), (3, 5)])


if __name__ == "__main__":
    unittest.main()
