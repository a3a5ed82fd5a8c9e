"""Each graph of draft extend is captured with the lengths of its own width."""

import unittest
from contextlib import ExitStack
from unittest.mock import MagicMock, patch

import torch

from sglang.srt.speculative import eagle_draft_extend_cuda_graph_runner as module
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

_Runner = module.EAGLEDraftExtendCudaGraphRunner


def _worker():
    worker = MagicMock(seed_dsa_topk_from_draft_extend=False)
    worker.speculative_algorithm.is_standalone.return_value = True
    runner = worker.draft_runner
    runner.device = "cpu"
    runner.graph_shared_output.get_logits_buffer.return_value = torch.zeros(4, 8)
    return worker


def _lengths_while_captured(width):
    """Return extend_seq_lens of a runner of this width, as its capture sees it."""
    seen = []
    mocked = {
        "deployment_attn_dp_size": 1,
        "get_parallel": MagicMock(pp_size=1),
        "get_flags": MagicMock(**{"capture.enable_torch_compile": False}),
        "get_exec": MagicMock(**{"mamba.enable_mamba_extra_buffer": False}),
        "get_spec": MagicMock(),
        "require_gathered_buffer": False,
        "require_mlp_tp_gather": False,
        "require_mlp_sync": False,
        "require_attn_tp_gather": False,
        "get_batch_sizes_to_capture": ([1, 2, 4], []),
        "resolve_num_tokens_per_req": width,
        "resolve_draft_extend_seq_len_fill_value": width,
        "resolve_decode_backend": MagicMock(),
        "DeepEPCudaGraphRunnerAdapter": MagicMock(),
        "model_capture_mode": MagicMock(),
    }
    with ExitStack() as stack:
        for name, value in mocked.items():
            stack.enter_context(patch.object(module, name, return_value=value))
        stack.enter_context(
            patch.object(_Runner, "_cache_loc_dtype", return_value=torch.int64)
        )
        stack.enter_context(
            patch.object(
                _Runner,
                "capture",
                lambda self: seen.extend(self.buffers.extend_seq_lens.tolist()),
            )
        )
        _Runner(_worker(), draft_extend_attn_backend=MagicMock())
    return seen


class TestAdaptiveWidths(unittest.TestCase):
    def test_a_narrow_graph_after_a_wide_one(self):
        self.assertEqual(_lengths_while_captured(3), [3, 3, 3, 3])
        self.assertEqual(_lengths_while_captured(1), [1, 1, 1, 1])


if __name__ == "__main__":
    unittest.main()
