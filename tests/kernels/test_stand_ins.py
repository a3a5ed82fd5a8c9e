"""What stands in for SGLang's CUDA C++ where a release has no Triton twin of it: held against the twins of this release."""

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from eagletwin.harness.commands.kernels.properties.sampling import SamplingCase
from eagletwin.harness.commands.kernels.properties.tree import FULL, QLEN, TreeBuild, build
from eagletwin.harness.commands.kernels.release import TREE, load
from eagletwin.harness.commands.kernels.trees import Batch, Tree, batches
from eagletwin.harness.engines.inside.blame import BadArguments
from eagletwin.harness.engines.sglang.stand_ins import sgl_kernel

from . import cuts
from .sampled_trees import coin_of_zero, tree_is_sampled, trees


@settings(max_examples=60, deadline=None)
@given(batches(), st.sampled_from((FULL, QLEN)))
def test_a_tree_is_built_as_the_twin_builds_it(batch: Batch, mode: int) -> None:
    twin = build(TreeBuild(batch, mode))
    ours = stand_in(batch, mode)
    for expected, found in zip(twin[:5], ours, strict=True):
        assert expected.tolist() == found.tolist()


def test_nothing_leads_to_a_node_whose_parent_was_not_selected() -> None:
    """The worker must go on, so that the judge sees what was selected, as it does with the twins of later releases."""
    broken = Batch(2, 2, 3, (Tree(2, 2, ((0, 1), (2, 4)), (1, 2)),), (5,), 0)  # candidate 2 is a child of candidate 0
    mask, positions, _, first, sibling = stand_in(broken, QLEN)
    assert first.tolist() == [[1, -1, -1]]
    assert sibling.tolist() == [[-1, -1, -1]]
    assert positions.tolist() == [5, 6, 5]
    assert mask.view(3, 3).int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 0, 1]]


def stand_in(batch: Batch, mode: int) -> tuple[Tensor, ...]:
    """Mask, positions, index and links, in buffers as SGLang 0.5.13 makes them."""
    count, nodes = len(batch.lengths), batch.nodes
    area = count * nodes**2 + (sum(batch.lengths) * nodes if mode == FULL else 0)
    mask = torch.full((area,), True)
    positions = torch.empty(count * nodes, dtype=torch.int64)
    index, first, sibling = torch.full((3, count, nodes), -1)
    lengths = torch.tensor(batch.lengths, dtype=torch.int64)
    sgl_kernel.build_tree_kernel_efficient(
        *(batch.parent_list, batch.selected, lengths, mask, positions, index, first, sibling),
        *(batch.topk, batch.num_steps, nodes, mode),
    )
    return mask, positions, index, first, sibling


@settings(max_examples=60, deadline=None)
@given(batches(), st.integers(1, 3))
def test_a_tree_is_walked_as_the_twin_walks_it(batch: Batch, vocabulary: int) -> None:
    count, nodes, random = len(batch.lengths), batch.nodes, Random(batch.seed)
    _, _, index, first, sibling = stand_in(batch, QLEN)
    candidates, argmax = (torch.tensor([random.randrange(vocabulary) for _ in range(count * nodes)]) for _ in range(2))
    results = []
    for walk in (load(TREE).verify_tree_greedy_triton, sgl_kernel.verify_tree_greedy):
        out = {
            "predicts": torch.full((count * nodes,), -77, dtype=torch.int32),
            "accept_index": torch.full((count, batch.num_steps + 1), -1, dtype=torch.int32),
            "accept_token_num": torch.full((count,), -77, dtype=torch.int32),
        }
        spelled = "retrieve" if walk is not sgl_kernel.verify_tree_greedy else "retrive"
        links = {f"{spelled}_index": index, f"{spelled}_next_token": first, f"{spelled}_next_sibling": sibling}
        of_nodes = {"candidates": candidates.long(), "target_predict": argmax.long()}
        walk(**out, **links, **{name: tensor.reshape(count, nodes) for name, tensor in of_nodes.items()})
        results.append([tensor.tolist() for tensor in out.values()])
    assert results[0] == results[1]


@settings(max_examples=60, deadline=None)
@given(trees())
def test_a_tree_is_sampled_as_the_reference_follows_it(case: SamplingCase) -> None:
    """sgl_kernel's has no twin. tests/gpu holds it to the same."""
    tree_is_sampled(case, sgl_kernel.tree_speculative_sampling_target_only)


@settings(max_examples=60, deadline=None)
@given(cuts.rows())
def test_rows_are_cut_as_the_reference_cuts_them(case: cuts.Rows) -> None:
    cuts.largest_are_kept(case, sgl_kernel.top_k_renorm_prob)
    cuts.mass_is_kept(case, sgl_kernel.top_p_renorm_prob)


def test_a_coin_of_zero_is_decided_as_sgl_kernel_decides_it_up_to_0_5_20() -> None:
    decided, illegal = coin_of_zero(sgl_kernel.tree_speculative_sampling_target_only)
    assert decided.paths == [[0, 1]]
    assert illegal is not None
    assert illegal.why == "the target never draws this token"


def test_what_a_kernel_cannot_take_is_refused_as_the_callers_fault() -> None:
    """A length below 0, an index outside of the results, a token outside of the vocabulary, a slot that no state has."""
    ones, links = torch.ones(1, 2, dtype=torch.int64), torch.full((1, 2), -1)
    results = torch.zeros(2, dtype=torch.int64), torch.zeros(1, 2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    lengths, mask, places = torch.tensor([-1]), torch.ones(4, dtype=torch.bool), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(BadArguments, match="a mask of 4"):
        sgl_kernel.build_tree_kernel_efficient(
            *(ones, ones[:, :1], lengths, mask, places, links, links.clone(), links.clone()), *(1, 1, 2, QLEN)
        )
    with pytest.raises(BadArguments, match="an index leads outside"):
        sgl_kernel.verify_tree_greedy(*results, ones, ones + 1, links, links, ones)
    first, probs = torch.tensor([[1, -1]]), torch.ones(1, 2, 1)
    with pytest.raises(BadArguments, match="an index leads outside"):
        sgl_kernel.tree_speculative_sampling_target_only(
            *(*results, ones, torch.arange(2)[None], first, links, torch.zeros(1, 2), torch.zeros(1), probs, probs.clone())
        )
    rows = torch.ones(1, 1, 1, 1)
    with pytest.raises(BadArguments, match="an index leads outside"):
        sgl_kernel.chunk_gated_delta_rule(
            *(rows, rows, rows, rows[..., 0], rows[..., 0]),
            initial_state=torch.zeros(2, 1, 1, 1),
            initial_state_indices=torch.tensor([2]),
            cu_seqlens=torch.tensor([0, 1]),
        )
