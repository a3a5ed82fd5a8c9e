"""SGLang's kernels on a GPU, compiled: trees, sampling, and the move of an accepted path's rows."""

import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from eagletwin.harness.commands.kernels.properties import commit, properties_of, rotate, sampling, select, tree
from eagletwin.harness.commands.kernels.properties.kv_move import SLOTS, AcceptedBatch
from eagletwin.harness.commands.kernels.release import EAGLE, MOVE, SAMPLING, SPEC, TOPK1, UTILS
from eagletwin.harness.commands.kernels.tier import Property, same_cases
from eagletwin.harness.commands.kernels.trees import Batch, Tree, batches
from eagletwin.harness.core.run_spec import Mode
from eagletwin.harness.engines.source import INSTALLED, use
from eagletwin.harness.engines.start import _environment
from eagletwin.harness.testing.plugin import named_source
from eagletwin.reference.tree import accept_row, move_rows

from ..kernels import cuts, sampled_trees

# The kernel tier on a GPU: CUDA C++ builds and verifies trees here, and Triton's kernels are compiled.
# The properties are those of `eagletwin kernels`, which has a fault for each; here their tensors lie on the GPU.


CASES = 60


@cache
def load(name: str) -> Any:
    """A module of SGLang, imported as the CUDA engine imports it. Releases differ in where some functions lie."""
    from eagletwin.harness.engines.sglang.boot import boot

    mode = Mode(device="cuda")
    os.environ.update(_environment(INSTALLED, mode))
    boot.import_sglang(mode)
    parts = [importlib.import_module(module) for module in (name, UTILS, EAGLE)]
    return SimpleNamespace(**{attribute: value for part in reversed(parts) for attribute, value in vars(part).items()})


@pytest.fixture(autouse=True)
def on_the_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("Triton's kernels are interpreted in this process: run these tests with TRITON_INTERPRET=0")
    use(named_source(request.config))  # before load() imports it
    for module in (commit, rotate, select, tree, tree):
        monkeypatch.setattr(module, "load", load)
    torch.set_default_device("cuda")
    yield
    torch.set_default_device("cpu")


def _property(module: Any, name: str) -> Property:
    found: Property = next(of for of in properties_of(module) if of.name == name)
    return found


def _something(case: Any) -> bool:
    """An empty batch is not launched on a GPU: CUDA refuses an empty grid, and SGLang never asks for one."""
    if hasattr(case, "batch"):
        return len(case.batch.trees) > 0
    return getattr(case, "count", 1) > 0 and len(getattr(case, "lengths", (1,))) > 0


@pytest.mark.parametrize(
    "of",
    [
        _property(tree, "tree is built"),
        _property(tree, "path is accepted"),
        _property(select, "tree grows"),
        _property(commit, "bonus is filled"),
        _property(rotate, "ids rotate"),
    ],
    ids=lambda of: of.name,
)
def test_property(of: Property) -> None:
    check(of.holds, of.cases.filter(_something))


def test_top1_of_a_chain() -> None:
    """The fused kernel, with the block size that is used; tests/kernels varies it."""
    module = load(TOPK1)
    for count, vocabulary in ((1, 5), (3, 96), (8, 128), (5, 5000)):
        generator = torch.Generator("cuda").manual_seed(count)
        logits = torch.randint(0, 50, (count, vocabulary), generator=generator).float()
        positions, drafted = torch.arange(count) + 40, torch.full((count, 5), -77)
        chances, index = module.draft_topk1_postprocess(logits, positions, drafted, 2)
        expected = [row.index(max(row)) for row in logits.tolist()]
        assert index.flatten().tolist() == expected
        assert chances.flatten().tolist() == [1.0] * count
        assert positions.tolist() == [41 + row for row in range(count)]
        assert drafted[:, 2].tolist() == expected
        drafted[:, 2] = -77
        assert bool((drafted == -77).all())


def check(holds: Callable[[Any], None], cases: Any) -> None:
    """Hold it against CASES cases, the same in every run."""

    def one(case: Any) -> None:
        holds(case)

    settings(same_cases(CASES))(given(case=cases)(one))()


# The move of an accepted path's KV rows, compiled: what a tree's verify launches on a GPU after it has accepted.
# The kernel loads and stores in one program and has no barrier between, while a path's row may be the next one's source. The
# CPU runtime cannot see such a race; here the move is repeated under load, each row the target of one and the source of
# another.


LAUNCHES = 1000


