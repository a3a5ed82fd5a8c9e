"""A frozen-KV draft leaves the batch's return_hidden_states as the scheduler set it."""

import unittest
from unittest.mock import MagicMock, patch

import torch

from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.speculative import frozen_kv_mtp_worker_v2 as module
from sglang.srt.speculative.frozen_kv_mtp_info import FrozenKVMTPDraftInput
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")


def _after_a_draft(wanted):
    """Return the batch's return_hidden_states after a draft, and the draft forward's."""
    batch = MagicMock(
        spec_info=FrozenKVMTPDraftInput(),
        forward_mode=ForwardMode.DECODE,
        seq_lens=torch.tensor([5]),
        return_hidden_states=wanted,
    )
    seen = []

    def init_new(batch, _runner, **_):
        seen.append(batch.return_hidden_states)
        return MagicMock(capture_hidden_mode=CaptureHiddenMode.LAST)

    worker = MagicMock(topk=1, speculative_num_steps=3, speculative_num_draft_tokens=4)
    worker.cuda_graph_runner.execute.return_value = (None, None, None)
    with (
        patch.object(module.ForwardBatch, "init_new", init_new),
        patch.object(module, "build_tree_kernel_efficient", lambda *_: (None,) * 6),
    ):
        module.FrozenKVMTPDraftWorker.draft(worker, batch)
    return batch.return_hidden_states, seen


class TestHiddenFrozen(unittest.TestCase):
    def test_a_batch_that_returns_hidden_states(self):
        self.assertEqual(_after_a_draft(True), (True, [False]))

    def test_a_batch_that_returns_none(self):
        self.assertEqual(_after_a_draft(False), (False, [False]))


if __name__ == "__main__":
    unittest.main()
