"""Models that keep states cut chunks at pages, even if running requests take budget."""

import unittest
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch

from sglang.srt.managers import schedule_batch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.schedule_policy import PrefillAdder
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

PROMPT = 194


def _chunks(*, page_size, chunk, running, states=True, radix_cache=True):
    """Return where a prompt's chunks end after the first one, which ends at token 64.

    running: requests that decode in each batch. states: whether the model has Mamba
    or GDN layers.
    """
    tree_cache = MagicMock(disable=not radix_cache)
    tree_cache.supports_mamba.return_value = states
    tree_cache.evictable_size.return_value = 0
    tree_cache.full_evictable_size.return_value = 0
    allocator = PagedTokenToKVPoolAllocator(
        1024, page_size, torch.float32, "cpu", MagicMock(), need_sort=False
    )
    req = SimpleNamespace(
        full_untruncated_fill_ids=[0] * PROMPT,
        output_ids=[],
        prefix_len=64,
        kv=SimpleNamespace(req_pool_idx=0, holds_mamba=True),
        retracted_stain=False,
        sampling_params=SimpleNamespace(max_new_tokens=1, ignore_eos=False),
    )
    ends = []
    while req.prefix_len < PROMPT and len(ends) < PROMPT:
        adder = PrefillAdder(
            page_size=page_size,
            tree_cache=tree_cache,
            token_to_kv_pool_allocator=allocator,
            running_batch=None,
            new_token_ratio=1.0,
            rem_input_tokens=1024,
            rem_chunk_tokens=chunk,
            num_mixed_decode_tokens=running,
        )
        # The tokens that the request reads in this step, once its end is set.
        req.extend_len = min(chunk - running, PROMPT - req.prefix_len)
        left = adder.add_chunked_req(req)
        ends.append(req.extend_end)
        assert (left is None) == (req.extend_end == PROMPT)
        req.prefix_len = req.extend_end
    return ends


class TestMixedState(unittest.TestCase):
    def test_a_chunk_beside_a_request_that_runs_ends_with_a_page(self):
        ends = _chunks(page_size=2, chunk=66, running=1)
        self.assertEqual(ends, [128, 192, 194])

    def test_pages_of_more_tokens(self):
        ends = _chunks(page_size=16, chunk=64, running=3)
        self.assertEqual(ends, [112, 160, 194])

    def test_alone_a_chunk_is_as_long_as_it_may_be(self):
        self.assertEqual(_chunks(page_size=2, chunk=66, running=0), [130, 194])

    def test_in_pages_of_one_token_a_chunk_may_end_anywhere(self):
        self.assertEqual(_chunks(page_size=1, chunk=66, running=1), [129, 194])

    def test_without_states_a_chunk_may_end_anywhere(self):
        ends = _chunks(page_size=2, chunk=66, running=1, states=False)
        self.assertEqual(ends, [129, 194])

    def test_without_the_prefix_cache_a_chunk_takes_the_whole_budget(self):
        # Leftover budget would let add_one_req_ignore_eos cut a second request; the
        # scheduler asserts that there is only one.
        ends = _chunks(page_size=2, chunk=66, running=1, radix_cache=False)
        self.assertEqual(ends, [129, 194])

    def test_a_chunk_of_less_than_a_page_goes_on(self):
        ends = _chunks(page_size=64, chunk=64, running=1)
        self.assertEqual(ends, [127, 190, 194])

    def _kept(self, begin, end, page_size):
        """Return the length whose state is kept after a chunk, or None."""
        grid = max(64, page_size)
        batch = MagicMock(tree_cache=SimpleNamespace(page_size=page_size))
        batch.model_config.hf_text_config.mamba_chunk_size = 64
        kv = SimpleNamespace(mamba_next_track_idx=0, mamba_last_track_seqlen=None)
        req = SimpleNamespace(
            prefix_len=begin,
            extend_end=end,
            extend_len=end - begin,
            mamba_branching_seqlen=None,
            kv=kv,
        )
        dcp = MagicMock(dcp_enabled=False)
        with (
            patch.object(schedule_batch, "mamba_cache_chunk_size", lambda: grid),
            patch.object(schedule_batch, "mamba_checkpoint_grid", lambda page: grid),
            patch.object(schedule_batch, "get_parallel", lambda: dcp),
            patch.object(schedule_batch, "get_exec", MagicMock()),
        ):
            entry = ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend(
                batch, req
            )
        self.assertEqual(entry.track_mask, kv.mamba_last_track_seqlen is not None)
        return kv.mamba_last_track_seqlen

    def test_of_a_chunk_that_begins_inside_a_page_no_state_is_kept(self):
        self.assertIsNone(self._kept(127, 193, page_size=64))
        self.assertIsNone(self._kept(129, 194, page_size=2))

    def test_of_one_that_begins_with_a_page_the_last_one_is(self):
        self.assertEqual(self._kept(64, 193, page_size=64), 192)
        self.assertEqual(self._kept(65, 194, page_size=1), 193)


if __name__ == "__main__":
    unittest.main()
