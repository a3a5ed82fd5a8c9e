"""SGLang's own EAGLE kernels under every check at once: same results as in the stock interpreter, no race, no
undefined value, nothing out of bounds, no fallback.  Small shapes of the worker's path: topk 1 and 3, page 1 and 4."""

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from eagletwin.harness.engines import triton_cpu


class Later:
    """A module of SGLang, imported by the first test that needs it: where tests are collected, it would be for nothing."""

    def __init__(self, name: str) -> None:
        self._name = f"sglang.kernels.ops.{name}"

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("_"):  # pytest looks for such in all that stands in a module
            raise AttributeError(attribute)
        return getattr(self.load(), attribute)

    def load(self) -> ModuleType:
        return importlib.import_module(self._name)


decode, extend = Later("attention.decode_attention"), Later("attention.extend_attention")
kv_indices, cache_move = Later("attention.kv_indices"), Later("kvcache.cache_move")
cache_locs, eagle, spec_tree = (Later(f"speculative.{name}") for name in ("cache_locs", "eagle", "spec_tree"))

PACKAGES = ("sglang.kernels.ops.attention.", "sglang.kernels.ops.speculative.", "sglang.kernels.ops.kvcache.")
EVERYTHING = triton_cpu.Checks(poison=True, races=True, shadow=True)
H, KV, D = 4, 2, 16


@pytest.fixture(autouse=True)
def checked() -> Iterator[None]:
    pytest.importorskip("sglang.kernels.ops.attention.decode_attention")
    with triton_cpu.installation(EVERYTHING):
        yield
    assert triton_cpu.fallbacks() == {} and triton_cpu.faults() == []


