# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""The Triton kernel cuts rows by top_p alone, however widely their logits spread."""

import os

os.environ["TRITON_INTERPRET"] = "1"  # kernels run on a CPU
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
import torch

from vllm.triton_utils import triton
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch
from vllm.v1.sample.ops.topk_topp_triton import apply_top_k_top_p_triton

pytestmark = pytest.mark.cpu_test

VOCAB_SIZE = 300  # two blocks of the kernel on a CPU
TOP_P = 0.5


class Row(int):
    """The interpreter counts rows in ints, and the kernel casts them."""

    def to(self, dtype):
        return self


triton.runtime.interpreter.range = lambda *bounds: map(Row, range(*bounds))


def _kept(spread):
    """Of a row of this standard deviation: tokens that kernel and PyTorch keep."""
    torch.manual_seed(0)
    logits, top_p = torch.randn(1, VOCAB_SIZE) * spread, torch.tensor([TOP_P])
    by_kernel = apply_top_k_top_p_triton(logits.clone(), None, top_p)
    by_torch = apply_top_k_top_p_pytorch(logits.clone(), None, top_p)
    return [(rows > -float("inf")).sum(-1).tolist() for rows in (by_kernel, by_torch)]


def test_a_row_is_cut():
    by_kernel, by_torch = _kept(spread=3.0)
    assert by_kernel == by_torch


def test_a_row_of_a_wide_spread_is_cut():
    # As of logits of deviation 3 and temperature 0.1.
    by_kernel, by_torch = _kept(spread=30.0)
    assert by_kernel == by_torch
