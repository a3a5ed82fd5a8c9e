"""The reference as if it computed in bfloat16: its own forwards in float64, with every number rounded that an engine stores.

An experiment that knows no engine: how far off is such arithmetic? Rounded are the results of linear layers, norms, RoPE and
its sines, attention's weights and its output, activations and sums. Sums of products are not: kernels keep those in float32.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from eagletwin.harness.deserved.precision import Rounding
from eagletwin.reference import draft_heads, layers, llama
from eagletwin.reference.layers import frequencies
from eagletwin.reference.sizes import RopeScaling

_norm = layers.rms_norm


@contextlib.contextmanager
def bfloat16_arithmetic() -> Iterator[None]:
    """While active, the reference's forwards round as an engine does."""
    mode = Rounding(torch.bfloat16)

    def whole(function: Any, *args: Any) -> Tensor:
        """A function whose inside is float32's, and its result bfloat16's."""
        mode.on = False
        try:
            return mode.nearest(function(*args))
        finally:
            mode.on = True

    def rounded_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return whole(_norm, x, weight, eps)

    def turn(x: Tensor, positions: Tensor, theta: float, scaling: RopeScaling | None) -> Tensor:
        """RoPE with sines and cosines rounded, and each product."""
        mode.on = False
        half = x.shape[-1] // 2
        angle = positions.double()[:, None] * frequencies(half, theta, scaling)
        cos, sin = mode.nearest(angle.cos())[:, None], mode.nearest(angle.sin())[:, None]
        mode.on = True
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    with contextlib.ExitStack() as stack:
        for module in (llama, draft_heads, draft_heads):
            stack.enter_context(mock.patch.object(module, "rms_norm", rounded_norm))
        stack.enter_context(mock.patch.object(llama, "rotate", turn))
        stack.enter_context(mode)
        yield