class Pool:
    """rows [layers, slots, width] bytes, moved by the kernel as MHATokenToKVPool has it move its own."""

    def __init__(self, slots: int, width: int, layers: int) -> None:
        self.rows = torch.randint(0, 256, (layers, slots, width), dtype=torch.uint8)
        self.pointers = torch.tensor([layer.data_ptr() for layer in self.rows], dtype=torch.uint64)
        self.strides = torch.tensor([width] * layers)
        tile = tile_of(width)
        self.sizes = {"bytes_per_tile": tile, "byte_tiles": -(-width // tile), "num_warps": 4 if tile <= 256 else 8}

    def move_kv_cache(self, targets: Tensor, sources: Tensor) -> None:
        count = len(targets)
        upper = 1 << (count - 1).bit_length()
        arguments = (self.pointers, self.strides, targets, sources, count, upper, self.sizes)
        load(MOVE).copy_all_layer_kv_cache_func(*arguments)


def tile_of(width: int) -> int:
    """Bytes that a program moves of each row: MHATokenToKVPool's choice."""
    return 512 if width >= 8192 else 256 if width >= 4096 else 128


def path_comes_to_the_front(batch: Batch) -> None:
    """From accept_index to the pool: the slots behind the prefix, those accepted, then the move."""
    case, nodes, width = AcceptedBatch(batch), batch.nodes, batch.num_steps + 1
    pool = Pool(SLOTS, 96, 2)
    before = pool.rows.clone()
    table = torch.zeros(8, SLOTS, dtype=torch.int32)
    for row, (length, slots) in enumerate(zip(batch.lengths, case.slots, strict=True)):
        table[row, length : length + nodes] = torch.tensor(slots, dtype=torch.int32)
    accepted = [accept_row(path, first * nodes, width) for first, path in enumerate(case.batch.paths)]
    load(SPEC).move_accept_tokens_to_target_kvcache(
        SimpleNamespace(
            seq_lens=torch.tensor(batch.lengths, dtype=torch.int64),
            req_pool_indices=torch.arange(len(accepted)),
            req_to_token_pool=SimpleNamespace(req_to_token=table),
            out_cache_loc=torch.tensor(case.slots, dtype=torch.int64).flatten(),
        ),
        torch.tensor(accepted, dtype=torch.int32),
        torch.tensor([len(path) - 1 for path in case.batch.paths], dtype=torch.int32),
        SimpleNamespace(get_kvcache=lambda: pool),
    )
    for old, new in zip(before, pool.rows, strict=True):
        assert torch.equal(new, move_rows(old, case.moves))


def test_an_accepted_path_comes_to_the_front() -> None:
    check(path_comes_to_the_front, batches(least=1))


@pytest.mark.parametrize(("width", "count"), [(128, 8), (128, 64), (128, 256), (1024, 64), (1024, 256), (8192, 8), (8192, 128)])
def test_rows_that_are_read_and_written_in_one_launch(width: int, count: int) -> None:
    """Every row is overwritten by the one behind it, as on a path of all nodes but the second, in 64 layers."""
    pool = Pool(count + 1, width, 64)
    fresh, wrong = pool.rows.clone(), torch.zeros((), dtype=torch.int64)
    expected = torch.cat([fresh[:, 1:], fresh[:, -1:]], 1)
    sources, targets = torch.arange(1, count + 1), torch.arange(count)
    for _ in range(LAUNCHES):
        pool.rows.copy_(fresh)
        pool.move_kv_cache(targets, sources)
        wrong += (pool.rows != expected).flatten(1).any(1).sum()
    assert int(wrong) == 0, f"{int(wrong)} of {LAUNCHES * 64} layers were not moved as if at once"


# Verify that samples, on a GPU: the C++ of a tree and of the cuts, and Triton's kernel of a chain, compiled.
# The properties are those of harness/commands/kernels/properties/sampling.py.


JIT = "sglang.kernels.ops.speculative.sampling"  # from 0.5.21 on; before, the sampling of a tree is in the wheel of sgl_kernel


@pytest.fixture(autouse=True)
def loaded_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "load", load)


def tree_sampler() -> Callable[..., None]:
    load(SAMPLING)
    found: Any = importlib.import_module(JIT if has_jit() else "sgl_kernel").tree_speculative_sampling_target_only
    sampler: Callable[..., None] = found
    return sampler


def has_jit() -> bool:
    return importlib.util.find_spec(JIT) is not None


def cut(name: str) -> Callable[[Tensor, Tensor], Tensor]:
    """What eagle_sample cuts with."""
    utilities = load(SAMPLING)
    function: Callable[[Tensor, Tensor], Tensor] = getattr(utilities, name, None) or getattr(
        importlib.import_module("sgl_kernel"), name
    )
    return function


def test_a_chain_is_sampled() -> None:
    check(sampling.chain_is_sampled, sampling.chains().filter(lambda case: len(case.batch.trees) > 0))


def test_a_tree_is_sampled() -> None:
    sampler = tree_sampler()
    trees = sampled_trees.trees().filter(lambda case: len(case.batch.trees) > 0)
    check(lambda case: sampled_trees.tree_is_sampled(case, sampler), trees)


@pytest.mark.parametrize("vocabulary", [32_000, 128_256])
def test_vocabularies_of_real_models(vocabulary: int) -> None:
    """Wide trees and chains; the targets keep 50 tokens or all."""
    wide = Tree(4, 3, ((0, 1, 2, 3), (4, 5, 8, 12), (20, 21, 24, 28)), (0, 1, 2, 4, 5, 8, 20, 21))
    chain = Tree(1, 3, ((0,), (1,), (2,)), (0, 1, 2))
    for seed in range(4):
        for top_k in (50, vocabulary):
            of_a_tree = Batch(4, 3, 9, (wide, wide), (0, 0), seed)
            sampled_trees.tree_is_sampled(sampling.SamplingCase(of_a_tree, vocabulary, 4.0, top_k), tree_sampler())
            of_a_chain = Batch(1, 3, 4, (chain, chain), (0, 0), seed)
            sampling.chain_is_sampled(sampling.SamplingCase(of_a_chain, vocabulary, 4.0, top_k))


def test_the_largest_are_kept_with_what_ties() -> None:
    check(lambda case: cuts.largest_are_kept(case, cut("top_k_renorm_prob")), cuts.rows())


def test_the_fewest_are_kept_that_reach_a_mass() -> None:
    check(lambda case: cuts.mass_is_kept(case, cut("top_p_renorm_prob")), cuts.rows())


def test_a_coin_of_zero_and_a_child_without_probability() -> None:
    """Issue #35771: accepted up to 0.5.20, refused by what PR #35798 made of it."""
    decided, illegal = sampled_trees.coin_of_zero(tree_sampler())
    if has_jit():
        assert (decided.paths, decided.emitted, illegal) == ([[0]], [[1]], None)
    else:
        assert decided.paths == [[0, 1]]
        assert illegal is not None
        assert illegal.why == "the target never draws this token"


# FlashAttention 3 as SGLang's verify of a tree calls it: the committed rows, then the nodes before each node.

_T, _H, _G, _D = 5, 8, 2, 64  # nodes; heads of queries and of keys; their width
_COMMITTED = 12


def _attend(function: Any, device: str, sinks: Tensor | None, plan: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    """Outputs [T, H, D] and logarithms of sums [H, T]."""
    random = torch.Generator("cpu").manual_seed(0)
    q, k, v = (
        torch.randn(shape, generator=random, device="cpu").bfloat16().to(device)
        for shape in ((_T, _H, _D), *[(40, 1, _G, _D)] * 2)
    )
    table, lengths, begins = (torch.tensor(part, dtype=torch.int32, device=device) for part in plan[:3])
    more = {} if sinks is None else {"sinks": sinks.to(device)}
    out, sums, *_ = function(
        q=q,
        k_cache=k,
        v_cache=v,
        page_table=table,
        cache_seqlens=lengths,
        cu_seqlens_q=begins,
        max_seqlen_q=plan[3],
        causal=False,
        softmax_scale=_D**-0.5,
        return_softmax_lse=True,
        **more,
    )
    return out.float().cpu(), sums.float().cpu()


def test_flash_attention_s_kernel_is_its_stand_in_and_a_sum_counts_its_sink() -> None:
    """Ledger entry tree-sinks: both calls of 0.5.23 have the sinks, and the merged softmax counts them twice."""
    from eagletwin.harness.engines.sglang.stand_ins import flash_attention

    load(SPEC)
    real = importlib.import_module("sgl_kernel.flash_attn").flash_attn_with_kvcache
    sinks = torch.linspace(-0.5, 2.5, _H, device="cpu").bfloat16()
    nodes = [[20, 24, 21, 26], [25, 20, 27, 22], [23, 21, 20, 27], [26, 24, 22, 20], [21, 27, 25, 23]]
    plans = (
        ([[*range(_COMMITTED)]], [_COMMITTED], [0, _T], _T),
        (nodes, [1, 2, 3, 4, 2], [*range(_T + 1)], 1),
    )
    torch.set_default_device("cpu")
    found = dict[tuple[int, bool], tuple[Tensor, Tensor]]()
    for number, plan in enumerate(plans):
        for own in (None, sinks):
            ours = _attend(flash_attention.flash_attn_with_kvcache, "cpu", own, plan)
            found[number, own is not None] = theirs = _attend(real, "cuda", own, plan)
            # Outputs are rounded to bfloat16, so at worst to neighbours. The kernel rounds weights as well, of values below 4.
            assert torch.allclose(theirs[0], ours[0], rtol=2**-7, atol=2**-9 * 4)
            assert (theirs[1] - ours[1]).abs().max() < 1e-5  # float32
    _, plain = found[0, False]
    assert torch.allclose(found[0, True][1], torch.logaddexp(plain, sinks.float()[:, None]), atol=1e-5)