def indptr(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def pool() -> tuple[torch.Tensor, torch.Tensor]:
    shape = (64, KV, D)
    return torch.randn(shape), torch.randn(shape)


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("masked", [False, True])
def test_extend_attention(page: int, masked: bool) -> None:
    prefix, new = [30, 5], [4, 4]
    q, k, v = (torch.randn(sum(new), heads, D) for heads in (H, KV, KV))
    keys, values = pool()
    slots = torch.randperm(60)[: sum(prefix)]
    mask = (torch.rand(sum(n * (p + n) for p, n in zip(prefix, new, strict=True))) > 0.3) if masked else None
    starts = torch.tensor([0, 4 * 34]) if masked else None
    out = torch.empty_like(q)
    heads: dict[str, Any] = {"sm_scale": 0.3, "page_size": page}
    extend.extend_attention_fwd(
        *(q, k, v, out, keys, values, indptr(new), indptr(prefix), slots, mask, True, starts, max(new), 1.0, 1.0),
        **heads,
    )
    assert out.isfinite().all()


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("kv_heads", [KV, H])
def test_decode_attention(page: int, kv_heads: int) -> None:
    lengths, splits = [40, 7, 33], 2
    q, out = torch.randn(3, H, D), torch.empty(3, H, D)
    shape = (64, kv_heads, D)
    keys, values = torch.randn(shape), torch.randn(shape)
    logits, lse = torch.empty(3, H, splits, D), torch.empty(3, H, splits)
    counts, slots = torch.full((3,), splits, dtype=torch.int32), torch.randint(0, 60, (sum(lengths),))
    decode.decode_attention_fwd(
        *(q, keys, values, out, indptr(lengths), slots, logits, lse, counts, splits, 0.25, 1.0, 1.0), page_size=page
    )
    assert out.isfinite().all()


@pytest.mark.parametrize(("topk", "page"), [(1, 1), (3, 1), (3, 4), (1, 4)])
def test_draft_decode_kv_indices(topk: int, page: int) -> None:
    steps, lengths = 3, torch.tensor([13, 6])
    table = torch.randint(0, 500, (4, 64), dtype=torch.int32)
    per_step = int(lengths.sum()) * topk + 2 * topk * steps
    indices = torch.full((steps, per_step + 64), -1, dtype=torch.int64)
    ends = torch.zeros((steps, 2 * topk + 1), dtype=torch.int32)
    positions = lengths.repeat_interleave(topk)
    cache_locs.generate_draft_decode_kv_indices[(steps, 2, topk)](
        *(
            torch.tensor([2, 0]),
            table,
            lengths,
            indices,
            ends,
            positions,
            64,
            indices.shape[1],
            ends.shape[1],
            2,
            4,
            8,
            page,
        )
    )
    assert ends[:, -1].tolist() == [int(lengths.sum()) * topk + 2 * topk * (i + 1) for i in range(steps)]


def test_flashinfer_kv_indices() -> None:
    table, lengths = torch.arange(256, dtype=torch.int32).view(4, 64), torch.tensor([9, 20], dtype=torch.int32)
    out = torch.empty(29, dtype=torch.int64)
    kv_indices.create_flashinfer_kv_indices_triton[(2,)](table, torch.tensor([1, 3]), lengths, indptr([9, 20]), None, out, 64)
    assert out.tolist() == [*range(64, 73), *range(192, 212)]


@pytest.mark.parametrize("topk", [1, 3])
def test_build_tree_then_verify(topk: int) -> None:
    tokens, depth, batch = (4, 3, 2) if topk == 1 else (6, 3, 2)
    lengths = torch.tensor([5, 8])
    parents = torch.full((batch, topk * (depth - 1) + 1), -1)
    parents[:, 1:] = torch.arange(topk * (depth - 1))
    selected = torch.arange(tokens - 1).repeat(batch, 1)
    mask = torch.full((int(lengths.sum()) * tokens + tokens * tokens * batch,), True)
    positions = torch.zeros(batch * tokens, dtype=torch.int64)
    links = [torch.full((batch, tokens), -1) for _ in range(3)]
    spec_tree.sgl_build_tree_kernel_efficient_triton[(batch,)](
        *(parents, selected, lengths, lengths.cumsum(0) - lengths, mask, positions, *links),
        topk=topk,
        depth=depth,
        draft_token_num=tokens,
        tree_mask_mode=0,
        batch_size=batch,
        parent_list_stride=parents.stride(0),
        selected_index_stride=selected.stride(0),
    )
    assert positions.view(batch, tokens)[:, 0].tolist() == lengths.tolist()
    candidates = torch.randint(0, 3, (batch, tokens))
    target = torch.randint(0, 3, (batch, tokens))
    spec_tree.verify_tree_greedy_triton(
        *(torch.zeros(batch * tokens + 1, dtype=torch.int32), torch.full((batch, depth + 1), -1, dtype=torch.int32)),
        *(torch.zeros(batch, dtype=torch.int32), candidates, *links, target),
    )


def test_draft_cache_locs() -> None:
    table, out = torch.arange(256, dtype=torch.int32).view(4, 64), torch.zeros(18, dtype=torch.int64)
    cache_locs.assign_draft_cache_locs_contiguous[(2,)](torch.tensor([1, 3]), table, torch.tensor([9, 20]), out, 64, 3, 3)
    assert out.tolist() == [*range(73, 82), *range(212, 221)]


def test_kv_move_through_a_table_of_addresses() -> None:
    layers = {f"layer {i}": torch.randn(32, KV, D) for i in range(4)}
    pools = triton_cpu.LivePools()
    for name, layer in layers.items():
        pools.register(name, layer)
    triton_cpu.install(EVERYTHING, pools)
    before = {name: layer.clone() for name, layer in layers.items()}
    table = torch.tensor([layer.data_ptr() for layer in layers.values()], dtype=torch.uint64)
    strides = torch.tensor([KV * D * 4] * 4)
    target, source = torch.tensor([3, 9, 10]), torch.tensor([5, 1, 30])
    move = cache_move.copy_all_layer_kv_cache_tiled[(4, 1)]
    move(table, strides, target, source, 3, 4, BYTES_PER_TILE=128)
    assert all(torch.equal(layer[target], before[name][source]) for name, layer in layers.items())
    with pytest.raises(triton_cpu.OutOfBounds):
        move(table, strides, torch.tensor([3, 9, 32]), source, 3, 4, BYTES_PER_TILE=128)
    triton_cpu.clear()


def test_every_kernel_of_the_path_compiles() -> None:
    for module in (decode, extend, kv_indices, cache_move, cache_locs, spec_tree):
        assert module.load().__name__.startswith(PACKAGES)
    assert eagle.fill_bonus_tokens is not None
    assert triton_cpu.precompile(PACKAGES) == {}
