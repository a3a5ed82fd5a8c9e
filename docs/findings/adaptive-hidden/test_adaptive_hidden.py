"""Adaptive steps capture the target's graphs before the draft's, as at start-up."""

import unittest
from functools import partial
from unittest.mock import MagicMock, patch

from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner import DecodeCudaGraphRunner
from sglang.srt.runtime_context import get_context, get_spec
from sglang.srt.speculative import eagle_worker_v2
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker, EAGLEWorkerV2
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=12, suite="base-a-test-cpu")

AT_STARTUP, ADAPTIVE = 3, 2  # numbers of draft steps


class TestOrderOfCaptures(unittest.TestCase):
    """All CUDA graphs share one memory pool: a graph's output may share memory with a
    graph that was captured before it, whose replay overwrites the output."""

    def setUp(self):
        self.events = []  # what was done, and the number of steps it was done for
        self.draft = self._make_draft_worker()
        self.target = MagicMock(spec=ModelRunner, init_new_workspace=False)
        self.target._get_attention_backend.return_value = "target backend"
        self.worker = self._make_worker()

    def _did(self, what):
        steps = self.draft.speculative_num_steps
        self.assertEqual(get_spec().speculative_num_steps, steps)
        self.events.append((what, steps))

    def _make_draft_worker(self):
        draft = MagicMock(spec=EagleDraftWorker)
        draft.speculative_num_steps = AT_STARTUP
        draft.speculative_num_draft_tokens = AT_STARTUP + 1
        draft.draft_runner = MagicMock()
        draft.draft_attn_backend = draft.draft_extend_attn_backend = "at start-up"
        draft.cuda_graph_runner = "at start-up"
        draft.cuda_graph_runner_for_draft_extend = "at start-up"

        def init_attention_backend():
            self._did("draft backends")
            draft.draft_attn_backend = "decode backend"
            draft.draft_extend_attn_backend = "extend backend"

        def capture_cuda_graphs():
            self._did("draft graphs")
            draft.cuda_graph_runner = "decode graphs"
            draft.cuda_graph_runner_for_draft_extend = "extend graphs"

        draft.init_attention_backend.side_effect = init_attention_backend
        draft._capture_cuda_graphs.side_effect = capture_cuda_graphs
        return draft

    def _make_worker(self):
        worker = MagicMock(spec=EAGLEWorkerV2, device="cpu", gpu_id=0)
        worker.speculative_num_steps = AT_STARTUP
        worker.speculative_num_draft_tokens = AT_STARTUP + 1
        worker._draft_worker = self.draft
        worker._target_worker = MagicMock(model_runner=self.target)
        worker._additional_graph_memory_usage = {}
        worker._additional_graph_time_usage = {}
        worker._override_worker_state = partial(
            EAGLEWorkerV2._override_worker_state, worker
        )
        return worker

    def _build(self, graphs=True):
        def capture(model_runner, **kwargs):
            self._did("target graphs")
            return "target graphs"

        with (
            get_context().override_server_args(
                speculative_num_steps=AT_STARTUP,
                speculative_num_draft_tokens=AT_STARTUP + 1,
            ),
            patch.object(
                eagle_worker_v2, "check_cuda_graph_backend", return_value=not graphs
            ),
            patch.object(
                eagle_worker_v2,
                "DecodeCudaGraphRunner",
                MagicMock(spec=DecodeCudaGraphRunner, side_effect=capture),
            ),
            patch.object(eagle_worker_v2, "get_available_gpu_memory", return_value=1.0),
        ):
            return EAGLEWorkerV2.build_adaptive_runtime_state(
                self.worker, ADAPTIVE, ADAPTIVE + 1
            )

    def test_the_target_is_captured_before_the_draft(self):
        # Draft extend is replayed between verify and the copy of its hidden states
        # to the host.
        self._build()
        captured = [what for what, _ in self.events if what.endswith("graphs")]
        self.assertEqual(captured, ["target graphs", "draft graphs"])

    def test_all_is_made_for_the_number_of_steps_and_handed_on(self):
        state = self._build()
        self.assertEqual(
            sorted(self.events),
            [
                ("draft backends", ADAPTIVE),
                ("draft graphs", ADAPTIVE),
                ("target graphs", ADAPTIVE),
            ],
        )
        self.assertEqual(state.draft_attn_backend, "decode backend")
        self.assertEqual(state.draft_extend_attn_backend, "extend backend")
        self.assertEqual(state.cuda_graph_runner, "decode graphs")
        self.assertEqual(state.cuda_graph_runner_for_draft_extend, "extend graphs")
        self.assertEqual(state.target_attn_backend, "target backend")
        self.assertEqual(state.target_graph_runner, "target graphs")

    def test_the_draft_has_its_backends_before_its_graphs(self):
        for graphs in (True, False):
            with self.subTest(graphs=graphs):
                self.events.clear()
                self._build(graphs)
                done = [what for what, _ in self.events if what.startswith("draft")]
                self.assertEqual(done, ["draft backends", "draft graphs"])

    def test_the_worker_is_left_as_it_was(self):
        self._build()
        self.assertEqual(self.worker.speculative_num_steps, AT_STARTUP)
        self.assertEqual(self.draft.speculative_num_steps, AT_STARTUP)
        self.assertEqual(self.draft.draft_attn_backend, "at start-up")
        self.assertEqual(self.draft.cuda_graph_runner, "at start-up")


if __name__ == "__main__":
    unittest.main()
