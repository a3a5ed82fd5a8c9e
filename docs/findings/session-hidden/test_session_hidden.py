"""A session's request gets the state of its last token, even if verify commits more."""

import unittest
from array import array
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch

from sglang.srt.managers.schedule_batch import FINISH_LENGTH, ReqKvInfo
from sglang.srt.managers.scheduler_components import batch_result_processor
from sglang.srt.managers.scheduler_components.batch_result_processor import (
    SchedulerBatchResultProcessor,
)
from sglang.srt.sampling.sampling_mask import SamplingMaskRows
from sglang.srt.session.session_controller import Session
from sglang.srt.session.streaming_session import SessionSlot, StreamingSession
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

BEFORE = 1  # tokens that the request was sent before this step
STRIDE = 4  # rows of verify
PROMPT = array("q", range(3))


def _told(*, committed, sent, streaming):
    """Return a request's hidden state and masks after verify commits these tokens.
    The request ends with `sent` tokens. Row n of verify, and its mask, is n."""
    kv = ReqKvInfo(req_pool_idx=0, kv_allocated_len=len(PROMPT) + BEFORE + 2 * STRIDE)
    req = SimpleNamespace(
        rid="a",
        session=Session(1 << 20, "s", streaming=True) if streaming else None,
        kv=kv,
        origin_input_ids=PROMPT,
        origin_input_ids_unpadded=PROMPT,
        full_untruncated_fill_ids=PROMPT,
        output_ids=array("q", range(BEFORE)),
        finished_len=None,
        finished_reason=None,
        to_finish=None,
        finished=lambda: req.finished_reason is not None,
        detach_kv=lambda: None,
        beam_group=None,
        is_retracted=False,
        time_stats=MagicMock(),
        grammar=None,
        return_logprob=False,
        return_sampling_mask=True,
        sampling_mask_rows=SamplingMaskRows(),
        return_hidden_states="last",
        hidden_states=[[-1.0]],
    )

    def end(_new_accept_len):
        if len(req.output_ids) >= sent:
            req.finished_reason, req.finished_len = FINISH_LENGTH(sent), sent

    req.update_finish_state = end
    sessions = StreamingSession(
        SimpleNamespace(page_size=1, free_kv_row=lambda *_: None)
    )
    if streaming:
        sessions.slots["s"] = SessionSlot(kv=kv)

    def release(req, *_):
        if req.finished():
            sessions.try_cache_finished_req(req)

    processor = MagicMock(enable_overlap=False, enable_overlap_mlx=False)
    own = SchedulerBatchResultProcessor
    processor._append_decode_hidden_states = own._append_decode_hidden_states
    processor._visible_output_len = own._visible_output_len
    processor.add_sampling_mask_return_values = (
        own.add_sampling_mask_return_values.__get__(processor)
    )
    processor.snapshot_auxiliary_output_starts.return_value = None
    processor.get_sampling_mask_finish_reason.return_value = None
    processor._normalize_decode_outputs.return_value = [[7] * committed], None
    processor._handle_finish_state_updated_req = release
    processor.metrics_reporter.forward_ct_decode = 0
    masks = [torch.tensor([n]).int().numpy() for n in range(committed)]
    result = MagicMock(
        copy_done=None,
        auxiliary_host_output=None,
        routed_experts_output=None,
        indexer_topk_output=None,
        speculative_output_stride=STRIDE,
        logits_output=SimpleNamespace(
            hidden_states=torch.arange(float(STRIDE))[:, None],
            next_token_sampling_mask_idx=[masks],
            next_token_sampling_logprobs=[[torch.zeros(1).numpy()] * committed],
            next_token_sampling_mask_status=None,
        ),
    )
    batch = MagicMock(reqs=[req], return_hidden_states=True)
    batch.spec_algorithm.is_none.return_value = False
    with patch.object(batch_result_processor, "get_observability") as observability:
        observability.return_value.enable_metrics = False
        SchedulerBatchResultProcessor.process_batch_result_decode(
            processor, batch, result
        )
    [state] = req.hidden_states
    return state, req.sampling_mask_rows.take().token_ids.tolist()


class TestSessionHidden(unittest.TestCase):
    def test_one_token_after_the_end(self):
        told = _told(committed=2, sent=BEFORE + 1, streaming=True)
        self.assertEqual(told[0], [0.0])

    def test_two_tokens_after_the_end(self):
        told = _told(committed=4, sent=BEFORE + 2, streaming=True)
        self.assertEqual(told[0], [1.0])

    def test_masks_are_those_of_the_tokens_that_are_sent(self):
        told = _told(committed=4, sent=BEFORE + 2, streaming=True)
        self.assertEqual(told[1], [0, 1])

    def test_no_token_after_the_end(self):
        told = _told(committed=3, sent=BEFORE + 3, streaming=True)
        self.assertEqual(told, ([2.0], [0, 1, 2]))

    def test_a_request_that_goes_on(self):
        told = _told(committed=3, sent=BEFORE + 9, streaming=True)
        self.assertEqual(told, ([2.0], [0, 1, 2]))

    def test_a_request_without_a_session(self):
        told = _told(committed=4, sent=BEFORE + 2, streaming=False)
        self.assertEqual(told, ([1.0], [0, 1]))


if __name__ == "__main__":
    unittest.main()
