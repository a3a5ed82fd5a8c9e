"""Running requests join a chunk only if the rest of its prompt still fits beside them."""

import unittest
from unittest.mock import MagicMock, patch

import torch

from sglang.srt.managers import scheduler as scheduler_module
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

DECODE = 8  # slots that the running requests set aside for their next step


def _mixed(*, free, rest, page_size=1, done=0, last=False, windows=False):
    """Whether running requests join a prefill batch, which leaves `free` slots.

    The batch reads a prompt of `done + rest` tokens up to `done`; last: that is all.
    """
    if page_size == 1:
        allocator = TokenToKVPoolAllocator(
            free, torch.float32, "cpu", MagicMock(), need_sort=False
        )
    else:
        allocator = PagedTokenToKVPoolAllocator(
            free, page_size, torch.float32, "cpu", MagicMock(), need_sort=False
        )
    chunk = MagicMock(extend_end=done, full_untruncated_fill_ids=[0] * (done + rest))
    running = MagicMock(
        reqs=[MagicMock(beam_group=None)],
        return_logprob=False,
        batch_is_full=False,
        token_to_kv_pool_allocator=allocator,
    )
    running.is_empty.return_value = False
    running.tree_cache.supports_prefix_sharing.return_value = False
    running.new_tokens_required_next_decode.return_value = DECODE
    running.check_decode_mem = ScheduleBatch.check_decode_mem.__get__(running)
    built = MagicMock(return_logprob=False, input_embeds=None)
    scheduler = MagicMock(
        waiting_queue=[],
        chunked_req=chunk,
        page_size=page_size,
        min_free_slots_delayer=None,
        dynamic_chunk_sizer=None,
        is_mixed_chunk=True,
        is_hybrid_swa=windows,
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
    return built.mix_with_running.called


class TestMixedMemory(unittest.TestCase):
    def test_the_rest_of_the_prompt_keeps_its_slots(self):
        self.assertFalse(_mixed(free=DECODE + 5, rest=6))

    def test_the_rest_of_the_prompt_fits_beside_them(self):
        self.assertTrue(_mixed(free=DECODE + 6, rest=6))

    def test_the_rest_of_the_prompt_is_counted_in_pages(self):
        # 3 of 7 tokens are read: the first page is allocated, the second is not.
        self.assertFalse(_mixed(free=DECODE, rest=4, page_size=4, done=3))
        self.assertTrue(_mixed(free=DECODE + 4, rest=4, page_size=4, done=3))

    def test_a_last_chunk_leaves_nothing_to_count(self):
        self.assertTrue(_mixed(free=DECODE, rest=0, last=True))
        self.assertFalse(_mixed(free=DECODE - 1, rest=0, last=True))

    def test_a_chunk_that_may_wait_is_not_counted(self):
        self.assertTrue(_mixed(free=DECODE, rest=6, windows=True))


if __name__ == "__main__":
    unittest.main()
