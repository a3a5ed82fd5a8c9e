"""With overlap the grammars of running requests in a prefill batch have read the tokens of the batch before."""

import unittest
from unittest.mock import MagicMock, patch

import torch

from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor,
)
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=12, suite="base-a-test-cpu")

TOKEN = 7


class _Sampled(Exception):
    """Leaves the worker where the target samples, and masks by the grammars."""


def _read_before_sampling(*, mixed):
    """What the grammar of a running request has read when the target samples.

    The batch before gave the request TOKEN, and its result was not processed yet.
    """
    read = []
    running = MagicMock(inflight_middle_chunks=0, is_retracted=False)
    running.finished.return_value = False
    running.grammar.accept_token.side_effect = read.append
    before = MagicMock(reqs=[running], has_grammar=True)
    before.forward_mode.is_decode.return_value = False
    result = MagicMock(
        next_token_ids=torch.tensor([TOKEN]), copy_done=None, grammar_advanced=False
    )
    processor = MagicMock()
    for name in ("advance_grammar_fsm", "_accept_grammar_tokens"):
        own = getattr(SchedulerBatchResultProcessor, name)
        setattr(processor, name, own.__get__(processor))

    seen = []

    def sample(*args, **kwargs):
        seen.extend(read)
        raise _Sampled

    worker = MagicMock(enable_dp_spec_prefill_coordination=False)
    worker.target_worker.forward_batch_generation.side_effect = sample
    worker._forward_prefill_batch = EAGLEWorkerV2._forward_prefill_batch.__get__(worker)
    scheduler = MagicMock(
        is_generation=True,
        enable_overlap=True,
        forward_ct=0,
        processed_tokens_counter=0,
        forward_sleep_time=None,
        _confidence_budget_prepare=None,
        result_queue=[(before, result)],
        batch_result_processor=processor,
        model_worker=worker,
    )
    scheduler._advance_pending_grammar = Scheduler._advance_pending_grammar.__get__(
        scheduler
    )
    worker.forward_batch_generation = EAGLEWorkerV2.forward_batch_generation.__get__(
        worker
    )
    scheduler.forward_stream_ctx.__exit__.return_value = False
    scheduler._forward_isolation.return_value.__exit__.return_value = False
    new = MagicMock()
    batch = MagicMock(
        reqs=[new, running] if mixed else [new],
        decoding_reqs=[running] if mixed else None,
        extend_num_tokens=2,
        has_grammar=True,
    )
    batch.forward_mode.is_split_prefill.return_value = False
    batch.forward_mode.is_prebuilt.return_value = False
    batch.forward_mode.is_extend.return_value = True
    batch.spec_algorithm.is_none.return_value = False
    batch.spec_algorithm.supports_grammar_overlap.return_value = True
    with patch.object(scheduler_module, "resolve_forward_inputs"):
        try:
            Scheduler.run_batch(scheduler, batch)
        except _Sampled:
            return seen
    raise AssertionError("the target did not sample")


class TestMixedGrammar(unittest.TestCase):
    def test_beside_running_requests(self):
        self.assertEqual(_read_before_sampling(mixed=True), [TOKEN])

    def test_a_prefill_alone_waits_for_nothing(self):
        self.assertEqual(_read_before_sampling(mixed=False), [])


if __name__ == "__main__":
    unittest.main()
