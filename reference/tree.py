"""The draft tree of EAGLE-2, as small functions of integers: who is whose parent, and what verification needs of it.

Two numberings. *Candidates* are all nodes that drafting ever proposed, depth by depth: 0..k-1 are the root's children; after
them, at each further depth, the k children of the first frontier node, of the second, and so on, best child first (k =
topk). So depth 1 has k candidates and every depth after it k * k. The *frontier* of a depth is the ordered list of the k
candidates that were expanded. *Nodes* are what the target verifies: node 0 is the bonus token x[M], nodes 1.. are the
selected candidates in the order of their numbers, so a parent always comes before its children.

Source: EAGLE-2 (arXiv 2406.16858) §4.1 (expansion by the product of probabilities) and §4.2 (re-ranking of all candidates).
docs/explanation/trees.md lists the differences to SafeAILab/EAGLE and to SGLang. growth.py grows trees; no model comes here.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def parent_of(candidate: int, topk: int, expanded: Sequence[int]) -> int:
    """The candidate that proposed this one; -1 for the root.

    expanded: the frontiers of depths 1, 2, .. one after the other. As each expanded node proposed k candidates, the root
    first, candidate // k says who proposed it: 0 the root, n the n-th that was expanded.
    """
    return -1 if candidate < topk else expanded[candidate // topk - 1]


def tree_parents(selected: Sequence[int], topk: int, expanded: Sequence[int]) -> list[int]:
    """Parents of the nodes [D]: of selected candidates, in the order of their numbers, behind the root. The root's is -1.

    Raises ValueError if a node's parent was not selected: what is verified is then no tree.
    """
    node = {-1: 0} | {candidate: number for number, candidate in enumerate(selected, 1)}
    parents = [-1]
    for candidate in selected:
        parent = parent_of(candidate, topk, expanded)
        if parent not in node:
            raise ValueError(f"candidate {candidate} was selected, and its parent {parent} was not")
        parents.append(node[parent])
    return parents


def path_to(node: int, parents: Sequence[int]) -> list[int]:
    """Nodes from the root to `node`, both included."""
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


def depths(parents: Sequence[int]) -> list[int]:
    """Depth of each node; the root's is 0. The target sees node n at position M + depth[n]."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent < 0 else found[parent] + 1)
    return found


def ancestor_mask(parents: Sequence[int]) -> Tensor:
    """sees [D, D]: a node sees itself and its ancestors, and no one else of the tree (the committed prefix apart)."""
    sees = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            sees[node] |= sees[parent]
    return sees


def full_mask(parents: Sequence[int], prefix: int) -> Tensor:
    """[D, prefix + D]: every node sees the committed prefix; then the ancestors. One request of SGLang's FULL_MASK."""
    mask = ancestor_mask(parents)
    return torch.cat([torch.ones(len(parents), prefix, dtype=torch.bool), mask], 1)


def packed_mask(parents: Sequence[int]) -> list[int]:
    """One integer a node [D]: bit m is set if the node sees node m. SGLang's QLEN_ONLY_BITPACKING."""
    return [sum(1 << other for other, seen in enumerate(row) if seen) for row in ancestor_mask(parents).tolist()]


def packed_bytes(mask: Tensor) -> list[int]:
    """A request's mask [rows, columns], row by row, eight cells to a byte, the first in the lowest bit.

    The last byte is filled up with zeros. FlashInfer's packed custom mask. A request begins a byte of its own, a row does not.
    """
    cells = mask.flatten().tolist()
    return [sum(1 << bit for bit, seen in enumerate(cells[start : start + 8]) if seen) for start in range(0, len(cells), 8)]


def retrieve_links(parents: Sequence[int]) -> tuple[list[int], list[int]]:
    """(next_token, next_sibling), each [D]: a node's first child, and its parent's next child after it; -1 where none is."""
    first, sibling, last = [-1] * len(parents), [-1] * len(parents), [-1] * len(parents)
    for node, parent in enumerate(parents):
        if parent < 0:
            continue
        if first[parent] < 0:
            first[parent] = node
        else:
            sibling[last[parent]] = node
        last[parent] = node
    return first, sibling


def leaf_paths(parents: Sequence[int]) -> list[list[int]]:
    """Root-to-leaf paths in the order of their leaves: what the published EAGLE code calls retrieve indices (unpadded)."""
    inner = set(parents)
    return [path_to(node, parents) for node in range(len(parents)) if node not in inner]


def walk_greedy(tokens: Sequence[int], parents: Sequence[int], argmax: Sequence[int]) -> list[int]:
    """The accepted path: from the root, go on to the child whose token is the target's argmax[node], while there is one.

    tokens, argmax [D]. The tokens committed are argmax of the nodes on the path; the last of them is the bonus token.
    """
    path = [0]
    while True:
        chosen = argmax[path[-1]]
        child = next((n for n, parent in enumerate(parents) if parent == path[-1] and tokens[n] == chosen), None)
        if child is None:
            return path
        path.append(child)


