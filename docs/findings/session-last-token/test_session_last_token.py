"""A streaming session keeps no row of the last token that its request was sent: no forward has consumed it."""

import unittest
from array import array
from types import SimpleNamespace

from sglang.srt.managers.schedule_batch import FINISH_LENGTH, ReqKvInfo
from sglang.srt.session.session_controller import Session
from sglang.srt.session.streaming_session import SessionSlot, StreamingSession
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")

PROMPT, ANSWER, AHEAD = 3, 2, 8


def _kept(allocated):
    """Rows that a session keeps of a finished request with so many slots."""
    session = Session(1 << 20, "s", streaming=True)
    kv = ReqKvInfo(req_pool_idx=0, kv_allocated_len=allocated)
    prompt = array("q", range(PROMPT))
    req = SimpleNamespace(
        rid="a",
        session=session,
        kv=kv,
        origin_input_ids=prompt,
        origin_input_ids_unpadded=prompt,
        full_untruncated_fill_ids=prompt,
        output_ids=array("q", range(ANSWER)),
        finished_len=ANSWER,
        finished_reason=FINISH_LENGTH(ANSWER),
        finished=lambda: True,
        detach_kv=lambda: None,
    )
    cache = SimpleNamespace(page_size=1, free_kv_row=lambda *_: None)
    sessions = StreamingSession(cache)
    sessions.slots["s"] = SessionSlot(kv=kv)
    sessions.try_cache_finished_req(req)
    return kv.kv_committed_len


class TestSessionLastToken(unittest.TestCase):
    def test_slots_for_further_rounds_are_no_rows(self):
        self.assertEqual(_kept(PROMPT + ANSWER + AHEAD), PROMPT + ANSWER - 1)

    def test_without_such_slots_it_is_the_same(self):
        self.assertEqual(_kept(PROMPT + ANSWER - 1), PROMPT + ANSWER - 1)


if __name__ == "__main__":
    unittest.main()
