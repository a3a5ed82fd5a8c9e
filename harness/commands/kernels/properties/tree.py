"""The tree that the target verifies: tokens, positions, mask and links, of trees and of chains; packing of masks; greedy
verification, in the Triton twin of SGLang's CUDA kernel."""

from dataclasses import dataclass
from random import Random

import torch
from hypothesis import strategies as st
from torch import Tensor

from eagletwin.harness.commands.kernels.release import EAGLE, PACK, TREE, UTILS, load
from eagletwin.harness.commands.kernels.tier import fault, holds_for, same, true
from eagletwin.harness.commands.kernels.trees import Batch, batches
from eagletwin.reference.tree import (
    accept_row,
    ancestor_mask,
    committed_tokens,
    depths,
    full_mask,
    packed_bytes,
    retrieve_links,
    walk_greedy,
)

FULL, QLEN, BITS = 0, 1, 2  # SGLang's TreeMaskMode


@dataclass(frozen=True)
class TreeBuild:
    batch: Batch
    mode: int = FULL
    given_buffer: bool = False  # the caller owns the mask, and it is longer than this batch needs
    fill_prefix: bool = True


def tokens(batch: Batch) -> tuple[Tensor, Tensor]:
    """Bonus tokens [bs] and drafted tokens [bs, nodes - 1], all different."""
    count = len(batch.lengths)
    drafted = torch.arange(count * (batch.nodes - 1)).reshape(count, batch.nodes - 1)
    return 1000 + torch.arange(count), drafted


def build(case: TreeBuild) -> tuple[Tensor, ...]:
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


BUILD = f"{TREE}.sgl_build_tree_kernel_efficient_triton"


@holds_for(
    st.builds(TreeBuild, batches(), st.sampled_from([FULL, QLEN]), st.booleans(), st.booleans()),
    fault(BUILD, "parent_position = pp + 1", "parent_position = pp"),
    fault(BUILD, "position + seq_len,", "position + seq_len + 1,"),
    fault(f"{TREE}.sgl_build_tree_kernel_triton", " - verified_seq_len", ""),
    fault(f"{UTILS}.build_tree_kernel_efficient", "bonus_tokens.unsqueeze(1)", "draft_tokens[:, :1]"),
)
def tree_is_built(case: TreeBuild) -> None:
    batch, nodes = case.batch, case.batch.nodes
    mask, positions, index, first, sibling, nodes_tokens = build(case)
    bonus, drafted = tokens(batch)
    parents = [tree.parents for tree in batch.trees]
    links = [retrieve_links(of) for of in parents]
    same(
        "tokens of the nodes",
        nodes_tokens.tolist(),
        [t for b, d in zip(bonus.tolist(), drafted.tolist(), strict=True) for t in (b, *d)],
    )
    same("positions", positions, [m + d for m, of in zip(batch.lengths, parents, strict=True) for d in depths(of)])
    same("retrieve_index", index, torch.arange(len(parents) * nodes).reshape(-1, nodes).tolist())
    same("retrieve_next_token", first, [link[0] for link in links])
    same("retrieve_next_sibling", sibling, [link[1] for link in links])
    true(
        "the mask is long enough",
        len(mask) >= sum(nodes * (nodes + (m if case.mode == FULL else 0)) for m in batch.lengths),
    )
    start = 0
    for length, of in zip(batch.lengths, parents, strict=True):
        expected = full_mask(of, length) if case.mode == FULL else ancestor_mask(of)
        rows = mask[start : start + expected.numel()].view_as(expected)
        start += expected.numel()
        if not case.fill_prefix:  # then the prefix is not read
            rows, expected = rows[:, -nodes:], expected[:, -nodes:]
        same("mask", rows, expected)


@dataclass(frozen=True)
class Chain:
    batch: Batch
    given_mask: bool | None  # what the caller's buffer holds; None: it gives none
    cache: bool
    mrope: bool
    reverse: bool  # strided inputs


