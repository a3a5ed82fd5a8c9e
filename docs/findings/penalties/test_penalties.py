"""Each forward applies the penalties of all output tokens that were sampled before it."""

import unittest
from types import SimpleNamespace
from unittest.mock import MagicMock, PropertyMock, patch

import torch

from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor,
)
from sglang.srt.sampling.penaltylib import (
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPenalizerOrchestrator,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
)
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from sglang.srt.speculative.eagle_utils import eagle_prepare_for_decode
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

VOCAB_SIZE, STOP = 16, 15
NODES = 4  # of a verify
PENALIZERS = {
    BatchedFrequencyPenalizer,
    BatchedMinNewTokensPenalizer,
    BatchedPresencePenalizer,
    BatchedRepetitionPenalizer,
}


def _request(output_ids, **penalties):
    usual = {
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "min_new_tokens": 0,
    }
    return SimpleNamespace(
        rid="a",
        origin_input_ids=[1],
        output_ids=list(output_ids),
        inflight_middle_chunks=0,
        eos_token_ids={STOP},
        tokenizer=SimpleNamespace(additional_stop_token_ids=None, eos_token_id=STOP),
        sampling_params=SimpleNamespace(stop_token_ids=None, **(usual | penalties)),
    )


class _Prepared(Exception):
    """Leaves the preparation of a decode before it allocates memory."""


class _Batch(MagicMock):
    __hash__ = object.__hash__
    token_to_kv_pool_allocator = PropertyMock(side_effect=_Prepared)


class _Launched(Exception):
    """Leaves the scheduler before the worker runs the batch."""


def _result(tokens):
    """The result of a verify that is not processed yet."""
    return SimpleNamespace(
        copy_done=None,
        next_token_ids=torch.tensor([*tokens, *[0] * NODES][:NODES]),
        accept_lens=torch.tensor([len(tokens)]),
        speculative_output_stride=NODES,
    )


class _Server:
    """A request that decodes, and the scheduler's own functions around its forwards."""

    def __init__(self, req, speculative=True):
        self.req, self.speculative = req, speculative
        self.batch = _Batch(reqs=[req], device="cpu", decoding_reqs=None)
        self.batch.spec_algorithm.is_none.return_value = not speculative
        self.batch.forward_mode.is_split_prefill.return_value = False
        self.batch.forward_mode.is_prebuilt.return_value = False
        self.batch.sampling_info = MagicMock(
            penalizer_orchestrator=BatchedPenalizerOrchestrator(
                VOCAB_SIZE, self.batch, PENALIZERS
            ),
            temperatures=torch.ones(1, 1),
            vocab_size=VOCAB_SIZE,
        )

    def forward(self, pending=()):
        """Return the penalties of the next forward.

        pending: tokens of the last result, which the overlap scheduler processes
        after it launches this forward.
        """
        if not self.speculative:
            ScheduleBatch.cumulate_penalty_output_tokens(self.batch)
        else:
            with self.assert_raises(_Prepared):
                eagle_prepare_for_decode(self.batch)
        processor = MagicMock()
        own = getattr(SchedulerBatchResultProcessor, "pending_output_tokens", None)
        if own is not None:
            processor.pending_output_tokens = own.__get__(processor)
        scheduler = MagicMock(
            is_generation=True,
            enable_overlap=True,
            forward_ct=0,
            processed_tokens_counter=0,
            forward_sleep_time=None,
            _confidence_budget_prepare=None,
            batch_result_processor=processor,
            result_queue=[],
        )
        if pending:
            scheduler.result_queue.append(
                (MagicMock(reqs=[self.req]), _result(pending))
            )
        count = getattr(Scheduler, "_count_penalized_tokens", None)
        if count is not None:
            scheduler._count_penalized_tokens = count.__get__(scheduler)
        scheduler.forward_stream_ctx.__exit__.return_value = False
        isolation = scheduler._forward_isolation.return_value
        isolation.__enter__.side_effect = lambda *_: SamplingBatchInfo.update_penalties(
            self.batch.sampling_info
        )
        isolation.__exit__.return_value = False
        scheduler.model_worker.forward_batch_generation.side_effect = _Launched
        self.batch.extend_num_tokens = 0
        with patch.object(scheduler_module, "resolve_forward_inputs"):
            with self.assert_raises(_Launched):
                Scheduler.run_batch(scheduler, self.batch)
        return self.batch.sampling_info

    assert_raises = unittest.TestCase().assertRaises

    def rounds(self, rounds):
        """Return the penalties after rounds whose results are processed at once."""
        for tokens in rounds:
            self.req.output_ids += tokens
            found = self.forward()
        return found


