"""Greedy verification of a tree, in the Triton twin of SGLang's CUDA kernel."""

from dataclasses import dataclass
from random import Random

import torch
from hypothesis import strategies as st

from eagletwin.harness.core.patch import Edit
from eagletwin.reference.tree import accept_row, committed_tokens, retrieve_links, walk_greedy

from ..release import TREE, load
from ..tier import Property
from ..trees import Batch, batches
from ..unequal import same

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


def path_is_accepted(case: Verify) -> None:
    check(case.batch, *case.tokens())


def check(batch: Batch, candidates: list[list[int]], argmax: list[list[int]]) -> None:
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
    same("accept_token_num", counts.tolist(), [len(path) - 1 for path in paths])
    same("accept_index", accepts.tolist(), [accept_row(path, first * nodes, width) for first, path in enumerate(paths)])
    expected = torch.full((count, nodes), UNWRITTEN)
    for request, (path, choices) in enumerate(zip(paths, argmax, strict=True)):
        expected[request, path] = torch.tensor(committed_tokens(choices, path))
    same("predicts", predicts.tolist(), expected.flatten().tolist())


KERNEL = f"{TREE}.verify_tree_greedy_kernel_triton"

PROPERTIES = (
    Property(
        "path is accepted",
        st.builds(Verify, batches(), st.integers(1, 3)),
        path_is_accepted,
        (
            Edit(target=KERNEL, match="is_valid & (draft_token == target_token)", replacement="is_valid"),
            Edit(target=KERNEL, match="tl.store(accept_token_num_ptr + bx, num_accept_tokens)", replacement="pass"),
            Edit(target=f"{TREE}.verify_tree_greedy_triton", match="accept_index.shape[1]", replacement="2"),
        ),
    ),
)
