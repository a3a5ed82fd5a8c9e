"""EAGLE's draft chain on the CPU, number for number.

The scheduler and the speculative worker of this tree run small requests. eagletwin
(`pip install eagletwin`) compares every number that they make on the way with a slow
reference: draft tokens, positions, slots and rows of the KV pools, hidden states,
proposals, tree masks, accepted paths. Greedy output hides most of these numbers, as
verification repairs a wrong draft. Each test is the smallest case of a bug that was
fixed; the number is the pull request's.
"""

import tempfile
import unittest
from pathlib import Path

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.engines.source import resolve
from eagletwin.harness.testing.twin import CaseFailed, Twin
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=30, suite="base-a-test-cpu")


class TestEagleDraftChain(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.scratch = tempfile.TemporaryDirectory()
        cls.twin = Twin(Path(cls.scratch.name), source=resolve(""))

    @classmethod
    def tearDownClass(cls):
        cls.twin.close()
        cls.scratch.cleanup()

    def _assert_fixed(self, bug):
        try:
            self.twin.check(LEDGER[bug].case)
        except CaseFailed as failed:
            again = f"eagletwin check {bug}"
            self.fail(f"{failed}\n\n{failed.argument}\n\n  again: {again}")

    # One draft layer: chains

    def test_draft_decode_positions(self):
        self._assert_fixed("25015")

    def test_next_token_at_the_end_of_a_prefill_chunk(self):
        self._assert_fixed("26329")

    def test_prefix_cache_keys_cover_the_token_behind_a_draft_row(self):
        self._assert_fixed("10846")

    def test_new_weights_from_disk_reach_the_draft(self):
        self._assert_fixed("22088")

    def test_stop_token_in_the_round_that_reaches_max_new_tokens(self):
        self._assert_fixed("33758")

    def test_greedy_request_drafts_the_best_token_under_rejection_sampling(self):
        self._assert_fixed("greedy-drafts-decode")

    # One draft layer: trees

    def test_accepted_path_moves_kv_rows(self):
        self._assert_fixed("26997-kv")

    def test_accepted_path_moves_tokens(self):
        self._assert_fixed("26997-tokens")

    def test_accepted_path_moves_hidden_states(self):
        self._assert_fixed("26997-hidden")

    def test_bonus_token_of_a_batch_of_trees(self):
        self._assert_fixed("26997-bonus")

    def test_row_of_req_to_token_holds_the_pages_of_a_tree(self):
        self._assert_fixed("26972")

    # Layers that keep a state

    def test_states_lie_where_the_buffer_has_them_in_short_rounds(self):
        self._assert_fixed("23331")

    def test_verify_leaves_the_states_of_a_prefill(self):
        self._assert_fixed("27095")

    def test_waiting_request_forgets_the_state_of_its_prefix(self):
        self._assert_fixed("29354")

    def test_cached_state_of_each_request_of_a_prefill(self):
        self._assert_fixed("37836")

    # Several draft layers

    def test_each_layer_uses_its_own_req_to_token_pool(self):
        self._assert_fixed("22954-req-pool")

    def test_each_layer_uses_its_own_kv_pool(self):
        self._assert_fixed("22954-kv-pool")

    def test_each_layer_uses_its_own_attention_backend(self):
        self._assert_fixed("22954-attn-backend")

    def test_decode_hands_on_the_state_of_the_layer_below(self):
        self._assert_fixed("chain-hidden")

    def test_target_verify_plans_its_attention(self):
        self._assert_fixed("multi-layer-plan-verify")

    def test_draft_extend_plans_its_attention(self):
        self._assert_fixed("multi-layer-plan-extend")

    def test_worker_takes_pp_proxy_tensors(self):
        self._assert_fixed("multi-layer-pp-proxy")


if __name__ == "__main__":
    unittest.main()
