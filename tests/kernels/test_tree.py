"""Building the tree that the target verifies: tokens, positions, mask and links, of trees and of chains; packing of masks."""

from dataclasses import dataclass
from random import Random

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from eagletwin.harness.engines.triton_cpu import OutOfBounds
from eagletwin.harness.patch import Edit
from eagletwin.reference.tree import ancestor_mask, depths, full_mask, packed_bytes, packed_mask, retrieve_links

from .release import EAGLE, PACK, TREE, UTILS, load
from .tier import Property, make_tests
from .trees import Batch, Tree, batches, grow

FULL, QLEN, BITS = 0, 1, 2  # SGLang's TreeMaskMode


@dataclass(frozen=True)
class Build:
    batch: Batch
    mode: int = FULL
    given_buffer: bool = False  # the caller owns the mask, and it is longer than this batch needs
    fill_prefix: bool = True


def tokens(batch: Batch) -> tuple[Tensor, Tensor]:
    """Bonus tokens [bs] and drafted tokens [bs, nodes - 1], all different."""
    count = len(batch.lengths)
    drafted = torch.arange(count * (batch.nodes - 1)).reshape(count, batch.nodes - 1)
    return 1000 + torch.arange(count), drafted


def build(case: Build) -> tuple[Tensor, ...]:
    batch = case.batch
    bonus, drafted = tokens(batch)
    lengths = torch.tensor(batch.lengths, dtype=torch.int64)
    area = len(batch.lengths) * batch.nodes**2 + (sum(batch.lengths) * batch.nodes if case.mode == FULL else 0)
    found: tuple[Tensor, ...] = load(UTILS).build_tree_kernel_efficient(
        *(bonus, batch.parent_list, batch.selected, drafted, lengths, sum(batch.lengths)),
        *(batch.topk, batch.num_steps, batch.nodes, load(TREE).TreeMaskMode(case.mode)),
        torch.zeros(area + 5, dtype=torch.bool) if case.given_buffer else None,
        case.fill_prefix,
    )
    return found


def tree_is_built(case: Build) -> None:
    batch, nodes = case.batch, case.batch.nodes
    mask, positions, index, first, sibling, nodes_tokens = build(case)
    bonus, drafted = tokens(batch)
    parents = [tree.parents for tree in batch.trees]
    links = [retrieve_links(of) for of in parents]
    assert nodes_tokens.tolist() == [t for b, d in zip(bonus.tolist(), drafted.tolist(), strict=True) for t in (b, *d)]
    assert positions.tolist() == [m + d for m, of in zip(batch.lengths, parents, strict=True) for d in depths(of)]
    assert index.tolist() == torch.arange(len(parents) * nodes).reshape(-1, nodes).tolist()
    assert first.tolist() == [link[0] for link in links]
    assert sibling.tolist() == [link[1] for link in links]
    assert len(mask) >= sum(nodes * (nodes + (m if case.mode == FULL else 0)) for m in batch.lengths)
    start = 0
    for length, of in zip(batch.lengths, parents, strict=True):
        expected = full_mask(of, length) if case.mode == FULL else ancestor_mask(of)
        rows = mask[start : start + expected.numel()].view_as(expected)
        start += expected.numel()
        if not case.fill_prefix:  # nobody reads the prefix then
            rows, expected = rows[:, -nodes:], expected[:, -nodes:]
        assert torch.equal(rows, expected)


@dataclass(frozen=True)
class Chain:
    batch: Batch
    given_mask: bool | None  # what the caller's buffer holds; None: it gives none
    cache: bool
    mrope: bool
    reverse: bool  # strided inputs


