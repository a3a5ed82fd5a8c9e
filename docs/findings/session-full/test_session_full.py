"""A session's request runs on the session's entry of req_to_token, not on a free one."""

import unittest
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

from sglang.srt.managers import scheduler as module
from sglang.srt.managers.scheduler import Scheduler
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="base-a-test-cpu")


class _Considered(Exception):
    """The scheduler reached its waiting requests."""


def _plan(session):
    """Run a scheduler without a free entry on one waiting request."""
    scheduler = MagicMock(spec=Scheduler)
    scheduler.grammar_manager = SimpleNamespace(has_waiting_grammars=lambda: False)
    scheduler.enable_priority_preemption = scheduler.is_hybrid_swa = False
    scheduler.chunked_req = scheduler.min_free_slots_delayer = None
    scheduler.processed_tokens_counter = None
    scheduler.waiting_queue = [SimpleNamespace(session=session)]
    scheduler.tree_cache = SimpleNamespace(session_records=lambda: {"s": object()})
    scheduler.req_to_token_pool = SimpleNamespace(available_size=lambda: 0)
    scheduler.beam_coordinator = SimpleNamespace(pending_member_rows=lambda _batch: 0)
    scheduler.policy = SimpleNamespace(calc_priority=MagicMock(side_effect=_Considered))
    for name in ("get_num_allocatable_reqs", "_runs_on_session_row"):
        if function := getattr(Scheduler, name, None):
            setattr(scheduler, name, function.__get__(scheduler))
    batch = SimpleNamespace(reqs=[], batch_is_full=False, is_empty=lambda: True)
    parallel = SimpleNamespace(pp_max_micro_batch_size=8)
    with patch.object(module, "get_parallel", lambda: parallel):
        Scheduler._get_new_batch_prefill_raw(scheduler, None, batch)


class TestSessionFull(unittest.TestCase):
    def test_a_request_of_a_session_is_considered(self):
        with self.assertRaises(_Considered):
            _plan(SimpleNamespace(session_id="s"))

    def test_a_request_of_a_session_that_keeps_nothing_waits(self):
        _plan(SimpleNamespace(session_id="t"))

    def test_a_request_of_no_session_waits(self):
        _plan(None)


if __name__ == "__main__":
    unittest.main()
