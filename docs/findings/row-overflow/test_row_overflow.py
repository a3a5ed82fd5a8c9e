"""Rows of req_to_token hold what a decode batch reserves, at every page size."""

import unittest

from sglang.srt.mem_cache.allocation_sizing import (
    get_alloc_reserve_per_decode,
    get_req_to_token_extra_context_len,
)
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=7, suite="base-a-test-cpu")


class TestRowCoversDecodeReserve(unittest.TestCase):
    def _assert_row_covers_reserve(self, num_steps, topk, num_draft_tokens, page_size):
        with (
            get_context().override_server_args(
                speculative_algorithm="EAGLE",
                speculative_num_steps=num_steps,
                speculative_eagle_topk=topk,
                speculative_num_draft_tokens=num_draft_tokens,
                page_size=page_size,
            ),
            get_parallel().override(attn_dcp_size=1),
        ):
            # A request may commit as many tokens as its context is long, and the
            # reserve of its last decode batch follows them in the same row.
            self.assertGreaterEqual(
                get_req_to_token_extra_context_len(),
                get_alloc_reserve_per_decode() + page_size - 1,
            )

    def test_tree_without_pages(self):
        # The default for Llama: 40 slots are reserved.
        self._assert_row_covers_reserve(
            num_steps=5, topk=4, num_draft_tokens=8, page_size=1
        )

    def test_long_chain_without_pages(self):
        self._assert_row_covers_reserve(
            num_steps=8, topk=1, num_draft_tokens=9, page_size=1
        )

    def test_tree_with_pages(self):
        self._assert_row_covers_reserve(
            num_steps=5, topk=4, num_draft_tokens=8, page_size=16
        )

    def test_row_without_speculation_is_as_wide_as_before(self):
        with (
            get_context().override_server_args(
                speculative_algorithm=None,
                speculative_num_draft_tokens=None,
                page_size=1,
            ),
            get_parallel().override(attn_dcp_size=1),
        ):
            self.assertEqual(get_req_to_token_extra_context_len(), 4)


if __name__ == "__main__":
    unittest.main()
