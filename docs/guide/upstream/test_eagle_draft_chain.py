"""EAGLE's draft chain on the CPU, number for number.

The scheduler and the speculative worker of this tree run small requests. eagletwin
(`pip install eagletwin`) compares every number that they make on the way with a slow
reference: draft tokens, positions, slots and rows of the KV pools, hidden states,
proposals, tree masks, accepted paths. Greedy output hides most of these numbers, as
verification repairs a wrong draft. Each test is the smallest case of a bug that was
fixed; a number is the pull request's.
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

    # python -m tests.ledger writes the tests that follow

    # Reuse a draft row only where the token behind it is the same, too
    def test_10846(self):
        self._assert_fixed("10846")

    # Give new weights to the draft as well
    def test_22088(self):
        self._assert_fixed("22088")

    # Fix Eagle draft decode positions
    def test_25015(self):
        self._assert_fixed("25015")

    # Fix the EAGLE chunked-prefill next-token chain
    def test_26329(self):
        self._assert_fixed("26329")

    # Make a row of req_to_token wide enough for the pages of a tree
    def test_26972(self):
        self._assert_fixed("26972")

    # Move the accepted path's KV rows to the front
    def test_26997_kv(self):
        self._assert_fixed("26997-kv")

    # Move the accepted path's predicted tokens to the front
    def test_26997_tokens(self):
        self._assert_fixed("26997-tokens")

    # Move the accepted path's hidden states to the front
    def test_26997_hidden(self):
        self._assert_fixed("26997-hidden")

    # Look the bonus token up with the stride of the accepted path
    def test_26997_bonus(self):
        self._assert_fixed("26997-bonus")

    # Count the nodes of a tree in draft extend, where ranks tell each other how
    # many tokens they have
    def test_26997_width(self):
        self._assert_fixed("26997-width")

    # End a request at its stop token, also where the same round reaches
    # max_new_tokens
    def test_33758(self):
        self._assert_fixed("33758")

    # Have each layer of a multi-layer draft use its own runner's
    # req_to_token_pool
    def test_22954_req_pool(self):
        self._assert_fixed("22954-req-pool")

    # Have each layer of a multi-layer draft use its own runner's
    # token_to_kv_pool
    def test_22954_kv_pool(self):
        self._assert_fixed("22954-kv-pool")

    # Have each layer of a multi-layer draft use its own runner's attn_backend
    def test_22954_attn_backend(self):
        self._assert_fixed("22954-attn-backend")

    # Hand the state of the layer below on in decode without graphs
    def test_chain_hidden(self):
        self._assert_fixed("chain-hidden")

    # Plan the attention of target verify
    def test_multi_layer_plan_verify(self):
        self._assert_fixed("multi-layer-plan-verify")

    # Plan the attention of each layer's draft extend
    def test_multi_layer_plan_extend(self):
        self._assert_fixed("multi-layer-plan-extend")

    # Let the multi-layer worker take the scheduler's pp_proxy_tensors
    def test_multi_layer_pp_proxy(self):
        self._assert_fixed("multi-layer-pp-proxy")

    # Draft the best token, and draw none, for a greedy request under rejection
    # sampling
    def test_greedy_drafts_decode(self):
        self._assert_fixed("greedy-drafts-decode")

    # Reset the padded rows of a multi-layer draft extend in a CUDA graph
    def test_22958(self):
        self._assert_fixed("22958")

    # Find each request's states of the gated delta rule in rounds that are
    # shorter than the longest
    def test_23331(self):
        self._assert_fixed("23331")

    # Clear a request's state in its prefill alone, and not in the verify after
    # it
    def test_27095(self):
        self._assert_fixed("27095")

    # Forget which state a request was to begin from, if it has to wait
    def test_29354(self):
        self._assert_fixed("29354")

    # Keep Mamba-2's state of the right position where a prefill has several
    # requests
    def test_37836(self):
        self._assert_fixed("37836")

    # end of what it writes


if __name__ == "__main__":
    unittest.main()
