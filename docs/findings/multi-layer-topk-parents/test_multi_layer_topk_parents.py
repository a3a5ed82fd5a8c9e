"""Multi-layer EAGLE builds as many parents as the tree kernel's stride."""

import unittest
from types import SimpleNamespace

import torch

from sglang.srt.speculative.multi_layer_eagle_worker_v2 import (
    MultiLayerEagleDraftWorker,
)
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

BATCH_SIZE = 2


def _make_parents(num_steps, topk):
    """Return the parents that the worker builds from all layers' proposals."""
    worker = SimpleNamespace(
        topk=topk,
        speculative_num_steps=num_steps,
        speculative_num_draft_tokens=num_steps + 1,
    )
    proposals = torch.arange(BATCH_SIZE * num_steps * topk).view(BATCH_SIZE, -1)
    parent_list, _, _ = MultiLayerEagleDraftWorker._draft_forward_organize(
        worker,
        topk_p=torch.rand(proposals.shape, generator=torch.Generator().manual_seed(0)),
        topk_index=proposals,
        hidden_states=torch.zeros(BATCH_SIZE, 4),
    )
    return parent_list


class TestParentsOfMultiLayerTrees(unittest.TestCase):
    def _assert_parents_fit(self, num_steps, topk):
        parent_list = _make_parents(num_steps, topk)
        # On CUDA build_tree_kernel_efficient (kernels/jit/csrc/speculative/tree.cuh)
        # rejects any other width: its kernels use this number as the stride
        # between requests.
        width = topk * (num_steps - 1) + 1
        self.assertEqual(list(parent_list.shape), [BATCH_SIZE, width])
        # The first layer's: the root's parent, then its children.
        first = list(range(-1, topk))[:width]
        for row in parent_list.tolist():
            self.assertEqual(row[: len(first)], first)

    def test_trees_of_three_steps_or_more(self):
        for num_steps in (3, 4, 5):
            for topk in (2, 3, 4):
                with self.subTest(num_steps=num_steps, topk=topk):
                    self._assert_parents_fit(num_steps, topk)

    def test_trees_of_two_steps(self):
        for topk in (2, 3, 4):
            with self.subTest(topk=topk):
                self._assert_parents_fit(2, topk)

    def test_chains(self):
        for num_steps in (2, 3, 4):
            with self.subTest(num_steps=num_steps):
                self._assert_parents_fit(num_steps, 1)


if __name__ == "__main__":
    unittest.main()
