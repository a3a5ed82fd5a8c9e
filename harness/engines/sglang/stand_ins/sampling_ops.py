"""sgl_kernel's three functions of a verify that samples, for a machine without a GPU: plain Python, from what they must do.

They are the host's and not the release's, so a fault of the C++ does not show here. The Triton kernel of rejection sampling is
the release's own and runs as it is. compat/verify.py puts these where the release looks for them, and says so.
"""

from typing import Any

import torch
from torch import Tensor

from ..blame import demand, demand_shapes, indices_of_caller


def top_k_renorm_prob(probs: Tensor, top_ks: Tensor) -> Tensor:
    """probs [n, V] with all but the top_ks[n] largest at zero, and the rest made 1 again. Equals of the last one stay."""
    demand_shapes(probs.shape[:1], top_ks)
    ranks = top_ks.to(torch.int64).clamp(1, probs.shape[1]) - 1
    least = probs.sort(dim=1, descending=True).values.gather(1, ranks[:, None])
    return _renormalized(probs, probs >= least)


def top_p_renorm_prob(probs: Tensor, top_ps: Tensor) -> Tensor:
    """probs [n, V] with all but the fewest largest that have top_ps[n] of the mass at zero, and the rest made 1 again.

    Equals of the last one stay.
    """
    demand_shapes(probs.shape[:1], top_ps)
    ordered = probs.sort(dim=1, descending=True).values
    before = ordered.cumsum(1) - ordered
    kept = ((before < top_ps[:, None]) | (top_ps[:, None] >= 1)).sum(1, keepdim=True).clamp(min=1)
    return _renormalized(probs, probs >= ordered.gather(1, kept - 1))


def _renormalized(probs: Tensor, keep: Tensor) -> Tensor:
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