def chain_is_built(case: Chain) -> None:
    batch, count, width = case.batch, len(case.batch.lengths), case.batch.nodes
    bonus, drafted = tokens(batch)
    lengths, requests = torch.tensor(batch.lengths, dtype=torch.int64), torch.arange(count) + 1
    bonus = bonus.int()
    table = torch.arange((count + 1) * 24, dtype=torch.int32).reshape(count + 1, 24)
    if case.reverse:
        drafted, table = drafted.t().contiguous().t(), table.t().contiguous().t()
        bonus = torch.stack([bonus, bonus], 1)[:, 0]
    buffer = None if case.given_mask is None else torch.full((count * width**2 + 3,), case.given_mask)
    mask, positions, index, first, sibling, nodes_tokens, slots, mrope = load(EAGLE).build_chain_tree(
        *(bonus, drafted, lengths, buffer),
        req_pool_indices=requests,
        req_to_token=table if case.cache else None,
        with_mrope=case.mrope,
    )
    parents = list(range(-1, width - 1))
    links = retrieve_links(parents)
    expected = [m + d for m in batch.lengths for d in depths(parents)]
    assert positions.tolist() == expected
    assert nodes_tokens.reshape(count, width).tolist() == torch.cat([bonus[:, None], drafted], 1).tolist()
    assert index.tolist() == torch.arange(count * width).reshape(count, width).tolist()
    assert (first.tolist(), sibling.tolist()) == ([links[0]] * count, [links[1]] * count)
    assert mask[: count * width**2].tolist() == ancestor_mask(parents).flatten().tolist() * count
    if buffer is not None:
        assert mask[count * width**2 :].tolist() == [case.given_mask] * 3
    assert (slots is not None, mrope is not None) == (case.cache, case.mrope)
    if case.cache:
        columns = positions.reshape(count, width)  # a chain's node n lies in column M + n, and has position M + n
        assert slots.tolist() == table[requests[:, None], columns].flatten().tolist()
    if case.mrope:
        assert mrope.tolist() == [expected] * 3


def mask_is_packed(batch: Batch) -> None:
    masks = [full_mask(tree.parents, length) for tree, length in zip(batch.trees, batch.lengths, strict=True)]
    masks = [mask ^ (torch.rand(mask.shape, generator=torch.Generator().manual_seed(batch.seed)) > 0.7) for mask in masks]
    packed = [packed_bytes(mask) for mask in masks]
    kv, ends = (torch.tensor([0, *sizes]).cumsum(0).int() for sizes in ([m.shape[1] for m in masks], [len(p) for p in packed]))
    output = torch.full((int(ends[-1]) + 7,), 0xA5, dtype=torch.uint8)
    flat = torch.cat([mask.flatten() for mask in masks]) if masks else torch.empty(0, dtype=torch.bool)
    longest = max((mask.shape[1] for mask in masks), default=0)
    arguments = {"batch_size": len(masks), "query_width": batch.nodes, "max_kv_len": longest}
    load(PACK).pack_verify_mask_into(flat, kv, ends, output, **arguments)
    assert output.tolist() == [byte for part in packed for byte in part] + [0xA5] * 7


BUILD = f"{TREE}.sgl_build_tree_kernel_efficient_triton"

PROPERTIES = (
    Property(
        "tree is built",
        st.builds(Build, batches(), st.sampled_from([FULL, QLEN]), st.booleans(), st.booleans()),
        tree_is_built,
        (
            Edit(target=BUILD, match="parent_position = pp + 1", replacement="parent_position = pp"),
            Edit(target=BUILD, match="position + seq_len,", replacement="position + seq_len + 1,"),
            Edit(target=f"{TREE}.sgl_build_tree_kernel_triton", match=" - verified_seq_len", replacement=""),
            Edit(
                target=f"{UTILS}.build_tree_kernel_efficient",
                match="bonus_tokens.unsqueeze(1)",
                replacement="draft_tokens[:, :1]",
            ),
        ),
    ),
    Property(
        "chain is built",
        st.builds(Chain, batches(chain=True), st.sampled_from([None, False, True]), *[st.booleans()] * 3),
        chain_is_built,
        (
            Edit(target=f"{EAGLE}._build_chain_tree_kernel", match="mask_col <= mask_row", replacement="mask_col < mask_row"),
            Edit(target=f"{EAGLE}.build_chain_tree", match="draft_tokens.stride(1)", replacement="1"),
        ),
    ),
    Property(
        "mask is packed",
        batches(),
        mask_is_packed,
        (
            Edit(target=f"{PACK}._pack_verify_mask_kernel", match="kv_start * Q + offsets", replacement="kv_start + offsets"),
            Edit(target=f"{PACK}.pack_verify_mask_into", match="mask.contiguous()", replacement="(~mask)"),
        ),
    ),
)
test_property, test_planted_fault_is_caught = make_tests(PROPERTIES)


