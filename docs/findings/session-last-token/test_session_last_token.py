"""The next request of a streaming session reuses only rows that a forward computed."""

import unittest
from array import array
from types import SimpleNamespace

from sglang.srt.managers.schedule_batch import FINISH_LENGTH, ReqKvInfo
from sglang.srt.session.session_controller import Session
from sglang.srt.session.streaming_session import SessionSlot, StreamingSession
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

PROMPT, ANSWER, NEXT = [3, 1, 4], [1, 5], [9]


def _request(session, kv, prompt, answer=()):
    prompt = array("q", prompt)
    return SimpleNamespace(
        rid="a",
        session=session,
        kv=kv,
        to_finish=None,
        origin_input_ids=prompt,
        origin_input_ids_unpadded=prompt,
        full_untruncated_fill_ids=prompt,
        output_ids=array("q", answer),
        finished_len=len(answer),
        finished_reason=FINISH_LENGTH(len(answer)),
        finished=lambda: True,
        detach_kv=lambda: None,
    )


class _Server:
    """A session whose first request has finished, and the rows of its KV cache."""

    def __init__(self, reserved):
        """reserved: slots that decode allocated beyond the rows it computed."""
        # A forward computes the rows of the prompt and of each token that a decode
        # consumes. No forward consumes the last token.
        self.rows = [*PROMPT, *ANSWER[:-1], *[None] * reserved]
        kv = ReqKvInfo(req_pool_idx=0, kv_allocated_len=len(self.rows))
        cache = SimpleNamespace(page_size=1, free_kv_row=lambda *_: None)
        self.session = Session(1 << 20, "s", streaming=True)
        self.sessions = StreamingSession(cache)
        self.sessions.slots["s"] = SessionSlot(kv=kv)
        first = _request(self.session, kv, PROMPT, ANSWER)
        self.sessions.try_cache_finished_req(first)

    def reused(self):
        """Return the rows that the next request does not compute, and their text."""
        text = [*PROMPT, *ANSWER, *NEXT]
        req = _request(self.session, None, text)
        params = SimpleNamespace(req=req, key=text[:-1])
        length = self.sessions.try_match_prefix(params).device_prefix_len
        return self.rows[:length], text[:length]


class TestSessionLastToken(unittest.TestCase):
    def test_slots_that_are_reserved_for_further_rounds_are_not_reused(self):
        rows, text = _Server(reserved=8).reused()
        self.assertEqual(rows, text)

    def test_a_slot_that_the_overlap_scheduler_reserved_is_not_reused(self):
        rows, text = _Server(reserved=1).reused()
        self.assertEqual(rows, text)

    def test_all_computed_rows_are_reused(self):
        rows, text = _Server(reserved=0).reused()
        self.assertEqual(rows, text)
        self.assertEqual(rows, [*PROMPT, *ANSWER[:-1]])


if __name__ == "__main__":
    unittest.main()
