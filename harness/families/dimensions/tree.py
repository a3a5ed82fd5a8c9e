"""The draft tree: how many steps, branches and nodes a round has."""

from collections.abc import Iterator

from msgspec.structs import replace

from eagletwin.harness.core.case import Case
from eagletwin.harness.core.terminal import count
from eagletwin.reference.sizes import count_candidates

from .dimension import Dimension, Refusal


def _single_step(case: Case) -> Iterator[Case]:
    """With as many nodes as before, or as there can be; of a chain nothing is said."""
    nodes = max(2, min(case.num_draft_tokens, count_candidates(case.topk, 1) + 1))
    yield replace(case, num_steps=1, num_draft_tokens=nodes if case.topk > 1 and case.num_draft_tokens else 0)


def _refusals(case: Case) -> Iterator[Refusal]:
    most = count_candidates(case.topk, case.num_steps) + 1
    if case.verify_nodes < 2:
        yield f"num_draft_tokens {case.verify_nodes}: nothing would be drafted", "use 2 or more"
    if case.topk > 1 and case.verify_nodes > most:
        yield (
            f"num_draft_tokens {case.verify_nodes}: a tree of topk {case.topk} and {count(case.num_steps, 'step')} has "
            f"{most} nodes",
            f"use 2 to {most}; below {case.num_steps + 1} the worker dies of the ledger's small-tree",
        )


TREE = Dimension(
    name="topk",
    words="trees",
    key="trees",
    has=lambda case: case.topk > 1,
    size=lambda case: case.topk,
    says=lambda case: f"topk {case.topk}",
    plain="topk 1",
    without=lambda case: iter([replace(case, topk=1, num_draft_tokens=0)]),
    refusals=_refusals,
    kinds={"tree": lambda case: case.topk > 1},
)
STEPS = Dimension(
    name="num_steps",
    words="several steps",
    has=lambda case: case.num_steps > 1,
    size=lambda case: case.num_steps,
    says=lambda case: f"num_steps {case.num_steps}",
    plain="num_steps 1",
    without=_single_step,
)
NODES = Dimension(
    name="num_draft_tokens",
    words="tree size",
    has=lambda case: case.topk > 1 and case.verify_nodes != case.num_steps + 1,
    size=lambda case: case.verify_nodes,
    says=lambda case: f"num_draft_tokens {case.verify_nodes}",
    plain="num_steps + 1 of them",
    without=lambda case: iter([replace(case, num_draft_tokens=0)]),
)


def _small(case: Case) -> bool:
    return case.verify_nodes <= case.num_steps


SMALL = Dimension(
    name="tree_size",
    words="trees with fewer nodes than their longest path",
    key="small-trees",
    has=_small,
    kinds={"small_tree": _small},
)
CHAINS = Dimension(name="chains", words="chains", key="chains", has=lambda case: case.topk == 1)
DIMENSIONS = (CHAINS, TREE, STEPS, NODES, SMALL)
