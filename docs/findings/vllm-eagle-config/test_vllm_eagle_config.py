# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Both model runners read the layers that an EAGLE-3 head names."""

from types import SimpleNamespace

import pytest

from vllm.v1.worker.gpu.spec_decode.eagle.eagle3_utils import (
    get_eagle3_aux_layers_from_config,
)
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

pytestmark = pytest.mark.cpu_test


def _layers(**config):
    """What runners V1 and V2 read of a head's configuration."""
    head = SimpleNamespace(hf_config=SimpleNamespace(**config))
    speculative_config = SimpleNamespace(draft_model_config=head)
    runner = SimpleNamespace(speculative_config=speculative_config)
    return (
        GPUModelRunner._get_eagle3_aux_layers_from_config(runner),
        get_eagle3_aux_layers_from_config(speculative_config),
    )


def test_layers_in_eagle_config():
    named = {"eagle_aux_hidden_state_layer_ids": [1, 23, 45]}
    assert _layers(eagle_config=named) == ((1, 23, 45), (1, 23, 45))


def test_layers_at_the_top_go_first():
    named = {"eagle_aux_hidden_state_layer_ids": [1, 23, 45]}
    layers = _layers(eagle_config=named, eagle_aux_hidden_state_layer_ids=[2, 3, 4])
    assert layers == ((2, 3, 4), (2, 3, 4))


def test_a_head_that_names_none():
    assert _layers() == (None, None)