class TestRounds(unittest.TestCase):
    def test_frequency_of_all_tokens_of_a_round(self):
        server = _Server(_request([], frequency_penalty=0.5))
        row = server.rounds([[3], [4, 4, 5], [3]]).acc_additive_penalties[0]
        self.assertEqual(row[[3, 4, 5, 6]].tolist(), [-1.0, -1.0, -0.5, 0.0])

    def test_presence_of_all_tokens_of_a_round(self):
        server = _Server(_request([], presence_penalty=0.5))
        row = server.rounds([[3], [4, 4, 5]]).acc_additive_penalties[0]
        self.assertEqual(row[[3, 4, 5, 6]].tolist(), [-0.5, -0.5, -0.5, 0.0])

    def test_repetition_of_all_tokens_of_a_round(self):
        server = _Server(_request([], repetition_penalty=2.0))
        row = server.rounds([[3], [4, 4, 5]]).acc_scaling_penalties[0]
        self.assertEqual(row[[3, 4, 5, 6]].tolist(), [2.0, 2.0, 2.0, 1.0])

    def test_min_new_tokens_counts_tokens(self):
        for least, penalty in ((4, 0.0), (5, -torch.inf)):
            server = _Server(_request([], min_new_tokens=least))
            row = server.rounds([[3], [4, 4, 5]]).acc_additive_penalties[0]
            self.assertEqual(float(row[STOP]), penalty, least)

    def test_with_overlap_a_result_that_is_pending_is_counted_once(self):
        server = _Server(_request([3], frequency_penalty=0.5))
        row = server.forward(pending=[4, 4, 5]).acc_additive_penalties[0]
        self.assertEqual(row[[3, 4, 5, 6]].tolist(), [-0.5, -1.0, -0.5, 0.0])
        server.req.output_ids += [4, 4, 5]
        row = server.forward(pending=[6]).acc_additive_penalties[0]
        self.assertEqual(row[[3, 4, 5, 6]].tolist(), [-0.5, -1.0, -0.5, -0.5])

    def test_a_request_that_comes_back_from_a_retraction(self):
        server = _Server(_request([3, 4, 4], frequency_penalty=0.5))
        SamplingBatchInfo.update_penalties(server.batch.sampling_info)
        row = server.batch.sampling_info.acc_additive_penalties[0]
        self.assertEqual(row[[3, 4, 5]].tolist(), [-0.5, -1.0, 0.0])


class TestPlainDecode(unittest.TestCase):
    def test_min_new_tokens_counts_a_token_that_is_pending(self):
        # With overlap output_ids is empty when the first decode is prepared.
        server = _Server(_request([], min_new_tokens=1), speculative=False)
        row = server.forward(pending=[3]).acc_additive_penalties[0]
        self.assertEqual(float(row[STOP]), 0.0)

    def test_each_step_copies_one_token_a_request(self):
        server = _Server(_request([3] * 4000, frequency_penalty=0.5), speculative=False)
        with patch.object(torch, "tensor", side_effect=torch.tensor) as tensor:
            server.forward()
        copied = sum(len(call.args[0]) for call in tensor.call_args_list)
        self.assertEqual(copied, 1)


if __name__ == "__main__":
    unittest.main()