@holds_for(
    st.builds(Chain, batches(chain=True), st.sampled_from([None, False, True]), *[st.booleans()] * 3),
    fault(f"{EAGLE}._build_chain_tree_kernel", "mask_col <= mask_row", "mask_col < mask_row"),
    fault(f"{EAGLE}.build_chain_tree", "draft_tokens.stride(1)", "1"),
)
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
    same("positions", positions, expected)
    same(
        "tokens of the nodes",
        nodes_tokens.reshape(count, width).tolist(),
        torch.cat([bonus[:, None], drafted], 1).tolist(),
    )
    same("retrieve_index", index, torch.arange(count * width).reshape(count, width).tolist())
    same(
        "retrieve_next_token and retrieve_next_sibling",
        (first.tolist(), sibling.tolist()),
        ([links[0]] * count, [links[1]] * count),
    )
    same("mask", mask[: count * width**2], ancestor_mask(parents).flatten().tolist() * count)
    if buffer is not None:
        same("mask behind the batch", mask[count * width**2 :], [case.given_mask] * 3)
    same("there are slots, and mrope positions", (slots is not None, mrope is not None), (case.cache, case.mrope))
    if case.cache:
        columns = positions.reshape(count, width)  # a chain's node n lies in column M + n, and has position M + n
        same("slots", slots, table[requests[:, None], columns].flatten().tolist())
    if case.mrope:
        same("mrope positions", mrope, [expected] * 3)


@holds_for(
    batches(),
    fault(f"{PACK}._pack_verify_mask_kernel", "kv_start * Q + offsets", "kv_start + offsets"),
    fault(f"{PACK}.pack_verify_mask_into", "mask.contiguous()", "(~mask)"),
)
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
    same("packed mask", output, [byte for part in packed for byte in part] + [0xA5] * 7)


UNWRITTEN = -77


@dataclass(frozen=True)
class Verify:
    """Few different tokens, so that siblings share one, and the target's choice is a child's token as often as not."""

    batch: Batch
    vocabulary: int

    def tokens(self) -> tuple[list[list[int]], list[list[int]]]:
        """Candidates and the target's argmax, [bs][nodes] each."""
        random, shape = Random(self.batch.seed), range(self.batch.nodes)
        return tuple([[random.randrange(self.vocabulary) for _ in shape] for _ in self.batch.trees] for _ in range(2))  # type: ignore[return-value]


VERIFY = f"{TREE}.verify_tree_greedy_kernel_triton"


@holds_for(
    st.builds(Verify, batches(), st.integers(1, 3)),
    fault(VERIFY, "is_valid & (draft_token == target_token)", "is_valid"),
    fault(VERIFY, "tl.store(accept_token_num_ptr + bx, num_accept_tokens)", "pass"),
    fault(f"{TREE}.verify_tree_greedy_triton", "accept_index.shape[1]", "2"),
)
def path_is_accepted(case: Verify) -> None:
    check_path(case.batch, *case.tokens())


def check_path(batch: Batch, candidates: list[list[int]], argmax: list[list[int]]) -> None:
    count, nodes, width = len(batch.trees), batch.nodes, batch.num_steps + 1
    paths = [walk_greedy(c, tree.parents, a) for c, tree, a in zip(candidates, batch.trees, argmax, strict=True)]
    links = [retrieve_links(tree.parents) for tree in batch.trees]
    predicts, accepts, counts = load(TREE).verify_tree_greedy_func(
        predicts=torch.full((count * nodes,), UNWRITTEN, dtype=torch.int32),
        accept_index=torch.full((count, width), -1, dtype=torch.int32),
        accept_token_num=torch.full((count,), UNWRITTEN, dtype=torch.int32),
        candidates=torch.tensor(candidates, dtype=torch.int64).reshape(count, nodes),
        retrieve_index=torch.arange(count * nodes).reshape(count, nodes),
        retrieve_next_token=torch.tensor([link[0] for link in links], dtype=torch.int64).reshape(count, nodes),
        retrieve_next_sibling=torch.tensor([link[1] for link in links], dtype=torch.int64).reshape(count, nodes),
        target_predict=torch.tensor(argmax, dtype=torch.int64).reshape(count, nodes),
        topk=batch.topk,
    )
    same("accept_token_num", counts, [len(path) - 1 for path in paths])
    same("accept_index", accepts, [accept_row(path, first * nodes, width) for first, path in enumerate(paths)])
    expected = torch.full((count, nodes), UNWRITTEN)
    for request, (path, choices) in enumerate(zip(paths, argmax, strict=True)):
        expected[request, path] = torch.tensor(committed_tokens(choices, path))
    same("predicts", predicts, expected.flatten().tolist())
