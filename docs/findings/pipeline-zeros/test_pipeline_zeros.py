"""A pipeline's first tree, which nobody drafted: no two children of a node have the same token."""

import unittest

import torch

from sglang.srt.speculative.pp_spec_relay import PPSpecRelayInput
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="base-a-test-cpu")


def _chance_of(token, children, probabilities):
    """Of being emitted by target-only sampling at a node with these children.

    Each child is accepted by the part of the coin in [0, 1) that its token's
    probability takes, behind its elder siblings'; else the rest is drawn.
    """
    accepted, mass, left = 0.0, 0.0, probabilities.clone()
    for child in children:
        own = min(float(probabilities[child]), 1.0 - mass)
        mass += own
        accepted += own if child == token else 0.0
        left[child] = 0.0
    rest = float(left.sum())
    return accepted + (float(left[token]) / rest * (1.0 - mass) if rest else 0.0)


class TestATreeThatNobodyDrafted(unittest.TestCase):
    def _children(self, topk, num_draft_tokens):
        relayed = PPSpecRelayInput.degenerate(
            ["a", "b"], torch.tensor([7, 5]), num_draft_tokens
        )
        self.assertEqual(relayed.tokens.shape, (2, num_draft_tokens))
        self.assertEqual(relayed.tokens.dtype, torch.int64)
        self.assertEqual(relayed.tokens[:, 0].tolist(), [7, 5])
        # The fallback topology hangs the first topk nodes on the root.
        return [row[1 : 1 + topk].tolist() for row in relayed.tokens]

    def test_each_token_is_as_likely_as_the_target_has_it(self):
        probabilities = torch.tensor([0.25, 0.125, 0.125, 0.5], dtype=torch.float64)
        for topk, num_draft_tokens in ((1, 4), (2, 3), (3, 4)):
            for children in self._children(topk, num_draft_tokens):
                with self.subTest(topk=topk, children=children):
                    found = [
                        _chance_of(token, children, probabilities) for token in range(4)
                    ]
                    self.assertEqual(found, probabilities.tolist())

    def test_no_two_nodes_have_the_same_token(self):
        for topk, num_draft_tokens in ((4, 8), (16, 49)):
            for children in self._children(topk, num_draft_tokens):
                self.assertEqual(len(set(children)), len(children))


if __name__ == "__main__":
    unittest.main()