def batch_of(*trees: Tree, lengths: tuple[int, ...]) -> Batch:
    return Batch(trees[0].topk, trees[0].num_steps, len(trees[0].selected) + 1, trees, lengths, 0)


@pytest.mark.parametrize("mode", [FULL, QLEN])
def test_no_request_has_no_tree(mode: int) -> None:
    mask, positions, *links, nodes_tokens = build(Build(Batch(2, 2, 4, (), (), 0), mode))
    assert [len(mask), len(positions), len(nodes_tokens)] == [0, 0, 0]
    assert all(link.shape == (0, 4) for link in links)


def test_depth_one_is_a_star() -> None:
    tree = Tree(3, 1, ((0, 1, 2),), (0, 1, 2))
    tree_is_built(Build(batch_of(tree, lengths=(5,))))
    assert tree.parents == [-1, 0, 0, 0]


@pytest.mark.parametrize("mode", [FULL, QLEN])
def test_a_node_whose_parent_was_not_selected_is_linked_to_nothing_and_sees_itself_alone(mode: int) -> None:
    """EAGLE cannot select one. SGLang's Triton kernel stays in bounds: no link leads to the node, so that it is never accepted;
    it sees the prefix and itself, not the root, and its position says depth 1 where it has depth 2."""
    good, orphan = Tree(2, 2, ((0, 1), (2, 3)), (0, 2)), Tree(2, 2, ((0, 1), (2, 3)), (0, 4))  # 4 is a child of 1
    with pytest.raises(ValueError, match="candidate 4 was selected, and its parent 1 was not"):
        assert orphan.parents
    mask, positions, _, first, sibling, _ = build(Build(batch_of(orphan, good, lengths=(1, 1)), mode))
    assert (first[0].tolist(), sibling[0].tolist()) == ([1, -1, -1], [-1, -1, -1])
    assert positions.tolist() == [1, 2, 2, 1, 2, 3]
    width = 4 if mode == FULL else 3
    seen = mask.view(2, 3, width)[:, :, -3:].int().tolist()
    assert seen == [[[1, 0, 0], [1, 1, 0], [1, 0, 1]], [[1, 0, 0], [1, 1, 0], [1, 1, 1]]]


def test_the_bit_packed_mask_is_refused_not_ignored() -> None:
    """The CUDA kernel writes it; the Triton twin's caller raises, as no output would be right."""
    batch = batch_of(Tree(1, 2, ((0,), (1,)), (0, 1)), lengths=(4,))
    with pytest.raises(NotImplementedError, match="QLEN_ONLY_BITPACKING"):
        build(Build(batch, BITS))


def test_the_kernel_itself_takes_the_bit_packed_mode_for_the_unpacked_one(runtime: str) -> None:
    """So the caller's refusal is all there is: nodes * nodes cells go into a buffer of one integer a node, which the first
    request overruns. Were the buffer longer, every node's integer would be 0 or 1."""
    tree = Tree(1, 2, ((0,), (1,)), (0, 1))
    batch = batch_of(tree, lengths=(4,))
    links = [torch.full((1, 3), -1) for _ in range(3)]

    def launch(mask: Tensor) -> None:
        load(TREE).sgl_build_tree_kernel_efficient_triton[(1,)](
            *(batch.parent_list, batch.selected, torch.tensor([4]), torch.tensor([0]), mask, torch.zeros(3).long(), *links),
            topk=1,
            depth=2,
            draft_token_num=3,
            tree_mask_mode=BITS,
            batch_size=1,
            parent_list_stride=2,
            selected_index_stride=2,
        )

    if runtime != "interpreter":  # which would write there
        with pytest.raises(OutOfBounds):
            launch(torch.zeros(3, dtype=torch.uint8))
    mask = torch.zeros(9, dtype=torch.uint8)
    launch(mask)
    assert mask[:3].tolist() == [1, 0, 0] != packed_mask(tree.parents) == [1, 3, 7]


@pytest.mark.parametrize("seed", range(3))
def test_a_tree_whose_every_candidate_is_a_node(seed: int) -> None:
    tree = grow(Random(seed), 3, 2, 13)
    tree_is_built(Build(batch_of(tree, tree, lengths=(0, 7))))
