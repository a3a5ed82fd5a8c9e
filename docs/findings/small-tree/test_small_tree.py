"""The accepted path of a tree with fewer nodes than num_steps + 1 moves to the front."""

import unittest

import torch

from sglang.srt.speculative.eagle_worker_common import _compact_accept_to_front
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")


class TestCompactAcceptToFront(unittest.TestCase):
    def _assert_path_in_front(self, num_draft_tokens, accept_index):
        """accept_index: the accepted nodes of each request, then -1."""
        bs = len(accept_index)
        for shape in ((), (3,)):  # of a predicted token, of a hidden state
            with self.subTest(shape=shape):
                x = torch.arange(bs * num_draft_tokens).view(-1, *[1] * len(shape))
                x = x.expand(-1, *shape) if shape else x.flatten()
                try:
                    out = _compact_accept_to_front(
                        x,
                        torch.tensor(accept_index, dtype=torch.int32),
                        bs,
                        num_draft_tokens=num_draft_tokens,
                    )
                except RuntimeError as error:
                    self.fail(f"the worker ends at its first verify: {error}")
                blocks = out.view(bs, num_draft_tokens, *shape)
                for block, nodes in zip(blocks, accept_index):
                    path = [node for node in nodes if node >= 0]
                    self.assertTrue(torch.equal(block[: len(path)], x[path]))

    def test_tree_of_two_nodes_and_two_steps(self):
        # The root and one child: paths have room for three nodes.
        self._assert_path_in_front(2, [[0, 1, -1]])
        self._assert_path_in_front(2, [[0, -1, -1]])

    def test_batch(self):
        self._assert_path_in_front(3, [[0, 2, -1, -1, -1], [3, 4, 5, -1, -1]])

    def test_tree_with_as_many_nodes_as_its_longest_path(self):
        self._assert_path_in_front(3, [[0, 1, 2], [3, 5, -1]])

    def test_tree_with_more_nodes(self):
        self._assert_path_in_front(6, [[0, 2, 5], [6, 9, -1], [12, -1, -1]])


if __name__ == "__main__":
    unittest.main()
