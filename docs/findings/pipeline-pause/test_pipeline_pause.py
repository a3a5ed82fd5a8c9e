"""A pipeline that is paused runs no batch."""

import unittest
from types import SimpleNamespace

from sglang.srt.managers.scheduler_pp_mixin import SchedulerPPMixin
from sglang.srt.runtime_context import get_parallel
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=10, suite="base-a-test-cpu")

STAGES = 2
TURNS = 3


class _Over(Exception):
    pass


class _Scheduler(SchedulerPPMixin):
    """The last of two stages, with nothing to run; asked: how often it wanted a batch."""

    def __init__(self, paused):
        self._engine_paused = paused
        self.pp_group = SimpleNamespace(is_first_rank=False, is_last_rank=True)
        self.left = STAGES * TURNS
        self.asked = 0

    def init_pp_loop_state(self):
        self.pp_loop_size = STAGES
        self.mbs = [None] * STAGES
        self.last_mbs = [None] * STAGES
        self.running_mbs = [None] * STAGES
        self.mb_metadata = [None] * STAGES

    def ingest_requests(self):
        if not self.left:
            raise _Over
        self.left -= 1
        return []

    def get_next_batch_to_run(self, running_batch, last_batch):
        self.asked += 1
        return SimpleNamespace(running_batch=running_batch, batch_to_run=None)

    def _pp_commit_send_output_work_and_preprocess_output_tensors(self, *args):
        return None, None, None

    def _pp_commit_proxy_send_work(self):
        pass

    def on_idle(self):
        pass


def _asked(paused):
    scheduler = _Scheduler(paused)
    with get_parallel().override(pp_size=STAGES, pp_async_batch_depth=0):
        try:
            scheduler.event_loop_pp()
        except _Over:
            pass
    return scheduler.asked


class TestPipelinePause(unittest.TestCase):
    def test_no_batch_is_asked_for_in_a_pause(self):
        self.assertEqual(_asked(paused=True), 0)

    def test_one_is_asked_for_in_each_turn_otherwise(self):
        self.assertEqual(_asked(paused=False), STAGES * TURNS)


if __name__ == "__main__":
    unittest.main()
