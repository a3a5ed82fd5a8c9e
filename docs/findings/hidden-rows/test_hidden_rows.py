"""return_hidden_states returns the rows of the whole prompt, then one per token."""

import unittest
from types import SimpleNamespace

import torch

from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor,
)
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")


def _request(output_ids=(), hidden_states=()):
    return SimpleNamespace(
        return_hidden_states=True,
        hidden_states=list(hidden_states),
        output_ids=list(output_ids),
        is_retracted=False,
        finished=lambda: False,
    )


def _chunk(req, rows, *, last):
    """Finish a batch of one request; its row n is [n]."""
    SchedulerBatchResultProcessor._append_prefill_hidden_states(
        None,
        req=req,
        logits_output=SimpleNamespace(
            hidden_states=torch.tensor([[float(n)] for n in rows])
        ),
        hidden_state_offset=0,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        extend_input_len=len(rows),
        store=last,
    )


class TestHiddenRows(unittest.TestCase):
    def test_the_first_entry_has_the_rows_of_all_chunks(self):
        req = _request()
        _chunk(req, [0, 1, 2], last=False)
        _chunk(req, [3, 4], last=True)
        self.assertEqual(req.hidden_states, [[[0.0], [1.0], [2.0], [3.0], [4.0]]])

    def test_a_prompt_of_one_chunk(self):
        req = _request()
        _chunk(req, [0, 1], last=True)
        self.assertEqual(req.hidden_states, [[[0.0], [1.0]]])

    def test_a_request_that_comes_back_from_a_retraction_gets_one_row_more(self):
        before = [[[0.0], [1.0]], [2.0]]
        req = _request(output_ids=[5, 6], hidden_states=before)
        _chunk(req, [0, 1, 2, 3], last=True)
        self.assertEqual(req.hidden_states, [*before, [3.0]])


if __name__ == "__main__":
    unittest.main()
