"""Kernels that need a GPU, in torch, from what they must do: sgl_kernel's of draft trees and of a verify that samples, and the
gated delta rule of a prefill."""

from typing import Any

import torch
from torch import Tensor

from eagletwin.harness.engines.inside.blame import demand, demand_shapes, indices_of_caller

# The gated delta rule over a prefill's rows, in place of SGLang's chunked kernels: one position after another, in torch.
#
# Those kernels use block pointers, which Triton 3.9 has dropped and no runtime here has, and refuse float32. What they are
# given and what they leave behind is the same; compat/state_layers.py puts this in their place, and says so. Decode, verify
# and commit have kernels of their own, which run.

CHUNK = 64  # SGLang's CHUNK_SIZE: a state is noted where each chunk of a sequence begins


@indices_of_caller()
def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    head_first: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    inplace_update: bool = True,
) -> tuple[Tensor, None, Tensor]:
    """Outputs [1, T, HV, V], and the states [1, chunks, HV, V, K] from which each chunk of each sequence began.

    q, k           [1, T, H, K]; v [1, T, HV, V]; g [1, T, HV] logarithms of the decay; beta [1, T, HV]
    initial_state  [slots, HV, V, K]: a sequence begins from initial_state_indices [N], and its last state goes there
    cu_seqlens     [N + 1] where the sequences begin and end
    """
    if head_first or initial_state is None or initial_state_indices is None or cu_seqlens is None:
        raise NotImplementedError("the stand-in for chunk_gated_delta_rule takes sequences side by side, with their slots")
    shared = v.shape[2] // q.shape[2]
    query, key = (part[0].float().repeat_interleave(shared, 1) for part in (q, k))  # [T, HV, K]
    if use_qk_l2norm_in_kernel:
        query, key = (part * torch.rsqrt(part.square().sum(-1, keepdim=True) + 1e-6) for part in (query, key))
    query = query * (k.shape[-1] ** -0.5 if scale is None else scale)
    value, decay, rate = v[0].float(), g[0].float().exp(), beta[0].float()
    out, noted = torch.empty_like(value), []
    bounds: list[int] = cu_seqlens.tolist()
    for slot, begin, end in zip(initial_state_indices.tolist(), bounds, bounds[1:], strict=False):
        state = initial_state[slot].float() if slot >= 0 else torch.zeros_like(initial_state[0]).float()
        for row in range(begin, end):
            if (row - begin) % CHUNK == 0:
                noted.append(state)
            state = decay[row, :, None, None] * state
            change = rate[row, :, None] * (value[row] - (state @ key[row, :, :, None])[..., 0])  # [HV, V]
            state = state + change[:, :, None] * key[row, :, None, :]
            out[row] = (state @ query[row, :, :, None])[..., 0]
        if inplace_update and slot >= 0:
            initial_state[slot] = state.to(initial_state.dtype)
    chunks: Any = torch.stack(noted) if noted else initial_state[:0].float()
    return out[None].to(v.dtype), None, chunks[None]


# sgl_kernel's three functions of a verify that samples, for a machine without a GPU: plain Python, from what they must do.
#
# They are the host's and not the release's, so a fault of the C++ does not show here. The Triton kernel of rejection sampling
# is the release's own and runs as it is. compat/verify.py puts these where the release looks for them, and says so.


def top_k_renorm_prob(probs: Tensor, top_ks: Tensor) -> Tensor:
    """probs [n, V] with all but the top_ks[n] largest at zero, and the rest made 1 again. Equals of the last one stay."""
    demand_shapes(probs.shape[:1], top_ks)
    ranks = top_ks.to(torch.int64).clamp(1, probs.shape[1]) - 1
    least = probs.sort(dim=1, descending=True).values.gather(1, ranks[:, None])
    return _renormalize(probs, probs >= least)


def top_p_renorm_prob(probs: Tensor, top_ps: Tensor) -> Tensor:
    """probs [n, V] with all but the fewest largest that have top_ps[n] of the mass at zero, and the rest made 1 again.

    Equals of the last one stay.
    """
    demand_shapes(probs.shape[:1], top_ps)
    ordered = probs.sort(dim=1, descending=True).values
    before = ordered.cumsum(1) - ordered
    kept = ((before < top_ps[:, None]) | (top_ps[:, None] >= 1)).sum(1, keepdim=True).clamp(min=1)
    return _renormalize(probs, probs >= ordered.gather(1, kept - 1))


