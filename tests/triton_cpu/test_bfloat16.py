"""bfloat16, which numpy lacks and the stock interpreter does not compute with: what the runtime makes of it is torch's."""

from typing import Any

import numpy as np
import pytest
import torch

from eagletwin.harness.engines import triton_cpu
from eagletwin.harness.engines.triton_cpu.dtypes import narrowed, widened

from . import kernels as K

BF16 = torch.bfloat16


def test_rounding_is_to_nearest_even_as_torchs() -> None:
    bits = np.random.default_rng(0).integers(0, 2**32, 200_000, dtype=np.uint32)
    edges = [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F7FFFFF, 1, 0x3F808000, 0x3F818000, 0x3F808001, 0x7F800001]
    values = np.concatenate([bits, np.array(edges, np.uint32)]).view(np.float32)
    theirs = torch.from_numpy(values).to(BF16).float().numpy()
    assert np.array_equal(widened(narrowed(values)), theirs, equal_nan=True)


def test_all_numbers_of_bfloat16_are_read_and_kept() -> None:
    every = np.arange(2**16, dtype=np.uint16)
    wide = torch.from_numpy(every.view(np.int16)).view(BF16).float().numpy()
    assert np.array_equal(widened(every), wide, equal_nan=True)
    numbers = ~np.isnan(wide)
    assert np.array_equal(narrowed(wide)[numbers], every[numbers])


def test_operators_round_as_torchs_do() -> None:
    n = 16
    torch.manual_seed(0)
    a, b, f = torch.randn(n).to(BF16), torch.randn(n).to(BF16), torch.randn(n)
    narrow, wide = torch.zeros(5, n, dtype=BF16), torch.zeros(5, n)
    with triton_cpu.installed():
        K.brain_ops[(1,)](a, b, f, narrow, wide, 12, N=n)
    assert triton_cpu.fallbacks() == {}
    x = torch.where(torch.arange(n) < 12, a, torch.tensor(0.3).to(BF16))
    chosen = torch.where(torch.arange(n) < 3, x, b)
    assert torch.equal(narrow, torch.stack([x * b, x + b, torch.tensor(0.1).to(BF16) - x, f.to(BF16), chosen * 3]))
    products = (x[:, None] * b[None, :]).float().sum(1)
    squares = (b[:, None] * b[None, :]).float().T
    dots = (x.float()[:, None].expand(n, n) @ squares).sum(1)
    expected = torch.stack([x.float() * f, x.float() / b.float(), products, f.to(BF16).float() - f, dots])
    assert torch.allclose(wide, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("checks", [triton_cpu.Checks(), triton_cpu.Checks(shadow=True)])
def test_what_it_cannot_do_is_an_error_and_never_the_stock_interpreters(checks: Any) -> None:
    with triton_cpu.installed(checks), pytest.raises(triton_cpu.KernelError, match="bfloat16"):
        K.brain_sine[(1,)](torch.ones(8, dtype=BF16), torch.ones(8, dtype=BF16), N=8)
    assert triton_cpu.fallbacks() == {}


def test_masked_lanes_are_undefined() -> None:
    out, source = torch.zeros(1), torch.ones(4, dtype=BF16)
    with triton_cpu.installed():
        K.sum_undefined[(1,)](source, out, 3, BLOCK=4)
    assert out.isnan().item()


def test_a_store_outside_the_tensor_is_seen() -> None:
    with triton_cpu.installed(), pytest.raises(triton_cpu.OutOfBounds):
        K.double[(1,)](torch.ones(8, dtype=BF16), torch.zeros(4, dtype=BF16), N=8)


def test_attention_is_as_exact_as_its_roundings() -> None:
    """SGLang's kernels, in groups of programs and one by one: the same bits, and off by a few roundings of 2**-8."""
    pytest.importorskip("sglang")
    from sglang.kernels.ops.attention import decode_attention, extend_attention

    torch.manual_seed(1)
    heads, groups, width = 4, 2, 16
    q, k, v = (torch.randn(8, n, width).to(BF16) for n in (heads, groups, groups))
    keys, values = (torch.randn(64, groups, width).to(BF16) for _ in range(2))
    slots, ends = torch.randperm(60)[:35], torch.tensor([0, 30, 35], dtype=torch.int32)
    starts = torch.tensor([0, 4, 8], dtype=torch.int32)

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """query [N, D]; key, value [T, G, D] -> [N, D]."""
        key, value = (part.double().repeat_interleave(heads // groups, 1) for part in (key, value))
        weight = torch.einsum("nd,tnd->nt", query.double(), key).mul(0.25).softmax(-1)
        return torch.einsum("nt,tnd->nd", weight, value)

    def extended() -> torch.Tensor:
        out = torch.zeros_like(q)
        args = (q, k, v, out, keys, values, starts, ends, slots, None, True, None, 4, 1.0, 1.0)
        extend_attention.extend_attention_fwd(*args, sm_scale=0.25)
        return out

    def decoded() -> torch.Tensor:
        out, partial, sums = torch.zeros(2, heads, width, dtype=BF16), torch.zeros(2, heads, 1, width), torch.zeros(2, heads, 1)
        counts = torch.ones(2, dtype=torch.int32)
        args = (q[:2], keys, values, out, ends, slots, partial, sums, counts, 1, 0.25, 1.0, 1.0)
        decode_attention.decode_attention_fwd(*args)
        return out

    with triton_cpu.installed():
        rows, ones = extended(), decoded()
    with triton_cpu.installed(triton_cpu.Checks(races=True)):  # one by one
        assert torch.equal(rows, extended()) and torch.equal(ones, decoded())
    assert triton_cpu.fallbacks() == {}
    for row in range(8):
        one, _ = divmod(row, 4)
        mine = slots[int(ends[one]) : int(ends[one + 1])]
        fresh = slice(one * 4, row + 1)
        expected = attend(q[row], torch.cat([keys[mine], k[fresh]]), torch.cat([values[mine], v[fresh]]))
        assert (rows[row] - expected).abs().max() < 4 * 2**-8 * expected.abs().max()
    for row in range(2):
        mine = slots[int(ends[row]) : int(ends[row + 1])]
        expected = attend(q[row], keys[mine], values[mine])
        assert (ones[row] - expected).abs().max() < 4 * 2**-8 * expected.abs().max()
