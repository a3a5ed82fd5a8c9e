"""At the end of a prefill chunk each layer of a multi-layer draft consumes the prompt."""

import unittest
from array import array
from types import SimpleNamespace
from unittest.mock import patch

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
PROPOSALS = [71, 90, 92]  # what layers 0, 1 and 2 propose
BONUS = 58  # what the target predicts after each request


def _rotate(input_ids, start_loc, seq_lens, tokens, select_index=None):
    """rotate_input_ids, whose kernel a CPU cannot launch."""
    tokens = tokens.reshape(-1)
    for n, (start, length) in enumerate(zip(start_loc.tolist(), seq_lens.tolist())):
        rows = input_ids[start : start + length]
        rows[:-1] = rows[1:].clone()
        rows[-1 if select_index is None else select_index[n] - start] = tokens[n]
    return input_ids


class _Runner:
    """A draft layer that always proposes the same token and keeps its inputs."""

    def __init__(self, proposal):
        self.proposal = proposal
        self.req_to_token_pool = self.token_to_kv_pool = None
        self.model_config = SimpleNamespace(
            hf_config=SimpleNamespace(architectures=["MiMoV2MTP"])
        )

    def forward(self, forward_batch):
        self.consumed = forward_batch.input_ids.tolist()
        logits = torch.zeros(forward_batch.batch_size, VOCAB_SIZE)
        logits[:, self.proposal] = 9.0
        return SimpleNamespace(
            logits_output=SimpleNamespace(next_token_logits=logits, hidden_states=None)
        )


def _req(prompt, extend_end, output=()):
    return SimpleNamespace(
        origin_input_ids=array("q", prompt),
        output_ids=array("q", output),
        extend_end=extend_end,
    )


def _prefill(reqs, lens, chunked_req):
    """Prefill each request's last ``lens`` tokens; return what the layers consumed."""
    worker = MultiLayerEagleDraftWorker.__new__(MultiLayerEagleDraftWorker)
    worker.speculative_algorithm = SpeculativeAlgorithm.from_string("EAGLE")
    worker.speculative_num_steps = len(PROPOSALS)
    worker.topk = 1
    worker.use_rejection_sampling = False
    worker.chain_mtp_hidden_states = False
    worker.draft_extend_num_front_tokens = 0
    worker.model_config = SimpleNamespace(vocab_size=VOCAB_SIZE)
    worker.draft_runner_list = [_Runner(token) for token in PROPOSALS]
    worker.draft_runner = worker.draft_runner_list[0]

    fill_ids = [[*req.origin_input_ids, *req.output_ids] for req in reqs]
    chunks = [
        ids[req.extend_end - n : req.extend_end]
        for ids, req, n in zip(fill_ids, reqs, lens)
    ]
    ends = torch.tensor(lens).cumsum(0)
    forward_batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=len(reqs),
        input_ids=torch.tensor(sum(chunks, [])),
        req_pool_indices=torch.arange(len(reqs)),
        seq_lens=torch.tensor([req.extend_end for req in reqs]),
        out_cache_loc=torch.arange(sum(lens)),
        seq_lens_sum=sum(req.extend_end for req in reqs),
        extend_seq_lens=torch.tensor(lens),
        extend_start_loc=ends - torch.tensor(lens),
        spec_info=SimpleNamespace(),
    )
    batch = SimpleNamespace(
        forward_mode=ForwardMode.EXTEND,
        reqs=reqs,
        chunked_req=chunked_req,
        spec_info=None,
    )
    bonus = torch.full((len(reqs),), BONUS)
    with (
        patch.object(ForwardBatch, "init_new", return_value=forward_batch),
        patch.object(multi_layer_eagle_worker_v2, "rotate_input_ids", _rotate),
    ):
        result = worker._draft_extend_for_prefill(
            batch, torch.zeros(sum(lens), 4), bonus
        )
    return [runner.consumed for runner in worker.draft_runner_list], result


class TestMultiLayerChunkTail(unittest.TestCase):
    def test_layers_consume_the_prompt_after_the_chunk(self):
        req = _req([7, 19, 3, 5, 11, 2], extend_end=3)
        consumed, result = _prefill([req], [3], chunked_req=req)
        self.assertEqual(consumed, [[19, 3, 5], [3, 5, 11], [5, 11, 2]])
        # The returned values are the target's tokens and the layers' proposals.
        self.assertEqual(result.bonus_tokens.tolist(), [BONUS])
        self.assertEqual(result.topk_index.tolist(), [PROPOSALS])

    def test_other_requests_of_the_batch_end_in_what_was_predicted(self):
        done = _req([1, 2], extend_end=2)
        req = _req([7, 19, 3, 5, 11, 2], extend_end=3)
        consumed, _ = _prefill([done, req], [2, 3], chunked_req=req)
        self.assertEqual(
            consumed,
            [[2, BONUS, 19, 3, 5], [BONUS, 71, 3, 5, 11], [71, 90, 5, 11, 2]],
        )

    def test_prompt_that_ends_inside_the_window(self):
        req = _req([7, 19, 3, 5], extend_end=3)
        consumed, _ = _prefill([req], [3], chunked_req=req)
        self.assertEqual(consumed, [[19, 3, 5], [3, 5, 71], [5, 71, 90]])

    def test_chunk_that_ends_in_what_a_retracted_request_emitted(self):
        req = _req([7, 19], extend_end=3, output=[3, 5, 11, 2])
        consumed, _ = _prefill([req], [3], chunked_req=req)
        self.assertEqual(consumed, [[19, 3, 5], [3, 5, 11], [5, 11, 2]])

    def test_multimodal_placeholder_is_not_consumed(self):
        req = _req([7, 19, 3, 5, VOCAB_SIZE + 5, 2], extend_end=3)
        consumed, _ = _prefill([req], [3], chunked_req=req)
        self.assertEqual(consumed, [[19, 3, 5], [3, 5, 71], [5, 71, 90]])

    def test_last_chunk_ends_in_what_was_predicted(self):
        req = _req([7, 19, 3], extend_end=3)
        consumed, _ = _prefill([req], [3], chunked_req=None)
        self.assertEqual(consumed, [[19, 3, BONUS], [3, BONUS, 71], [BONUS, 71, 90]])


if __name__ == "__main__":
    unittest.main()
