"""No request is aborted for KV that is only locked until its copy to the host is done."""

import unittest
from unittest.mock import MagicMock, patch

import torch

from sglang.srt.managers import schedule_batch as schedule_batch_module
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

DECODE = 10  # slots that the last request needs for its next step


class _Cache(UnifiedRadixCache):
    """One node, whose slots are locked for a copy to the host, or can be evicted."""

    def __init__(self, allocator, slots, acknowledged):
        self.tree_core = MagicMock()
        self.allocator, self.slots = allocator, slots
        self.locks = 0 if acknowledged else 1
        self.buffer_pipeline = None
        self.enable_storage = False
        self.metrics_collector = None
        self.cache_controller = MagicMock()
        self.ongoing_write_through = {}
        if acknowledged:
            return
        ack = MagicMock(node_ids=[7], num_tokens_by_pool={}, num_bytes=0)
        self.cache_controller.ack_write_queue = [ack]
        self.ongoing_write_through = {7: (7, object(), [7])}

    def dec_lock_ref(self, node, params=None):
        self.locks -= 1

    def supports_prefix_sharing(self):
        return True

    def evict_for_alloc(self, params):
        if self.locks == 0 and self.slots is not None:
            self.allocator.free(self.slots)
            self.slots = None


def _retracted(*, free, cached, acknowledged):
    """Retract with one request left, `free` free slots and `cached` ones in the tree.

    Returns the requests that are kept, those that are aborted, and the cache.
    """
    allocator = TokenToKVPoolAllocator(
        free + cached, torch.float32, "cpu", MagicMock(), need_sort=False
    )
    cache = _Cache(allocator, allocator.alloc(cached), acknowledged)
    request = MagicMock(rid="last", beam_group=None)
    batch = MagicMock(
        reqs=[request],
        tree_cache=cache,
        token_to_kv_pool_allocator=allocator,
    )
    batch._get_decode_retraction_order.return_value = [0]
    batch.new_tokens_required_next_decode.return_value = DECODE
    batch.check_decode_mem = ScheduleBatch.check_decode_mem.__get__(batch)
    with patch.object(schedule_batch_module, "NewTokenRatioTracker"):
        _, _, aborted = ScheduleBatch.retract_decode(batch)
    kept = batch.filter_batch.call_args.kwargs["keep_indices"]
    return kept, aborted, cache


class TestHostAbort(unittest.TestCase):
    def test_slots_on_their_way_to_the_host_are_waited_for(self):
        kept, aborted, cache = _retracted(free=8, cached=36, acknowledged=False)
        self.assertEqual(len(aborted), 0, "the last request was aborted")
        self.assertEqual(kept, [0])
        self.assertEqual(cache.locks, 0)
        self.assertEqual(len(cache.ongoing_write_through), 0)
        self.assertEqual(cache.allocator.available_size(), 44)

    def test_a_pool_that_is_too_small_is_still_told(self):
        kept, aborted, _ = _retracted(free=4, cached=5, acknowledged=False)
        self.assertEqual(kept, [])
        self.assertEqual([request.rid for request in aborted], ["last"])

    def test_nothing_is_waited_for_where_there_is_room(self):
        kept, aborted, cache = _retracted(free=10, cached=36, acknowledged=False)
        self.assertEqual((kept, aborted), ([0], []))
        self.assertEqual(cache.locks, 1)

    def test_what_can_be_evicted_is_evicted(self):
        kept, aborted, cache = _retracted(free=8, cached=36, acknowledged=True)
        self.assertEqual((kept, aborted), ([0], []))
        self.assertIsNone(cache.slots)


if __name__ == "__main__":
    unittest.main()
