"""In a prefill graph a draft's body reads the input that its wrapper passes."""

import unittest
from contextlib import ExitStack, nullcontext
from types import SimpleNamespace
from unittest.mock import MagicMock, patch

import torch
from torch import nn

from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.cuda_graph_config import (
    Backend,
    CudaGraphConfig,
    PhaseConfig,
)
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.runner import prefill_cuda_graph_runner
from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import (
    PrefillCudaGraphRunner,
)
from sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend import (
    BreakableCudaGraphBackend,
)
from sglang.srt.models.llama_eagle import LlamaForCausalLMEagle
from sglang.srt.models.qwen3_next_mtp import Qwen3NextForCausalLMMTP
from sglang.srt.runtime_context import get_context, get_parallel
from sglang.srt.speculative.eagle_info import EagleDraftExtendInput
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=15, suite="base-a-test-cpu")

HIDDEN_SIZE, VOCAB_SIZE, BUCKET = 4, 32, 8


class _Graphs(BreakableCudaGraphBackend):
    """Stands for CUDA graphs: a replay runs the captured function on its buffers."""

    def __init__(self, runner):
        self._model = runner.model_runner.model
        self._captured = {}

    def capture_one(self, shape_key, forward_fn, **kwargs):
        self._captured[shape_key] = self._model.model.forward, forward_fn

    def replay_session(self):
        return nullcontext()

    def replay(self, shape_key, static_forward_batch, **kwargs):
        # The runner has replaced the body's forward by its replay.
        body_forward, forward_fn = self._captured[shape_key]
        with patch.object(self._model.model, "forward", body_forward):
            return forward_fn()


class _Body(nn.Module):
    """Stands for the transformer of a draft."""

    def __init__(self):
        super().__init__()
        self.embed_tokens = nn.Embedding(VOCAB_SIZE, HIDDEN_SIZE)
        self.layers = nn.ModuleList([nn.Linear(HIDDEN_SIZE, HIDDEN_SIZE)])
        self.fc = nn.Linear(2 * HIDDEN_SIZE, HIDDEN_SIZE)


class _Qwen3NextBody(_Body):
    """As Qwen3NextModel: an input that is passed replaces the embeddings."""

    def forward(self, input_ids, positions, forward_batch, inputs_embeds=None):
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        return self.layers[0](inputs_embeds)


class _LlamaEagleBody(_Body):
    """As llama_eagle.LlamaModel, which joins embeddings and hidden states itself."""

    def forward(
        self,
        input_ids,
        positions,
        forward_batch,
        input_embeds=None,
        pp_proxy_tensors=None,
    ):
        if input_embeds is None:
            input_embeds = self.embed_tokens(input_ids)
        states = forward_batch.spec_info.hidden_states
        return self.layers[0](self.fc(torch.cat((input_embeds, states), dim=-1)))


def _make_draft(cls, body):
    """SGLang's own draft model, with another body and without a head."""
    draft = cls.__new__(cls)
    nn.Module.__init__(draft)
    draft.model = body
    draft.fc = nn.Linear(2 * HIDDEN_SIZE, HIDDEN_SIZE, bias=False)
    draft.pre_fc_norm_embedding = draft.pre_fc_norm_hidden = nn.Identity()
    draft.quant_config = draft.lm_head = draft.shared_experts_config = None
    draft.pp_group = SimpleNamespace(is_last_rank=True)
    draft.capture_aux_hidden_states = False
    draft.logits_processor = lambda input_ids, hidden_states, *args: (
        LogitsProcessorOutput(next_token_logits=None, hidden_states=hidden_states)
    )
    return draft


def _make_runner(draft):
    model_runner = MagicMock(
        device="cpu",
        dtype=torch.float32,
        model=draft,
        is_draft_worker=True,
        spec_algorithm=SpeculativeAlgorithm.EAGLE,
        lora_manager=None,
        graph_shared_output=None,
        ngram_embedding_manager=SimpleNamespace(enabled=False),
        attn_tp_sequence_sharded=lambda num_tokens: False,
        prepare_dummy_forward_batch=lambda forward_batch: forward_batch,
    )
    attn_backend = model_runner.attn_backend
    attn_backend.dllm_attention = None
    attn_backend.prefill_cuda_graph_default_max_seq_len = None
    attn_backend.use_captured_forward_metadata_for_breakable_cuda_graph = False
    model_runner.model_config.is_multimodal = False
    model_runner.model_config.hidden_size = HIDDEN_SIZE
    model_runner.model_config.spec_hidden_size = HIDDEN_SIZE
    model_runner.model_config.context_len = 64
    model_runner.req_to_token_pool.size = 2
    model_runner.req_to_token_pool.req_to_token = torch.zeros(3, 64)
    model_runner.req_to_token_pool.mamba_pool = None
    return PrefillCudaGraphRunner(model_runner)


def _make_batch(num_tokens):
    """Build the prefill of one request, as the worker passes it to the draft."""
    return ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=torch.randint(1, VOCAB_SIZE, (num_tokens,)),
        req_pool_indices=torch.tensor([1]),
        seq_lens=torch.tensor([num_tokens]),
        seq_lens_cpu=torch.tensor([num_tokens]),
        seq_lens_sum=num_tokens,
        out_cache_loc=torch.arange(1, num_tokens + 1),
        positions=torch.arange(num_tokens),
        extend_num_tokens=num_tokens,
        extend_seq_lens=torch.tensor([num_tokens]),
        extend_seq_lens_cpu=[num_tokens],
        extend_prefix_lens=torch.tensor([0]),
        extend_prefix_lens_cpu=[0],
        extend_start_loc=torch.tensor([0]),
        extend_logprob_start_lens_cpu=[0],
        capture_hidden_mode=CaptureHiddenMode.LAST,
        kv_loc_plan=MagicMock(),
        spec_info=EagleDraftExtendInput(
            hidden_states=torch.randn(num_tokens, HIDDEN_SIZE)
        ),
    )


class TestDraftInAGraphOfPrefill(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)
        config = PhaseConfig(backend=Backend.BREAKABLE, bs=[BUCKET])
        with ExitStack() as stack:
            for one in (
                get_context().override_server_args(
                    device="cpu",
                    speculative_algorithm="EAGLE",
                    cuda_graph_config=CudaGraphConfig(prefill=config),
                ),
                get_parallel().override(
                    tp_size=1, attn_tp_size=1, tp_group=MagicMock()
                ),
                patch.object(
                    prefill_cuda_graph_runner, "resolve_prefill_backend", _Graphs
                ),
                patch.object(PrefillCudaGraphRunner, "capture"),  # needs a stream
            ):
                stack.enter_context(one)
            self.addCleanup(stack.pop_all().close)

    def _assert_as_without_a_graph(self, draft):
        runner = _make_runner(draft)
        runner.capture_one_shape(BUCKET)
        # One after the other: a prefill must not see values of the one before.
        for num_tokens in (BUCKET, 5, 6):
            forward_batch = _make_batch(num_tokens)
            expected = draft.forward(
                forward_batch.input_ids, forward_batch.positions, forward_batch
            ).hidden_states
            actual = runner.execute(forward_batch).hidden_states
            torch.testing.assert_close(actual, expected)

    def test_wrapper_that_joins_embeddings_and_hidden_states(self):
        self._assert_as_without_a_graph(
            _make_draft(Qwen3NextForCausalLMMTP, _Qwen3NextBody())
        )

    def test_wrapper_that_hands_nothing_over(self):
        self._assert_as_without_a_graph(
            _make_draft(LlamaForCausalLMEagle, _LlamaEagleBody())
        )


if __name__ == "__main__":
    unittest.main()
