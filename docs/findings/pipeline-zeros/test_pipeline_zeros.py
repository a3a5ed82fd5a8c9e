"""A pipeline's first round, without drafts, samples from the target's distribution."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # the kernel runs on a CPU

import unittest
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch

from sglang.kernels.ops.speculative.spec_tree import sgl_build_tree_kernel_triton
from sglang.srt.managers import scheduler_pp_mixin
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.speculative.eagle_utils import TreeMaskMode
from sglang.srt.speculative.pp_spec_relay import PPSpecRelayInput
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=12, suite="base-a-test-cpu")

BONUS = [7, 5]


def _first_round(topk, steps, nodes):
    """Return tokens and links of the first round's trees, as each stage builds them."""
    relayed = PPSpecRelayInput.degenerate(["a", "b"], torch.tensor(BONUS), nodes)
    config = SimpleNamespace(
        speculative_num_steps=steps,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=nodes,
    )
    with patch.object(scheduler_pp_mixin, "get_spec", lambda: config):
        parents, selected = relayed.topology(
            fallback=lambda: Scheduler._pp_spec_chain_topology(MagicMock(), 2, "cpu")
        )
    lengths = torch.tensor([3, 4])
    mask = torch.ones(int(lengths.sum() + 2 * nodes) * nodes, dtype=torch.bool)
    index, child, sibling = torch.full((3, 2, nodes), -1)
    sgl_build_tree_kernel_triton(
        parents,
        selected,
        lengths,
        mask,
        torch.empty(2 * nodes, dtype=torch.long),
        index,
        child,
        sibling,
        topk,
        steps,
        nodes,
        TreeMaskMode.FULL_MASK,
    )
    return relayed.tokens, child, sibling


def _emitted(tokens, child, sibling, probabilities):
    """Return the distribution of the token after the root, by the kernel's loop.

    tree_speculative_sampling_target_only accepts a child if the coin is below the
    probabilities of itself and its elder siblings. After a rejection it samples from
    the probabilities of the other tokens.
    """
    emitted, mass, left = torch.zeros_like(probabilities), 0.0, probabilities.clone()
    node = int(child[0])
    while node != -1:
        token = int(tokens[node])
        own = min(float(probabilities[token]), 1.0 - mass)
        mass += own
        emitted[token] += own
        left[token] = 0.0
        node = int(sibling[node])
    if left.sum():
        emitted += left / left.sum() * (1.0 - mass)
    return emitted


class TestFirstRound(unittest.TestCase):
    def _assert_distribution(self, topk, steps, nodes):
        probabilities = torch.tensor([0.25, 0.125, 0.125, 0.5], dtype=torch.float64)
        for row in zip(*_first_round(topk, steps, nodes)):
            emitted = _emitted(*row, probabilities)
            self.assertEqual(emitted.tolist(), probabilities.tolist())

    def test_a_chain(self):
        self._assert_distribution(topk=1, steps=3, nodes=4)

    def test_a_tree_of_one_step(self):
        self._assert_distribution(topk=2, steps=1, nodes=3)

    def test_a_tree_of_several_steps(self):
        self._assert_distribution(topk=3, steps=2, nodes=4)

    def test_the_root_is_the_token_of_the_prefill(self):
        tokens, *_ = _first_round(topk=2, steps=2, nodes=4)
        self.assertEqual(tokens[:, 0].tolist(), BONUS)
        self.assertEqual(tokens.dtype, torch.int64)


if __name__ == "__main__":
    unittest.main()
