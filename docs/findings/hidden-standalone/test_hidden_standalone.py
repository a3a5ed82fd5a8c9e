"""STANDALONE captures the target's hidden states if requests ask for them."""

import unittest
from unittest.mock import MagicMock, patch

from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.speculative import eagle_utils
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")


def _prefill_captures(*, asked):
    worker = MagicMock(
        speculative_algorithm=SpeculativeAlgorithm.STANDALONE, _draft_worker=None
    )
    batch = MagicMock(return_hidden_states=asked)
    EAGLEWorkerV2._forward_prefill_batch(worker, batch)
    target = worker.target_worker.forward_batch_generation
    return target.call_args.kwargs["capture_hidden_mode"]


def _verify_captures(*, asked):
    worker = MagicMock()
    worker.model_runner.spec_algorithm = SpeculativeAlgorithm.STANDALONE
    batch = MagicMock(return_hidden_states=asked)
    batch.forward_mode.is_idle.return_value = True
    forward_batch = MagicMock()
    needs = (MagicMock(), CaptureHiddenMode, forward_batch, ForwardMode, MagicMock())
    with patch.object(eagle_utils, "_PREPARE_FOR_VERIFY_DEPS", needs):
        eagle_utils.eagle_prepare_for_verify(MagicMock(), MagicMock(), batch, worker)
    return forward_batch.init_new.call_args.kwargs["capture_hidden_mode"]


class TestHiddenStandalone(unittest.TestCase):
    def test_a_prefill(self):
        self.assertEqual(_prefill_captures(asked=True), CaptureHiddenMode.FULL)
        self.assertEqual(_prefill_captures(asked=False), CaptureHiddenMode.NULL)

    def test_a_verify(self):
        self.assertEqual(_verify_captures(asked=True), CaptureHiddenMode.FULL)
        self.assertEqual(_verify_captures(asked=False), CaptureHiddenMode.NULL)


if __name__ == "__main__":
    unittest.main()
