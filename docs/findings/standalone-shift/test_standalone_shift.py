"""STANDALONE runs its draft model as a plain language model: x[i] at position i."""

import contextlib
import unittest
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch

from sglang.srt.layers.attention import triton_backend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.speculative import eagle_worker_v2
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.standalone_worker_v2 import StandaloneDraftWorker
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

VOCAB_SIZE = 32


class _Model:
    """Stands for the draft's runner: predicts 20 first, then 1 more per forward."""

    def __init__(self, algorithm):
        self.spec_algorithm = algorithm
        self.draft_attention_backend = "triton"
        self.device = "cpu"
        self.sliding_window_size = None
        self.canary_manager = None
        self.kv_index_translator = MagicMock(is_translating=False)
        self.token_to_kv_pool = MagicMock()
        self.req_to_token_pool = SimpleNamespace(
            size=4, req_to_token=torch.zeros(5, 64, dtype=torch.int32)
        )
        self.model_config = MagicMock(model_is_mrope=False)
        self.model_config.get_max_num_attention_heads.return_value = 1
        self.forwards = []

    def forward(self, batch):
        tokens, positions, slots = (
            x.tolist() for x in (batch.input_ids, batch.positions, batch.out_cache_loc)
        )
        self.forwards.append((tokens, positions, slots))
        logits = torch.zeros(len(tokens), VOCAB_SIZE)
        says = 19 + len(self.forwards)
        # The second-best tokens make a tree's branches.
        logits[:, says : says + 4] = torch.tensor([9.0, 5.0, 4.0, 3.0])
        output = SimpleNamespace(next_token_logits=logits, hidden_states=None)
        return SimpleNamespace(logits_output=output)


@contextlib.contextmanager
def _settings(algorithm, topk, num_steps, num_draft_tokens):
    with (
        get_context().override_server_args(
            speculative_algorithm=algorithm,
            speculative_eagle_topk=topk,
            speculative_num_steps=num_steps,
            speculative_num_draft_tokens=num_draft_tokens,
            attention_backend="triton",
        ),
        get_parallel().override(attn_tp_size=1),
        patch.multiple(
            triton_backend,
            TritonAttnBackend=MagicMock(),
            resolve_draft_decode_window=MagicMock(return_value=(0, 0)),
        ),
    ):
        yield


def _make_worker(cls, algorithm, topk=1, num_steps=3, num_draft_tokens=4):
    """Build the draft worker with its attention backends and no other part."""
    worker = cls.__new__(cls)
    worker.server_args = None
    worker.speculative_algorithm = SpeculativeAlgorithm.from_string(algorithm)
    worker.topk = topk
    worker.speculative_num_steps = num_steps
    worker.speculative_num_draft_tokens = num_draft_tokens
    worker.device = "cpu"
    worker.plan_stream, worker.plan_stream_ctx = None, contextlib.nullcontext()
    worker.hot_token_id = None
    worker.index_share_for_mtp_iteration = False
    worker.seed_dsa_topk_from_draft_extend = False
    worker.cuda_graph_runner = worker.cuda_graph_runner_for_draft_extend = None
    worker._rebuild_topk1_chain_buffers()
    worker.draft_runner = _Model(worker.speculative_algorithm)
    with patch.multiple(
        eagle_worker_v2,
        parse_qsa_profile=MagicMock(return_value=None),
        _qsa_index_share_requested=MagicMock(return_value=False),
    ):
        worker.init_attention_backend()
    return worker


