"""A chunk of a prompt is never empty: without budget it has one token."""

import unittest
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch

from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

CHUNK, PROMPT, READ = 4, 11, 4


def _chunked():
    """A request in the middle of its prompt."""
    req = MagicMock()
    req.full_untruncated_fill_ids = list(range(PROMPT))
    req.prefix_len = req.extend_end = READ
    req.extend_len = CHUNK  # of one that is added, at most
    req.retracted_stain = False
    req.sampling_params = SimpleNamespace(max_new_tokens=1, ignore_eos=False)
    return req


def _adder(decoding, *, chunk=CHUNK):
    """Build an adder for a micro-batch in which `decoding` requests decode."""
    tree_cache = MagicMock(disable=True)
    tree_cache.supports_mamba.return_value = False
    tree_cache.evictable_size.return_value = 0
    allocator = TokenToKVPoolAllocator(
        1024, torch.float32, "cpu", MagicMock(), need_sort=False
    )
    return PrefillAdder(
        page_size=1,
        tree_cache=tree_cache,
        token_to_kv_pool_allocator=allocator,
        running_batch=None,
        new_token_ratio=1.0,
        rem_input_tokens=1024,
        rem_chunk_tokens=chunk,
        num_mixed_decode_tokens=decoding,
    )


class TestPipelineEmpty(unittest.TestCase):
    def _goes_on(self, adder, tokens):
        req = _chunked()
        self.assertIs(adder.add_chunked_req(req), req)
        self.assertEqual(adder.can_run_list, [req])
        self.assertEqual(req.extend_end, READ + tokens)
        # Without budget no other request is admitted.
        self.assertEqual(adder.budget_state(), AddReqResult.OTHER)

    def test_where_as_many_decode_as_a_chunk_has_tokens(self):
        self._goes_on(_adder(decoding=CHUNK), 1)

    def test_where_more_decode(self):
        self._goes_on(_adder(decoding=CHUNK + 1), 1)

    def test_with_the_smallest_chunks(self):
        self._goes_on(_adder(decoding=1, chunk=1), 1)

    def test_with_what_is_left(self):
        self._goes_on(_adder(decoding=0), CHUNK)
        self._goes_on(_adder(decoding=CHUNK - 1), 1)


if __name__ == "__main__":
    unittest.main()
