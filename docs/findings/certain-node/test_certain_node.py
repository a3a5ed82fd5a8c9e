"""A draft tree selects each node with its parent, even if the draft is certain."""

import unittest

import torch

from sglang.srt.speculative.eagle_utils import organize_draft_results
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")


def _grow(probabilities):
    """Return draft_forward's lists for one request.

    probabilities: one [branches, topk] per step, best first; step 0 has one branch.
    """
    topk = probabilities[0].shape[-1]
    value = probabilities[0].flatten()
    scores = [value.view(1, 1, topk)]
    tokens = [torch.arange(topk)[None]]
    parents = [torch.arange(-1, topk)[None]]
    for step, one in enumerate(probabilities[1:]):
        expanded = value.view(topk, 1) * one
        best = torch.topk(expanded.flatten(), topk)
        first = topk + step * topk * topk
        scores.append(expanded[None])
        tokens.append(first + torch.arange(topk * topk)[None])
        parents.append(first + best.indices[None])
        value = best.values
    return scores, tokens, parents


def _random_tree(seed, topk, num_steps):
    """In each step except the first, one branch is certain of its best token."""
    generator = torch.Generator().manual_seed(seed)
    steps = []
    for step in range(num_steps):
        logits = torch.randn(topk if step else 1, topk, generator=generator)
        one = torch.softmax(logits, -1).sort(descending=True).values
        if step:
            branch = int(torch.randint(topk, (), generator=generator))
            one[branch] = torch.tensor([1.0] + [0.0] * (topk - 1))
        steps.append(one)
    return steps


class TestSelectedNodes(unittest.TestCase):
    def _select(self, requests, num_draft_token):
        """Return the selected candidates and their parents; -1 is the root."""
        topk = requests[0][0].shape[-1]
        lists = zip(*(_grow(request) for request in requests))
        parents, selected, tokens = organize_draft_results(
            *([torch.cat(step) for step in zip(*one)] for one in lists),
            num_draft_token,
        )
        self.assertTrue(torch.equal(tokens, selected))
        return [
            (nodes.tolist(), table[nodes // topk].tolist())
            for nodes, table in zip(selected, parents)
        ]

    def _assert_tree(self, requests, num_draft_token):
        for nodes, parents in self._select(requests, num_draft_token):
            self.assertEqual(nodes, sorted(set(nodes)))
            self.assertEqual(len(nodes), num_draft_token - 1)
            for node, parent in zip(nodes, parents):
                self.assertTrue(
                    parent == -1 or parent in nodes,
                    f"{node} of {nodes} is selected without its parent {parent}",
                )

    def test_certain_nodes(self):
        for topk, num_steps, num_draft_token in (
            (2, 2, 4),
            (3, 3, 6),
            (4, 3, 8),
            (8, 3, 19),
        ):
            with self.subTest(topk=topk, num_draft_token=num_draft_token):
                requests = [
                    _random_tree(seed, topk, num_steps) for seed in range(100)
                ]
                self._assert_tree(requests, num_draft_token)

    def test_all_candidates_are_certain(self):
        certain = torch.tensor([[1.0, 0.0]])
        request = [certain, certain.expand(2, 2), certain.expand(2, 2)]
        for num_draft_token in range(2, 11):
            with self.subTest(num_draft_token=num_draft_token):
                self._assert_tree([request], num_draft_token)

    def test_different_values_are_selected_as_before(self):
        """Without ties the best candidates are selected, whatever their indices."""
        request = [
            torch.tensor([[0.7, 0.2]]),
            torch.tensor([[0.6, 0.3], [0.9, 0.05]]),
        ]
        # values: 0.7 0.2, 0.42 0.21, 0.18 0.01
        for num_draft_token, expected in (
            (2, [0]),
            (3, [0, 2]),
            (4, [0, 2, 3]),
            (5, [0, 1, 2, 3]),
            (6, [0, 1, 2, 3, 4]),
        ):
            with self.subTest(num_draft_token=num_draft_token):
                [(nodes, _)] = self._select([request], num_draft_token)
                self.assertEqual(nodes, expected)


if __name__ == "__main__":
    unittest.main()
