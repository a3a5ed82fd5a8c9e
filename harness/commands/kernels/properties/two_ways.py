"""What SGLang computes in two ways, on the host or in torch and in a kernel: both are what the reference says.

The nodes whose states a hybrid model commits: a kernel on a GPU, torch elsewhere. The links of a tree that is given by its mask
(NGRAM): a kernel, and numpy on the host where tokens are drafted ahead.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from unittest import mock

import torch
from hypothesis import strategies as st
from torch import Tensor

from eagletwin.reference.tree import ancestor_mask, depths, retrieve_links

from ..release import NGRAM, RECONSTRUCT, SCATTER, SPEC, load, module
from ..tier import fault, holds_for, same
from ..trees import Batch, batches
from .commit import Tracked, check_tracked_nodes, verified_batches

TRACKED = st.builds(Tracked, verified_batches(), st.sampled_from([0, 0, 1, 2, 3, 8]))
_NODES = f"{SCATTER}._fused_commit_track_indices_kernel"


@holds_for(
    TRACKED,
    fault(_NODES, "row + al - 1", "row + 0 * al"),
    fault(_NODES, "ti = tp - pre - 1", "ti = tp - pre"),
    fault(f"{SCATTER}.fused_commit_track_indices", "accept_index.shape[1],", "draft_token_num,"),
)
def nodes_are_committed_in_a_kernel(case: Tracked) -> None:
    of, nodes = case.verified, case.verified.batch.nodes
    lengths = of.lengths if case.interval else None
    found = load(SCATTER).fused_commit_track_indices(of.accepts, of.accept_lens, lengths, nodes, case.interval)
    check_tracked_nodes(case, *found)


@holds_for(
    TRACKED,
    fault(f"{SPEC}._verify_commit_step_indices", "accept_lens - 1)", "accept_lens * 0)"),
    fault(
        f"{SPEC}._verify_commit_step_indices",
        "tracking_point - seq_lens_pre_verify - 1",
        "tracking_point - seq_lens_pre_verify",
    ),
)
def nodes_are_committed_in_torch(case: Tracked) -> None:
    of, nodes = case.verified, case.verified.batch.nodes
    batch = SimpleNamespace(
        mamba_track_indices=torch.zeros(len(of.batch.paths)) if case.interval else None,
        seq_lens=of.lengths,
        tree_cache=SimpleNamespace(page_size=1),
    )
    with mock.patch.object(module(SPEC), "mamba_track_grid", lambda page_size: case.interval * page_size):
        found = load(SPEC)._verify_commit_step_indices(
            batch=batch, accept_index=of.accepts, accept_lens=of.accept_lens, draft_token_num=nodes
        )
    check_tracked_nodes(case, *found)


@dataclass(frozen=True)
class Masked:
    """Trees that are given by their masks alone, each node's ancestors and itself."""

    batch: Batch

    @property
    def parents(self) -> list[list[int]]:
        return [tree.parents for tree in self.batch.trees]

    @property
    def mask(self) -> Tensor:
        """[bs * nodes * nodes] bool."""
        rows = [ancestor_mask(of).flatten() for of in self.parents]
        return torch.cat(rows) if rows else torch.zeros(0, dtype=torch.bool)


MASKED = st.builds(Masked, batches())
_LINKS = f"{RECONSTRUCT}._reconstruct_tree_mask_kernel"


@holds_for(
    MASKED,
    fault(_LINKS, "parent = tl.max(tl.where(ancestors, col, -1)", "parent = tl.min(tl.where(m, col, n)"),
    fault(f"{RECONSTRUCT}.reconstruct_indices_from_tree_mask_triton", "[(batch_size,)]", "[(batch_size - 1,)]"),
)
def links_follow_from_a_mask_in_a_kernel(case: Masked) -> None:
    count, nodes = len(case.parents), case.batch.nodes
    outputs = [torch.full((count * nodes + 1,), -77, dtype=torch.int64) for _ in range(4)]
    lengths = torch.tensor(case.batch.lengths, dtype=torch.int64)
    load(RECONSTRUCT).reconstruct_indices_from_tree_mask_triton(case.mask, lengths, *outputs, count, nodes)
    positions, index, first, sibling = (output.tolist() for output in outputs)
    expected = [m + d for m, of in zip(case.batch.lengths, case.parents, strict=True) for d in depths(of)]
    same("positions", positions, [*expected, -77])
    same("retrieve_index", index, [*range(count * nodes), -77])
    links = [retrieve_links(of) for of in case.parents]
    same("retrieve_next_token", first, [*(node for link in links for node in link[0]), -77])
    same("retrieve_next_sibling", sibling, [*(node for link in links for node in link[1]), -77])


@holds_for(
    MASKED,
    fault(f"{NGRAM}._derive_tree_links", "for i in reversed(", "for i in ("),
)
def links_follow_from_a_mask_on_the_host(case: Masked) -> None:
    first, sibling = load(NGRAM)._derive_tree_links(case.mask.numpy(), len(case.parents), case.batch.nodes)
    links = [retrieve_links(of) for of in case.parents]
    same("retrieve_next_token", first, [list(link[0]) for link in links])
    same("retrieve_next_sibling", sibling, [list(link[1]) for link in links])
