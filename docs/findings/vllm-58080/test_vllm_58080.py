# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Draft steps past the end of one request keep no other request from drafting."""

from types import SimpleNamespace

import pytest

from vllm.v1.worker.gpu_model_runner import GPUModelRunner

pytestmark = pytest.mark.cpu_test

MAX_MODEL_LEN = 64
NUM_SPEC_TOKENS = 3


def _drafts(longest):
    """Whether the drafter runs in a step whose longest sequence is `longest`."""
    runner = SimpleNamespace(
        speculative_config=SimpleNamespace(use_dflash=lambda: False),
        num_spec_tokens=NUM_SPEC_TOKENS,
        effective_drafter_max_model_len=MAX_MODEL_LEN,
    )
    metadata = SimpleNamespace(max_seq_len=longest)
    return GPUModelRunner._input_fits_in_drafter(runner, metadata)


def test_a_batch_with_a_request_near_the_end_is_drafted_for():
    near = range(MAX_MODEL_LEN - NUM_SPEC_TOKENS + 1, MAX_MODEL_LEN + 1)
    assert [longest for longest in near if not _drafts(longest)] == []


def test_a_sequence_that_the_drafter_has_no_rows_for_is_not():
    assert not _drafts(MAX_MODEL_LEN + 1)
    assert _drafts(MAX_MODEL_LEN - NUM_SPEC_TOKENS)
