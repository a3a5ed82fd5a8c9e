"""An EAGLE-3 drafter with --speculative-draft-window-size N sees N rows."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # the kernels run on a CPU

import unittest
from types import SimpleNamespace
from unittest.mock import patch

import torch

from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd
from sglang.kernels.ops.speculative.cache_locs import (
    generate_draft_decode_window_kv_indices,
)
from sglang.srt.models import llama_eagle3
from sglang.test.ci.ci_register import register_cpu_ci

register_cpu_ci(est_time=12, suite="base-a-test-cpu")

WINDOW = 4
ROWS = 12
HEAD_DIM = 16


def _drafter():
    """Build the model with this window; its layers and its head do not matter."""
    layer = SimpleNamespace(
        self_attn=SimpleNamespace(attn=SimpleNamespace(sliding_window_size=-1))
    )
    model = torch.nn.Module()
    model.layers = [layer]
    model.embed_tokens = None
    config = SimpleNamespace(
        tie_word_embeddings=True, vocab_size=8, draft_vocab_size=None
    )
    with (
        patch.object(llama_eagle3, "get_parallel"),
        patch.object(llama_eagle3, "get_spec") as spec,
        patch.object(llama_eagle3, "LlamaModel", return_value=model),
        patch.object(llama_eagle3, "LogitsProcessor"),
    ):
        spec.return_value.speculative_draft_window_size = WINDOW
        return llama_eagle3.LlamaForCausalLMEagle3(config)


def _seen_by_extend(window):
    """Count the rows that each row of a prompt attends to: all scores are equal."""
    zeros = torch.zeros(ROWS, 1, HEAD_DIM)
    values = torch.eye(ROWS, HEAD_DIM)[:, None]
    out = torch.empty(ROWS, 1, HEAD_DIM)
    nothing = torch.zeros(0, 1, HEAD_DIM)
    extend_attention_fwd(
        zeros,
        zeros,
        values,
        out,
        nothing,
        nothing,
        torch.tensor([0, ROWS]),
        torch.tensor([0, 0]),
        torch.zeros(0, dtype=torch.int64),
        None,
        True,
        None,
        ROWS,
        1.0,
        1.0,
        sliding_window_size=window,
    )
    return (out[:, 0] > 0).sum(-1).tolist()


def _seen_by_draft_decode(window, num_steps=3):
    """Count the rows that each step of draft decode attends to, after ROWS rows."""
    indices = torch.zeros(num_steps, window * 2, dtype=torch.int64)
    indptr = torch.zeros(num_steps, 2, dtype=torch.int32)
    generate_draft_decode_window_kv_indices[(num_steps, 1, 1)](
        torch.tensor([0]),
        torch.arange(ROWS + num_steps)[None],
        torch.tensor([ROWS]),
        indices,
        indptr,
        torch.tensor([ROWS]),
        ROWS + num_steps,
        indices.shape[1],
        indptr.shape[1],
        1,
        4,
        1,
        1,
        window,
    )
    return indptr[:, 1].tolist()


class TestDraftWindow(unittest.TestCase):
    def test_draft_extend(self):
        layer = _drafter().model.layers[0]
        seen = _seen_by_extend(layer.self_attn.attn.sliding_window_size)
        self.assertEqual(seen, [min(row + 1, WINDOW) for row in range(ROWS)])

    def test_draft_decode(self):
        window = _drafter().get_attention_sliding_window_size()
        self.assertEqual(_seen_by_draft_decode(window), [WINDOW] * 3)


if __name__ == "__main__":
    unittest.main()
