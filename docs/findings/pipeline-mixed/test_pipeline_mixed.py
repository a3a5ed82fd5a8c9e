"""A mixed step gives its running requests a token, which a pipeline relays."""

import unittest
from unittest.mock import MagicMock, patch

from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.managers.scheduler import Scheduler
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")


def _samples(*, last, mixed):
    """Whether a batch counts as one that samples tokens."""
    chunk = MagicMock()
    running = MagicMock(reqs=[MagicMock(beam_group=None)], return_logprob=False)
    running.is_empty.return_value = not mixed
    running.batch_is_full = False
    built = MagicMock(return_logprob=False, input_embeds=None)
    scheduler = MagicMock(
        waiting_queue=[],
        chunked_req=chunk,
        min_free_slots_delayer=None,
        dynamic_chunk_sizer=None,
        is_mixed_chunk=True,
        is_hybrid_swa=False,
        enable_priority_preemption=False,
        enable_hierarchical_cache=False,
        enable_unified_cache_external_linker=False,
        enable_hicache_storage=False,
        enable_lora=False,
        enable_overlap=True,
        max_prefill_bs=0,
    )
    scheduler.grammar_manager.has_waiting_grammars.return_value = False
    scheduler.get_num_allocatable_reqs.return_value = 8
    scheduler.tp_worker.model_runner.prefill_aware_swa = False
    scheduler._reqs_finishing_inflight.return_value = []
    adder = scheduler.get_prefill_adder_class.return_value.return_value
    adder.add_chunked_req.return_value = None if last else chunk
    adder.can_run_list = [chunk]
    adder.preempt_list = []
    adder.new_chunked_req = None
    adder.rem_chunk_tokens = 1
    with (
        patch.object(scheduler_module, "ScheduleBatch") as batch,
        patch.object(scheduler_module, "PrefillStats"),
        patch.object(scheduler_module, "set_time_batch"),
        patch.object(scheduler_module, "get_schedule"),
    ):
        batch.init_new.return_value = built
        Scheduler._get_new_batch_prefill_raw(scheduler, None, running)
    return built.contains_last_prefill_chunk


class TestPipelineMixed(unittest.TestCase):
    def test_a_chunk_alone(self):
        self.assertFalse(_samples(last=False, mixed=False))
        self.assertTrue(_samples(last=True, mixed=False))

    def test_beside_running_requests(self):
        self.assertTrue(_samples(last=True, mixed=True))
        self.assertTrue(_samples(last=False, mixed=True))


if __name__ == "__main__":
    unittest.main()
