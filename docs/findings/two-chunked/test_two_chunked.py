"""A prefill batch cuts one request at most, since the scheduler continues only one."""

import unittest
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch

from sglang.srt.managers import schedule_policy
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

PAGE_SIZE, CHUNK = 2, 4


def _request(prompt, ignore_eos):
    req = MagicMock()
    req.full_untruncated_fill_ids = req.origin_input_ids = list(range(prompt))
    req.output_ids = []
    req.prefix_len = req.extend_end = 0
    req.host_hit_length = req.swa_host_hit_length = req.storage_hit_length = 0
    req.auxiliary_swa_host_hit_length = 0
    req.needs_host_load_back.return_value = False
    req.fulfilled_storage_hit_len.return_value = 0
    req.extend_len = prompt  # of one that is added whole
    req.retracted_stain = False
    req.sampling_params = SimpleNamespace(max_new_tokens=1, ignore_eos=ignore_eos)
    return req


def _adder(running):
    """Build the adder of a server without the radix cache; `running` requests decode."""
    tree_cache = MagicMock(disable=True)
    tree_cache.supports_mamba.return_value = False
    tree_cache.evictable_size.return_value = 0
    allocator = PagedTokenToKVPoolAllocator(
        1024, PAGE_SIZE, torch.float32, "cpu", MagicMock(), need_sort=False
    )
    return PrefillAdder(
        page_size=PAGE_SIZE,
        tree_cache=tree_cache,
        token_to_kv_pool_allocator=allocator,
        running_batch=None,
        new_token_ratio=1.0,
        rem_input_tokens=1024,
        rem_chunk_tokens=CHUNK,
        num_mixed_decode_tokens=running,
    )


class TestTwoChunked(unittest.TestCase):
    def setUp(self):
        features = SimpleNamespace(enable_encoder_swa_bounded_replay=False)
        config = patch.object(
            schedule_policy, "get_exec", lambda: SimpleNamespace(features=features)
        )
        config.start()
        self.addCleanup(config.stop)

    def _add(self, adder, req, has_chunked_req=False):
        return adder.add_one_req(
            req, has_chunked_req=has_chunked_req, truncation_align_size=None
        )

    def test_a_second_request_waits_for_the_first_that_is_cut(self):
        adder = _adder(running=1)
        first, second = _request(3, ignore_eos=False), _request(2, ignore_eos=True)
        self.assertEqual(self._add(adder, first), AddReqResult.CONTINUE)
        self.assertEqual(first.extend_end, 2)  # of 3, and a token of budget is left
        result = self._add(adder, second)
        self.assertIs(adder.new_chunked_req, first)
        self.assertEqual(adder.can_run_list, [first])
        self.assertEqual(result, AddReqResult.OTHER)

    def test_a_request_waits_for_one_whose_chunks_continue(self):
        # The scheduler asserts that there is only one.
        adder = _adder(running=1)
        result = self._add(adder, _request(4, ignore_eos=True), has_chunked_req=True)
        self.assertIsNone(adder.new_chunked_req)
        self.assertEqual(result, AddReqResult.OTHER)

    def test_a_second_request_that_fits_is_added(self):
        adder = _adder(running=1)
        first, second = _request(3, ignore_eos=False), _request(1, ignore_eos=True)
        self._add(adder, first)
        self._add(adder, second)
        self.assertIs(adder.new_chunked_req, first)
        self.assertEqual(adder.can_run_list, [first, second])

    def test_a_request_that_ignores_eos_is_cut_alone(self):
        adder = _adder(running=1)
        req = _request(4, ignore_eos=True)
        self._add(adder, req)
        self.assertIs(adder.new_chunked_req, req)
        self.assertEqual(req.extend_end, 3)


if __name__ == "__main__":
    unittest.main()