def _renormalize(probs: Tensor, keep: Tensor) -> Tensor:
    kept = torch.where(keep, probs, torch.zeros_like(probs))
    return kept / kept.sum(1, keepdim=True)


@indices_of_caller()
def tree_speculative_sampling_target_only(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform_samples: Tensor,
    uniform_samples_for_final_sampling: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,  # noqa: ARG001  of sums on a GPU; the caller's signature
) -> None:
    """Walk each tree from its root: a coin in the mass of a node's children, one after the other, says which is gone on to.

    predicts          [b * D]  written at the accepted nodes: the token that follows each
    accept_index      [b, S + 1]  written: the accepted nodes, as indices into predicts
    accept_token_num  [b]  written: how many of them are drafts
    candidates        [b, D]  tokens of the nodes
    retrive_*         [b, D]  index into predicts; first child, and next child of the same parent: -1 where there is none
    uniform_samples   [b, D]  the coin of each node's children; _for_final_sampling [b]: that of the last token
    target_probs      [b, D, V]  of what follows each node
    draft_probs       [b, D, V]  zeros; written: the mass of refused children, which the last token is not drawn from
    threshold_single  a child of that much is accepted whatever the coin; threshold_acc: what the coin is multiplied by
    """
    count, nodes = candidates.shape
    demand_shapes((count, nodes), retrive_index, retrive_next_token, retrive_next_sibling, uniform_samples)
    demand_shapes((count, nodes, target_probs.shape[-1]), target_probs, draft_probs)
    demand(
        len(accept_index) == len(accept_token_num) == len(uniform_samples_for_final_sampling) == count,
        "results of another number of trees",
    )
    for b, tokens in enumerate(candidates.tolist()):
        index, first, sibling = (links[b].tolist() for links in (retrive_index, retrive_next_token, retrive_next_sibling))
        node, accepted = 0, 0
        accept_index[b, 0] = index[0]
        while accepted + 1 < accept_index.shape[1]:
            mass, child, coin = 0.0, first[node], float(uniform_samples[b, node])
            while child != -1:
                probability = float(target_probs[b, node, tokens[child]])
                mass += probability
                if coin <= mass / threshold_acc or probability >= threshold_single:
                    break
                draft_probs[b, node, tokens[child]] = probability
                child = sibling[child]
            if child == -1:
                break
            predicts[index[node]] = tokens[child]
            node, accepted = child, accepted + 1
            accept_index[b, accepted] = index[node]
        accept_token_num[b] = accepted
        rest = target_probs[b, node].clone()
        if accepted + 1 < accept_index.shape[1]:
            rest = (rest - draft_probs[b, node]).clamp(min=0)
        mass_so_far = rest.cumsum(0)
        reached = mass_so_far > float(uniform_samples_for_final_sampling[b]) * mass_so_far[-1]
        predicts[index[node]] = int(reached.to(torch.int8).argmax()) if bool(reached.any()) else len(rest) - 1


FUNCTIONS: tuple[Any, ...] = (top_k_renorm_prob, top_p_renorm_prob, tree_speculative_sampling_target_only)


# sgl_kernel's two C++ functions of the draft tree, for releases that have no Triton twin of them (up to 0.5.14).
#
# `build_tree_kernel_efficient` links the selected candidates into a tree, and `verify_tree_greedy` walks it; both write into
# the tensors that they are given, as the C++ does. Written from what they must do (the releases' call sites), in plain Python:
# a tree has a few dozen nodes. compat/verify.py puts them where the release looks for them, and says so.
#
# They are the host's and not the release's, so a fault of the C++ does not show here. A node whose parent was not selected is
# left without links, as the C++ does it; its position and mask, undefined there, are those of a root.

FULL_MASK, QLEN_ONLY = 0, 1


