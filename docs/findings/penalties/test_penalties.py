"""Penalties count each output token of a request, however many come at once."""

import unittest
from types import SimpleNamespace

import torch

from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.sampling.penaltylib import (
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPenalizerOrchestrator,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
)
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

VOCAB_SIZE, STOP = 16, 15
PENALIZERS = {
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
}


class _Batch(SimpleNamespace):
    __hash__ = object.__hash__


def _request(output_ids, **penalties):
    usual = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
    }
    return SimpleNamespace(
        origin_input_ids=[1],
        output_ids=list(output_ids),
        eos_token_ids={STOP},
        tokenizer=SimpleNamespace(additional_stop_token_ids=None, eos_token_id=STOP),
        sampling_params=SimpleNamespace(stop_token_ids=None, **(usual | penalties)),
    )


def _penalties(req, rounds):
    """Additive and scaling penalties, and what stops, after rounds of tokens."""
    batch = _Batch(reqs=[req], device="cpu")
    orchestrator = BatchedPenalizerOrchestrator(VOCAB_SIZE, batch, PENALIZERS)
    batch.sampling_info = SimpleNamespace(
        penalizer_orchestrator=orchestrator,
        temperatures=torch.ones(1, 1),
        vocab_size=VOCAB_SIZE,
    )
    for tokens in rounds:
        req.output_ids += tokens
        ScheduleBatch.cumulate_penalty_output_tokens(batch)
    SamplingBatchInfo.update_penalties(batch.sampling_info)
    return batch.sampling_info


class TestPenalties(unittest.TestCase):
    def test_frequency_of_all_tokens_of_a_round(self):
        found = _penalties(_request([], frequency_penalty=0.5), [[3], [4, 4, 5], [3]])
        row = found.acc_additive_penalties[0]
        self.assertEqual(row[[3, 4, 5, 6]].tolist(), [-1.0, -1.0, -0.5, 0.0])

    def test_presence_of_all_tokens_of_a_round(self):
        found = _penalties(_request([], presence_penalty=0.5), [[3], [4, 4, 5]])
        row = found.acc_additive_penalties[0]
        self.assertEqual(row[[3, 4, 5, 6]].tolist(), [-0.5, -0.5, -0.5, 0.0])

    def test_repetition_of_all_tokens_of_a_round(self):
        found = _penalties(_request([], repetition_penalty=2.0), [[3], [4, 4, 5]])
        row = found.acc_scaling_penalties[0]
        self.assertEqual(row[[3, 4, 5, 6]].tolist(), [2.0, 2.0, 2.0, 1.0])

    def test_min_new_tokens_counts_tokens(self):
        found = _penalties(_request([], min_new_tokens=4), [[3], [4, 4, 5]])
        self.assertEqual(float(found.acc_additive_penalties[0, STOP]), 0.0)
        found = _penalties(_request([], min_new_tokens=5), [[3], [4, 4, 5]])
        self.assertEqual(float(found.acc_additive_penalties[0, STOP]), -torch.inf)

    def test_a_request_that_comes_back_from_a_retraction(self):
        found = _penalties(_request([3, 4, 4], frequency_penalty=0.5), [])
        row = found.acc_additive_penalties[0]
        self.assertEqual(row[[3, 4, 5]].tolist(), [-0.5, -1.0, 0.0])


if __name__ == "__main__":
    unittest.main()
