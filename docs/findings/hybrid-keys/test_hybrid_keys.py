"""With layers that keep a state, too, the prefix cache matches a row only with its token."""

import unittest
from array import array
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_context
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=12, suite="base-a-test-cpu")

TRACKED = 4  # a state is stored after this many tokens
PROMPT = [7, 19, 3, 21, 5, 6, 8]
SLOT = torch.tensor([1])


class TestPrefixCacheKeysBesideStates(unittest.TestCase):
    def setUp(self):
        override = get_context().override_server_args(_mamba_cache_chunk_size=TRACKED)
        override.install()
        self.addCleanup(override.restore)

    def _build_cache(self, backend, is_eagle):
        """Build the prefix cache of a model with attention and layers that keep a state."""
        pool = MagicMock(
            spec=HybridReqToTokenPool,
            req_to_token=torch.arange(16).view(1, 16),
            mamba_ping_pong_track_buffer_size=2,
            mamba_allocator=MagicMock(),
        )
        pool.mamba_allocator.alloc.return_value = SLOT
        pool.donate_mamba_ping_pong_slot.return_value = SLOT
        pool.get_mamba_ping_pong_keep_idx.return_value = 0
        return UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=pool,
                token_to_kv_pool_allocator=MagicMock(device="cpu", page_size=1),
                page_size=1,
                is_eagle=is_eagle,
                enable_mamba_extra_buffer=True,
                tree_components=(ComponentType.FULL, ComponentType.MAMBA),
                tree_core_backend=backend,
            )
        )

    def _keep(self, cache, tokens, computed, finished):
        """Cache a request with these tokens and the first `computed` rows."""
        kv = SimpleNamespace(
            req_pool_idx=0,
            cache_protected_len=0,
            cache_inserted_len=0,
            mamba_last_track_seqlen=TRACKED,
            mamba_prev_track_seqlen=None,
            mamba_ping_pong_track_buffer=torch.tensor([1, 2]),
        )
        req = MagicMock(
            full_untruncated_fill_ids=array("q", tokens),
            origin_input_ids=array("q", tokens),
            extra_key=None,
            cache_salt=None,
            session=None,
            priority=0,
            session_id=None,
            kv_rotation_base=None,
            lock=None,
            kv=kv,
        )
        req.finished.return_value = finished
        cache.checkpoint_into_tree(req, up_to=computed)

    def _assert_hit(
        self, prompt, rows, *, known=7, computed=6, finished=True, is_eagle=True
    ):
        """A prompt reuses this many rows of a request that knows `known` tokens of PROMPT."""
        for backend in ("rust", "python"):
            with self.subTest(backend=backend):
                cache = self._build_cache(backend, is_eagle)
                self._keep(cache, PROMPT[:known], computed, finished)
                found = cache.match_prefix(
                    MatchPrefixParams(key=RadixKey(array("q", prompt), None))
                )
                self.assertEqual(found.device_prefix_len, rows)

    def test_prompts_that_part_at_a_state(self):
        # The draft's row 3 was computed from PROMPT[4]: the other cannot use it.
        for finished in (False, True):
            with self.subTest(finished=finished):
                self._assert_hit([7, 19, 3, 21, 9, 6], 0, finished=finished)

    def test_prompts_that_part_after_a_state(self):
        for finished in (False, True):
            with self.subTest(finished=finished):
                self._assert_hit([7, 19, 3, 21, 5, 9], TRACKED, finished=finished)

    def test_a_chunk_that_ends_at_a_state(self):
        # The next token is the prompt's, so it is known.
        prompt = [7, 19, 3, 21, 5, 9]
        self._assert_hit(prompt, TRACKED, computed=TRACKED, finished=False)

    def test_a_prompt_that_ends_at_a_state(self):
        # The next token is not known: 4 tokens make only 3 pairs.
        for finished in (False, True):
            with self.subTest(finished=finished):
                self._assert_hit(
                    PROMPT, 0, known=TRACKED, computed=TRACKED, finished=finished
                )

    def test_rows_without_a_draft_are_those_of_their_own_tokens(self):
        self._assert_hit([7, 19, 3, 21, 9, 6], TRACKED, is_eagle=False)


if __name__ == "__main__":
    unittest.main()
