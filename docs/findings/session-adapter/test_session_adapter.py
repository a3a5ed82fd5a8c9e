"""A session's rows are reused only by requests of the adapter that computed them."""

import unittest
from types import SimpleNamespace

from sglang.srt.managers.schedule_batch import ReqKvInfo
from sglang.srt.session.session_controller import Session
from sglang.srt.session.streaming_session import StreamingSession
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")


class TestSessionAdapter(unittest.TestCase):
    def setUp(self):
        self.freed = []
        cache = SimpleNamespace(
            page_size=1,
            free_kv_row=lambda _kv, spans: self.freed.extend(spans),
            unlock=lambda _lock: None,
            req_to_token_pool=SimpleNamespace(free=lambda slot: None),
        )
        self.sessions = StreamingSession(cache)
        self.session = Session(1 << 20, "s", streaming=True)
        first = self._request("one")
        first.kv = ReqKvInfo(req_pool_idx=0, kv_allocated_len=4)
        first.kv.kv_committed_len = 4
        self.sessions.take(first)

    def _request(self, adapter):
        return SimpleNamespace(
            session=self.session, to_finish=None, lora_id=adapter, kv=None, lock=None
        )

    def _match(self, adapter):
        params = SimpleNamespace(req=self._request(adapter), key=range(6))
        return self.sessions.try_match_prefix(params)

    def test_a_request_of_the_same_adapter_continues_after_them(self):
        self.assertEqual(self._match("one").device_prefix_len, 4)

    def test_a_request_of_another_adapter_does_not(self):
        self.assertIsNone(self._match("other"))
        self.assertEqual(self.freed, [(0, 4)])

    def test_a_request_without_one_does_not(self):
        self.assertIsNone(self._match(None))


if __name__ == "__main__":
    unittest.main()
