"""The first stage of a pipeline gets the hidden states that a request asks for."""

import unittest
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch

from sglang.srt.managers.scheduler_pp_mixin import SchedulerPPMixin
from sglang.srt.model_executor.forward_batch_info import PPProxyTensors
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

STATES = torch.arange(6.0).reshape(3, 2)


class _Stage(SchedulerPPMixin):
    def __init__(self, first):
        self.pp_group = SimpleNamespace(is_first_rank=first, is_last_rank=not first)
        self._pp_spec_relay = False
        self.future_map = MagicMock()
        self.tp_worker = MagicMock()
        self.tp_worker.model_runner.sampling_observer = None
        self.device = "cpu"


def _told(*, wanted):
    """Return the first stage's result after the last stage prefilled three rows."""
    batch = MagicMock(return_logprob=False, return_hidden_states=wanted)
    batch.spec_algorithm.is_dspark.return_value = False
    result = MagicMock(
        next_token_ids=torch.tensor([7]),
        accept_lens=None,
        next_draft_input=None,
        extend_input_len_per_req=[3],
    )
    result.logits_output = SimpleNamespace(
        hidden_states=STATES, sampling_mask_output=None, auxiliary_device_output=None
    )
    relayed = _Stage(first=False)._pp_prepare_tensor_dict(result, batch)
    metadata = SimpleNamespace(
        can_run_cuda_graph=False, fpm_timing=None, fwd_batch=None
    )
    return _Stage(first=True)._pp_prep_batch_result(
        batch, metadata, PPProxyTensors(relayed)
    )


class TestPipelineHidden(unittest.TestCase):
    def test_states_that_are_wanted(self):
        told = _told(wanted=True)
        self.assertIsNotNone(told.logits_output)
        self.assertTrue(torch.equal(told.logits_output.hidden_states, STATES))
        self.assertEqual(told.extend_input_len_per_req, [3])

    def test_nothing_is_relayed_that_nobody_wants(self):
        self.assertIsNone(_told(wanted=False).logits_output)


if __name__ == "__main__":
    unittest.main()