def move_to_front(rows: Tensor, path: Sequence[int]) -> Tensor:
    """rows [D, ..] of one request with the accepted path's in front, in the order of the path. What follows is garbage."""
    front = rows[torch.as_tensor(path, dtype=torch.int64)]
    return torch.cat([front, rows[len(path) :]])


# Choosing: the best of a row, one step of a tree's growth, and the re-ranking of all candidates. Functions of numbers alone.
#
# EAGLE-2 (arXiv 2406.16858): a candidate's score is the product of the draft model's probabilities on its path; at each step
# the k best of the frontier's k * k children make the next frontier (4.1); at the end the best of all candidates are verified
# (4.2). Where scores are equal the smaller place wins here. Nobody can rely on that of an engine: `as_good` says whether
# another choice is right as well.


def best(values: Sequence[float], count: int) -> list[int]:
    """Places [count] of the largest values, the largest first; of equal ones the smaller place first. A NaN is never chosen
    before a number."""
    rank = [(value != value, -value, place) for place, value in enumerate(values)]
    return [place for _, _, place in sorted(rank)[:count]]


def as_good(values: Sequence[float], chosen: Sequence[int]) -> bool:
    """Whether these places, all different, hold the largest values in falling order: `best`, but for ties."""
    if len(set(chosen)) < len(chosen) or not all(0 <= place < len(values) for place in chosen):
        return False
    return [values[place] for place in chosen] == [values[place] for place in best(values, len(chosen))]


def child_scores(scores: Tensor, probabilities: Tensor) -> Tensor:
    """[k, k]: child j of frontier node i. scores [k] of the frontier, probabilities [k, k] of each node's k proposals."""
    return scores[:, None] * probabilities


def frontier_numbers(step: int, topk: int, places: Sequence[int]) -> list[int]:
    """Candidate numbers [k] of the frontier that `places` of the k * k children make. step 1: depth 2."""
    return [topk + (step - 1) * topk * topk + place for place in places]


def continued_rows(places: Sequence[int], topk: int) -> list[int]:
    """Which of the frontier's k rows [k] each new node continues: its parent's, whose hidden state it consumes."""
    return [place // topk for place in places]


def rerank(scores: Sequence[float], num_draft_tokens: int) -> list[int]:
    """The candidates [num_draft_tokens - 1] that are verified, in the order of their numbers. scores: of all candidates."""
    return sorted(best(scores, num_draft_tokens - 1))


def first_frontier(topk: int) -> Tensor:
    """[k + 1] int64: how SGLang's list of parents begins. -1 stands for the root, then the root's children."""
    return torch.arange(-1, topk)


# What a verified tree commits, as functions of integers: tokens, lengths, and which rows move where.
#
# After verify, the accepted path lies at the front of the request's block: node path[i] becomes row i. Draft extend then runs
# over the whole block, and what follows the path is garbage that nobody may read. A path begins with node 0, so its length
# is the accept length, which counts the bonus token. walk_greedy finds paths.

Move = tuple[int, int]  # (from slot, to slot)


def committed_tokens(argmax: Sequence[int], path: Sequence[int]) -> list[int]:
    """The new tokens [len(path)]: the target's choice at each node of the path. The last is the bonus token."""
    return [argmax[node] for node in path]


def bonus_token(argmax: Sequence[int], path: Sequence[int]) -> int:
    """The token that the target has not consumed yet: its choice at the last accepted node."""
    return argmax[path[-1]]


def accept_row(path: Sequence[int], first: int, width: int) -> list[int]:
    """The path as SGLang's `accept_index` has it [width]: nodes counted through the batch from `first` on, then -1."""
    return [first + node for node in path] + [-1] * (width - len(path))


def kv_moves(path: Sequence[int], slots: Sequence[int]) -> list[Move]:
    """Moves of KV rows [len(path)]: from node path[i]'s slot to node i's. slots [D] of the verified nodes; PR #26997."""
    return [(slots[node], slots[place]) for place, node in enumerate(path)]


def move_rows(rows: Tensor, moves: Sequence[Move]) -> Tensor:
    """rows [slots, ..] after the moves, all at once: what a move reads is what was there before any of them."""
    after = rows.clone()
    after[torch.tensor([to for _, to in moves], dtype=torch.int64)] = rows[
        torch.tensor([at for at, _ in moves], dtype=torch.int64)
    ]
    return after


def last_row(request: int, accept_len: int, num_draft_tokens: int) -> int:
    """Row of the batch's draft extend, D rows a request, that the next round is drafted from: its last committed one."""
    return request * num_draft_tokens + accept_len - 1


def tracked_place(committed: int, accept_len: int, interval: int) -> int | None:
    """Which place of the path makes the request's length the last multiple of `interval` it reaches; None: it reaches none.

    Recurrent states are kept at such lengths (SGLang's mamba track), and must be taken after that token, not after the last.
    """
    multiple = (committed + accept_len) // interval * interval
    return multiple - committed - 1 if multiple > committed else None


def rotate_ids(ids: Sequence[int], token: int) -> list[int]:
    """Shifted one to the left, with `token` at the end: row i consumes what row i + 1 did. Of no ids none are left."""
    return [*ids[1:], token] if ids else []