class TestStandaloneDraftRows(unittest.TestCase):
    def _prefill_inputs(self, cls, algorithm):
        """Return the tokens of the rows that a prefill of two prompts writes."""
        batch = MagicMock(
            forward_mode=ForwardMode.EXTEND,
            input_ids=torch.tensor([7, 19, 3, 5, 11]),
            extend_lens=[3, 2],
            chunked_req_next_prompt_token=None,
        )
        with (
            _settings(algorithm, 1, 3, 4),
            patch.object(eagle_worker_v2, "ForwardBatch") as forward_batch,
        ):
            worker = _make_worker(cls, algorithm)
            forward_batch.init_new.side_effect = lambda batch, *args, **kwargs: (
                SimpleNamespace(
                    input_ids=batch.input_ids,
                    positions=torch.tensor([0, 1, 2, 0, 1]),
                    out_cache_loc=torch.arange(5),
                )
            )
            worker._draft_extend_for_prefill(batch, None, torch.tensor([21, 22]))
        return worker.draft_runner.forwards[0][0]

    def _extend_inputs(self, cls, algorithm):
        """Return the tokens of the rows after verify: 21 is the root, 15 was accepted."""
        batch = MagicMock(
            seq_lens=torch.tensor([3]),
            spec_info=SimpleNamespace(draft_token=torch.tensor([21, 15, 9, 8])),
        )
        result = SimpleNamespace(
            prepared_draft_extend_inputs=None,
            accept_lens=torch.tensor([2]),
            next_token_ids=torch.tensor([15, 53, 1, 2]),  # 53 is the new bonus token
            new_seq_lens=torch.tensor([5]),
            logits_output=SimpleNamespace(hidden_states=None),
            next_draft_input=SimpleNamespace(),
        )
        with (
            _settings(algorithm, 1, 3, 4),
            patch.object(
                eagle_worker_v2,
                "prepare_for_draft_extend",
                side_effect=lambda extend, batch, tokens, *args, **kwargs: (
                    SimpleNamespace(
                        input_ids=tokens,
                        positions=torch.arange(3, 7),
                        out_cache_loc=torch.arange(4),
                    )
                ),
            ),
        ):
            worker = _make_worker(cls, algorithm)
            worker._draft_extend_for_decode(batch, result)
        return worker.draft_runner.forwards[0][0][:2]

    def _draft(self, cls, algorithm, topk, num_steps, num_draft_tokens):
        """Draft after the bonus token 53 at position 5; return inputs and proposals."""
        spec_info = SimpleNamespace(
            topk_p=torch.full((1, topk), 0.5),
            topk_index=torch.arange(1, topk + 1).unsqueeze(0),
            hidden_states=None,
            bonus_tokens=torch.tensor([53]),
        )
        forward_batch = MagicMock(
            forward_mode=ForwardMode.DECODE,
            batch_size=1,
            spec_info=spec_info,
            positions=torch.full((topk,), 5),
            out_cache_loc=torch.arange(100, 100 + topk * num_steps),
            sampling_info=SimpleNamespace(is_all_greedy=True),
        )
        with _settings(algorithm, topk, num_steps, num_draft_tokens):
            worker = _make_worker(cls, algorithm, topk, num_steps, num_draft_tokens)
            proposed = worker.draft_forward(forward_batch)[2]
        return worker.draft_runner.forwards, proposed.flatten().tolist()

    def test_prefill_consumes_the_prompts(self):
        self.assertEqual(
            self._prefill_inputs(StandaloneDraftWorker, "STANDALONE"),
            [7, 19, 3, 5, 11],
        )

    def test_extend_consumes_the_root_and_what_was_accepted(self):
        self.assertEqual(
            self._extend_inputs(StandaloneDraftWorker, "STANDALONE"), [21, 15]
        )

    def test_chain_begins_with_the_bonus_token(self):
        forwards, proposed = self._draft(StandaloneDraftWorker, "STANDALONE", 1, 3, 4)
        self.assertEqual(
            forwards,
            [([53], [5], [100]), ([20], [6], [101]), ([21], [7], [102])],
        )
        self.assertEqual(proposed, [20, 21, 22])

    def test_one_step_is_a_forward_of_the_bonus_token(self):
        forwards, proposed = self._draft(StandaloneDraftWorker, "STANDALONE", 1, 1, 2)
        self.assertEqual(forwards, [([53], [5], [100])])
        self.assertEqual(proposed, [20])

    def test_each_branch_of_a_tree_begins_with_the_bonus_token(self):
        forwards, proposed = self._draft(StandaloneDraftWorker, "STANDALONE", 2, 2, 3)
        self.assertEqual(
            forwards,
            [([53, 53], [5, 5], [100, 102]), ([20, 21], [6, 6], [101, 103])],
        )
        self.assertEqual(proposed[0], 20)

    def test_an_eagle_head_looks_one_token_ahead(self):
        self.assertEqual(
            self._prefill_inputs(EagleDraftWorker, "EAGLE"), [19, 3, 21, 11, 22]
        )
        self.assertEqual(self._extend_inputs(EagleDraftWorker, "EAGLE"), [15, 53])
        forwards, proposed = self._draft(EagleDraftWorker, "EAGLE", 1, 3, 4)
        self.assertEqual(forwards, [([1], [5], [100]), ([20], [6], [101])])
        self.assertEqual(proposed, [1, 20, 21])


if __name__ == "__main__":
    unittest.main()
