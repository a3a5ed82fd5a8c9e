"""A retracted request is still its session's turn: it has not finished."""

import unittest
from array import array
from types import SimpleNamespace

from sglang.srt.managers.schedule_batch import FINISH_ABORT, ReqKvInfo
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.session.session_controller import Session
from sglang.srt.session.streaming_session import SessionSlot, StreamingSession
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")


class TestSessionRetracted(unittest.TestCase):
    def setUp(self):
        self.session = Session(1 << 20, "s", streaming=True)
        self.session._inflight = True
        freed = []
        cache = SimpleNamespace(
            page_size=1,
            free_kv_row=lambda _kv, spans: freed.extend(spans),
            unlock=lambda _lock: None,
            req_to_token_pool=SimpleNamespace(free=lambda slot: None),
        )
        self.freed = freed
        self.sessions = StreamingSession(cache)
        prompt = array("q", range(3))
        self.req = SimpleNamespace(
            rid="a",
            session=self.session,
            kv=ReqKvInfo(req_pool_idx=0, kv_allocated_len=8),
            origin_input_ids=prompt,
            origin_input_ids_unpadded=prompt,
            full_untruncated_fill_ids=prompt,
            output_ids=array("q", range(2)),
            finished_len=None,
            finished_reason=None,
            to_finish=None,
            retracted_stain=False,
            finished=lambda: False,
            detach_kv=lambda: None,
            release_mm_inputs_on_abort=lambda: None,
        )
        self.sessions.slots["s"] = SessionSlot(kv=self.req.kv)

    def _retract(self):
        self.sessions.try_cache_finished_req(self.req)
        self.req.retracted_stain = True

    def _sessions_given_up(self):
        """The scheduler aborts the request."""
        self.req.cache_request_handle = None
        given_up = []
        cache = SimpleNamespace(finish=lambda *_: None, release_session=given_up.append)
        Scheduler._release_aborted_request(SimpleNamespace(tree_cache=cache), self.req)
        return given_up

    def test_it_is_not_what_the_next_request_goes_on_from(self):
        self._retract()
        self.assertEqual(self.session.req_nodes, {})
        self.assertTrue(self.session._inflight)

    def test_it_keeps_its_session_when_it_is_retracted_again(self):
        self._retract()
        self._retract()
        self.assertIs(self.req.session, self.session)

    def test_its_rows_are_given_up_when_it_is_aborted(self):
        self._retract()
        self.freed.clear()
        self.req.to_finish = FINISH_ABORT()
        self.assertIsNone(self.sessions.find_active_slot(self.req))
        self.assertEqual(self.sessions.slots, {})
        self.assertTrue(self.freed)

    def test_its_rows_are_given_up_when_it_is_aborted_as_it_waits(self):
        self._retract()
        self.req.kv = ReqKvInfo()
        self.assertEqual(self._sessions_given_up(), ["s"])

    def test_one_that_runs_again_has_what_the_session_kept(self):
        self._retract()
        self.assertEqual(self._sessions_given_up(), [])

    def test_one_that_was_never_retracted_leaves_the_session_its_rows(self):
        self.assertEqual(self._sessions_given_up(), [])


if __name__ == "__main__":
    unittest.main()