def build_tree_kernel_efficient(
    parent_list: Tensor,
    selected_index: Tensor,
    verified_seq_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    topk: int,
    depth: int,  # noqa: ARG001  the caller's signature
    draft_token_num: int,
    tree_mask_mode: int = FULL_MASK,
) -> None:
    """Fill the mask, positions and links of each request's verify tree. D = draft_token_num nodes, node 0 the root.

    parent_list           [b, 1 + topk * (depth - 1)]  candidate that was expanded, by block of topk children; the first
                          block is the root's
    selected_index        [b, D - 1]  candidates that are nodes 1..D-1, in rising order; candidate c is in block c // topk
    verified_seq_len      [b]  tokens before the root
    tree_mask             [sum of D * (seq_len + D)] bool, full of True; QLEN_ONLY: [b * D * D]
    positions             [b * D]
    retrive_*             [b, D]  -1 where there is none; children of a node are linked in rising order
    """
    count, lengths, begin = len(verified_seq_len), verified_seq_len.tolist(), 0
    demand_shapes((count, draft_token_num), retrive_index, retrive_next_token, retrive_next_sibling)
    demand_shapes((count, draft_token_num - 1), selected_index)
    demand(len(parent_list) == count and positions.numel() >= count * draft_token_num, "parents or positions of fewer trees")
    prefixes = lengths if int(tree_mask_mode) == FULL_MASK else [0] * count
    area = sum(draft_token_num * (prefix + draft_token_num) for prefix in prefixes)
    demand(min(lengths, default=0) >= 0 and tree_mask.numel() >= area, f"a mask of {tree_mask.numel()}: lengths {lengths}")
    if int(tree_mask_mode) not in (FULL_MASK, QLEN_ONLY):
        raise NotImplementedError(f"tree mask mode {tree_mask_mode}: no attention backend of this engine asks for it")
    selected, blocks = selected_index.tolist(), parent_list.to(torch.int64).tolist()
    for b, (length, prefix) in enumerate(zip(lengths, prefixes, strict=True)):
        parents = _parents(selected[b], blocks[b], topk)
        rows = tree_mask[begin : begin + draft_token_num * (prefix + draft_token_num)].view(draft_token_num, -1)
        begin += rows.numel()
        depths = [0] * draft_token_num
        seen = torch.zeros(draft_token_num, draft_token_num, dtype=torch.bool)
        seen[:, 0] = True
        for node in range(1, draft_token_num):
            parent = parents[node]
            if parent < 0:  # as the C++, which says so and goes on: nothing leads to it
                seen[node, node] = True
                continue
            depths[node] = depths[parent] + 1
            seen[node] = seen[parent]
            seen[node, node] = True
            older = int(retrive_next_token[b, parent])
            if older == -1:
                retrive_next_token[b, parent] = node
                continue
            while int(retrive_next_sibling[b, older]) != -1:
                older = int(retrive_next_sibling[b, older])
            retrive_next_sibling[b, older] = node
        rows[:, prefix:] = seen
        places = slice(b * draft_token_num, (b + 1) * draft_token_num)
        positions[places] = torch.tensor([length + deep for deep in depths], dtype=positions.dtype)
        retrive_index[b] = torch.arange(places.start, places.stop, dtype=retrive_index.dtype)


def _parents(selected: list[int], blocks: list[int], topk: int) -> list[int]:
    """Parent of each node, which stands before it: a candidate has a larger number than the one it was proposed by.

    -1 of the root, and of a node whose parent was not selected: that is a fault of the selection, and judged there.
    """
    parents = [-1]
    for node, candidate in enumerate(selected, 1):
        block = candidate // topk
        if block == 0:
            parents.append(0)
            continue
        parent = selected.index(blocks[block]) + 1 if block < len(blocks) and blocks[block] in selected else -1
        parents.append(parent if parent < node else -1)
    return parents


@indices_of_caller()
def verify_tree_greedy(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
    **unused: Any,
) -> None:
    """Follow, from each root, the child whose token the target predicts; what it predicts at the end is the bonus token.

    predicts          [b * D]  written at the accepted nodes: the token that follows each
    accept_index      [b, steps + 1]  written: the accepted nodes, as indices into predicts
    accept_token_num  [b]  written: how many of them are drafts
    candidates        [b, D]  tokens of the nodes; target_predict [b, D]: the target's argmax at them
    """
    if unused:
        raise TypeError(f"verify_tree_greedy has no argument {sorted(unused)}")
    demand_shapes(candidates.shape, retrive_index, retrive_next_token, retrive_next_sibling)
    demand(len(accept_index) == len(accept_token_num) == len(candidates), "results of another number of trees")
    predicted = target_predict.flatten().tolist()
    for b, tokens in enumerate(candidates.tolist()):
        index, first, sibling = (links[b].tolist() for links in (retrive_index, retrive_next_token, retrive_next_sibling))
        node, accepted = 0, 0
        accept_index[b, 0] = index[0]
        while accepted + 1 < accept_index.shape[1]:
            token, child = predicted[index[node]], first[node]
            while child != -1 and tokens[child] != token:
                child = sibling[child]
            if child == -1:
                break
            predicts[index[node]] = token
            node, accepted = child, accepted + 1
            accept_index[b, accepted] = index[node]
        accept_token_num[b] = accepted
        predicts[index[node]] = predicted[index[node]]
