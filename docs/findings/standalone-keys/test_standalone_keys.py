"""The prefix cache matches a row only with the token that the row has consumed."""

import unittest
from array import array
from unittest.mock import MagicMock, patch

import torch

from sglang.srt.mem_cache import kv_cache_builder
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=12, suite="base-a-test-cpu")

PROMPT = [7, 19, 3, 21]


def _build_cache(algorithm, page_size):
    """Build the prefix cache that a scheduler has for this algorithm."""
    tp_worker = MagicMock(is_hybrid_swa=False)
    allocator = MagicMock(device="cpu", page_size=page_size)
    tp_worker.get_memory_pool.return_value = (MagicMock(), allocator)
    with (
        get_context().override_server_args(speculative_algorithm=algorithm),
        get_parallel().override(
            tp_rank=0,
            tp_size=1,
            tp_group=MagicMock(),
            pp_rank=0,
            pp_size=1,
            pp_group=MagicMock(),
            attn_tp_group=MagicMock(),
            attn_cp_rank=0,
            attn_cp_size=1,
            attn_cp_group=MagicMock(),
            attn_dcp_size=1,
        ),
        patch.multiple(
            kv_cache_builder,
            create_tree_cache=lambda context: RadixCache(context.params),
            get_dp_tp_group=MagicMock(),
            is_deepseek_dsa=MagicMock(return_value=False),
            uses_ssm_state=MagicMock(return_value=False),
            resolve_decode_retraction_backup=MagicMock(return_value="cpu_tensor"),
        ),
    ):
        return kv_cache_builder.build_kv_cache(
            server_args=MagicMock(),
            model_config=MagicMock(is_multimodal=False),
            tp_worker=tp_worker,
            page_size=page_size,
            spec_algorithm=SpeculativeAlgorithm.from_string(algorithm),
            enable_metrics=False,
            enable_kv_cache_events=False,
            enable_hierarchical_cache=False,
        ).tree_cache


class TestPrefixCacheKeys(unittest.TestCase):
    def _assert_hit(self, algorithm, prompt, rows, page_size=1):
        """Another prompt reuses this many rows of PROMPT."""
        cache = _build_cache(algorithm, page_size)
        key = RadixKey(array("q", PROMPT), None)
        cache.insert(InsertParams(key=key, value=torch.arange(len(PROMPT))))
        found = cache.match_prefix(
            MatchPrefixParams(key=RadixKey(array("q", prompt), None))
        )
        self.assertEqual(found.device_prefix_len, rows)

    def test_row_of_a_draft_that_looks_one_token_ahead(self):
        # The prompts differ from token 2 on. The draft's row 1 was computed from
        # PROMPT[2]: the other cannot use it. Row 0 was computed from PROMPT[1].
        for algorithm in ("EAGLE", "STANDALONE"):
            with self.subTest(algorithm=algorithm):
                self._assert_hit(algorithm, [7, 19, 5, 6], 1)

    def test_prompts_that_part_at_the_edge_of_a_page(self):
        for algorithm in ("EAGLE", "STANDALONE"):
            with self.subTest(algorithm=algorithm):
                self._assert_hit(algorithm, [7, 19, 5, 6], 0, page_size=2)

    def test_prompts_that_part_within_a_page(self):
        for algorithm in ("EAGLE", "STANDALONE"):
            with self.subTest(algorithm=algorithm):
                self._assert_hit(algorithm, [7, 19, 3, 6], 2, page_size=2)

    def test_rows_without_a_draft_are_those_of_their_own_tokens(self):
        self._assert_hit(None, [7, 19, 5, 6], 2)


if __name__ == "__main__":
    unittest.main()
