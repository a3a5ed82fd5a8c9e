# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""An MTP layer consumes the token of row 0, which shifting has made x[1]."""

import pytest
import torch

from vllm.model_executor.models.mimo_mtp import MiMoMultiTokenPredictorLayer

pytestmark = pytest.mark.cpu_test

SIZE = 4


class _Block(torch.nn.Module):
    """A decoder layer that knows no positions."""

    def forward(self, positions, hidden_states, residual):
        return hidden_states, torch.zeros_like(hidden_states)


def _layer():
    torch.manual_seed(0)
    layer = MiMoMultiTokenPredictorLayer.__new__(MiMoMultiTokenPredictorLayer)
    torch.nn.Module.__init__(layer)
    layer.token_layernorm = layer.hidden_layernorm = torch.nn.Identity()
    layer.final_layernorm = torch.nn.Identity()
    layer.input_proj = torch.nn.Linear(2 * SIZE, SIZE, bias=False)
    layer.mtp_block = _Block()
    return layer


@torch.inference_mode()
def test_row_0_consumes_its_token():
    layer = _layer()
    embeddings, states = torch.randn(2, 3, SIZE)
    positions = torch.arange(3)
    first = layer(embeddings, positions, states)
    later = layer(embeddings, positions + 5, states)
    torch.testing.assert_close(first, later)
