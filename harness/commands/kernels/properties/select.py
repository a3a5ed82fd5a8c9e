"""What is drafted: the growth of a tree step by step, its re-ranking, and the fused top-1 of a chain."""

from dataclasses import dataclass
from random import Random
from unittest.mock import patch

import torch
from hypothesis import strategies as st
from torch import Tensor

from eagletwin.reference.sizes import count_candidates
from eagletwin.reference.tree import as_good, best, child_scores, continued_rows, first_frontier, frontier_numbers, rerank

from ..release import SPEC, TOPK1, UTILS, load, module
from ..tier import fault, holds_for, same, true

LEVELS = 4  # how many different probabilities there are where ties are wanted
INF, NAN = float("inf"), float("nan")


@dataclass(frozen=True)
class Growth:
    """num_steps steps of growth. Row r of a step's proposals belongs to frontier node r of all requests."""

    count: int
    topk: int
    num_steps: int
    nodes: int
    ties: bool
    hidden: bool
    seed: int

    def proposals(self, step: int) -> tuple[Tensor, Tensor]:
        """Probabilities, falling in each row, and tokens, all different: [bs, k] for step 0, else [bs * k, k]."""
        random, rows = Random(self.seed * 31 + step), self.count * (self.topk if step else 1)

        def level() -> float:
            return random.randrange(1, LEVELS + 1) / LEVELS if self.ties else random.random()

        chances = [sorted((level() for _ in range(self.topk)), reverse=True) for _ in range(rows)]
        tokens = torch.arange(rows * self.topk).reshape(rows, self.topk) + step * 10_000
        return torch.tensor(chances, dtype=torch.float32).reshape(rows, self.topk), tokens


@st.composite
def growths(draw: st.DrawFn) -> Growth:
    topk, num_steps = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    nodes = draw(st.integers(2, min(count_candidates(topk, num_steps), 12) + 1))
    return Growth(
        draw(st.integers(0, 3)), topk, num_steps, nodes, draw(st.booleans()), draw(st.booleans()), draw(st.integers(0, 999))
    )


LATER = f"{SPEC}._select_top_k_tokens_later"


@holds_for(
    growths(),
    fault(f"{SPEC}._select_top_k_tokens_first", "torch.arange(-1, topk", "torch.arange(0, topk + 1"),
    fault(LATER, "flat_cs // topk +", "flat_cs % topk +"),
    fault(LATER, "scores.unsqueeze(2) *", "scores.unsqueeze(2) +"),
    fault(LATER, "(i - 1)", "i"),
    fault(f"{UTILS}.organize_draft_results", "torch.sort(top_scores_index).values", "top_scores_index"),
)
def tree_grows(case: Growth) -> None:
    """Every step from SGLang's own choice of the one before: equal scores may be chosen between freely."""
    count, topk = case.count, case.topk
    hidden = torch.arange(count * 2.0).reshape(count, 2) if case.hidden else None
    scores = None
    lists: tuple[list[Tensor], list[Tensor], list[Tensor]] = ([], [], [])
    for step in range(case.num_steps):
        chances, tokens = case.proposals(step)
        ids, carried, after, info = load(SPEC).select_top_k_tokens(step, chances, tokens, hidden, scores, topk)
        for items, item in zip(lists, info, strict=True):
            items.append(item)
        if step == 0:
            same("input ids", ids, tokens.flatten().tolist())
            same("scores", after, chances)
            same("scores of the step", info[0], [[row] for row in chances.tolist()])
            same("tokens of the step", info[1].tolist(), tokens.tolist())
            same("parents of the step", info[2], [first_frontier(topk).tolist()] * count)
            rows = [request for request in range(count) for _ in range(topk)]
        else:
            assert scores is not None
            rows = []
            for request in range(count):
                branches = slice(request * topk, (request + 1) * topk)
                children = child_scores(scores[request], chances[branches])
                flat, proposed = children.flatten().tolist(), tokens[branches].flatten().tolist()
                numbers = info[2][request].tolist()
                places = [number - frontier_numbers(step, topk, [0])[0] for number in numbers]
                true(f"places {places} have the best of the scores {flat}", as_good(flat, places))
                if not case.ties:
                    same("chosen places", places, best(flat, topk))
                same("input ids", ids[branches], [proposed[place] for place in places])
                same("scores", after[request], [flat[place] for place in places])
                same("scores of the children", info[0][request], children)
                same("tokens of the children", info[1][request].tolist(), proposed)
                rows += [request * topk + row for row in continued_rows(places, topk)]
        same("no hidden states", carried is None, hidden is None)
        if hidden is not None:
            same("hidden states", carried, hidden[rows])
            hidden = torch.arange(count * topk * 2.0).reshape(count * topk, 2) + 100 * step  # what the step's forward returns
        scores = after
    tree_is_ranked(case, *lists)


def tree_is_ranked(case: Growth, scores: list[Tensor], tokens: list[Tensor], parents: list[Tensor]) -> None:
    parent_list, selected, drafted = load(UTILS).organize_draft_results(scores, tokens, parents, case.nodes)
    flat = torch.cat([part.flatten(1) for part in scores], 1).tolist()
    proposed = torch.cat(tokens, 1).tolist()
    for request, chosen in enumerate(selected.tolist()):
        same("selected, in rising order", chosen, sorted(set(chosen)))
        true(
            f"selected {chosen} have the best of the scores {flat[request]}",
            as_good(flat[request], sorted(chosen, key=lambda c: -flat[request][c])),
        )
        if not case.ties:
            same("selected", chosen, rerank(flat[request], case.nodes))
        same("drafted tokens", drafted[request], [proposed[request][c] for c in chosen])
    expected = [] if case.num_steps == 1 else [part.tolist() for part in parents[:-1]]
    same(
        "parent_list",
        parent_list.tolist(),
        [[entry for part in expected for entry in part[request]] for request in range(case.count)],
    )


@dataclass(frozen=True)
class Top1:
    """Logits drawn from few values, so that most rows have ties; `block` is the kernel's share of the vocabulary."""

    count: int
    vocabulary: int
    block: int
    values: tuple[float, ...]
    column: int | None  # of the buffer of drafted tokens; None: no buffer
    seed: int

    @property
    def logits(self) -> Tensor:
        random = Random(self.seed)
        rows = [[random.choice(self.values) for _ in range(self.vocabulary)] for _ in range(self.count)]
        return torch.tensor(rows, dtype=torch.float32).reshape(self.count, self.vocabulary)


@st.composite
def top1s(draw: st.DrawFn) -> Top1:
    """One value at least is a number, and none is as small as what the kernel puts in the place of a NaN."""
    rest = draw(st.lists(st.sampled_from([1.5, 0.0, -1e6, 3e38, -INF, NAN]), max_size=3))
    count, vocabulary = draw(st.integers(0, 3)), draw(st.integers(1, 40))
    block, column = draw(st.sampled_from([4, 16, 8192])), draw(st.none() | st.integers(0, 3))
    case = Top1(count, vocabulary, block, (-2.0, *rest), column, draw(st.integers(0, 999)))
    good = case.logits.isfinite().any(1).all()
    return case if good else Top1(count, vocabulary, block, (-2.0, 7.0), column, case.seed)


PARTIAL, FINAL = f"{TOPK1}._draft_topk1_partial_argmax_kernel", f"{TOPK1}._draft_topk1_finalize_kernel"


@holds_for(
    top1s(),
    fault(PARTIAL, "split * BLOCK + local_index", "local_index"),
    fault(PARTIAL, "offsets < vocab_size", "offsets < vocab_size - 1"),
    fault(FINAL, "position + 1", "position"),
    fault(f"{TOPK1}.draft_topk1_postprocess", "draft_tokens.stride(0) if", "draft_tokens.shape[1] if"),
)
def top1_is_drafted(case: Top1) -> None:
    logits = torch.cat([case.logits, torch.full((case.count, 3), 1e9)], 1)[:, : case.vocabulary]  # rows with something between
    positions, drafted = torch.arange(case.count) + 40, torch.full((case.count, 5), -77)
    given = (None, 0) if case.column is None else (drafted[:, :4], case.column)
    with patch.object(module(TOPK1), "_DRAFT_TOPK1_BLOCK", case.block):
        chances, index = load(TOPK1).draft_topk1_postprocess(logits, positions, *given)
    expected = [best(row, 1)[0] for row in case.logits.tolist()]
    same("drafted token", index, [[token] for token in expected])
    same("chances", chances, [[1.0]] * case.count)
    same("positions", positions, [41 + row for row in range(case.count)])
    if case.column is not None:
        same("its column of the buffer", drafted[:, case.column], expected)
        drafted[:, case.column] = -77
    true("the rest of the buffer is untouched", bool((drafted == -77).all()))


@holds_for(
    top1s(),
    fault(f"{TOPK1}.draft_topk1_argmax_only", "next_token_logits, scratch", "-next_token_logits, scratch"),
)
def top1_is_selected(case: Top1) -> None:
    chances, index = load(TOPK1).draft_topk1_argmax_only(case.logits)
    same(
        "token and probability",
        (index.tolist(), chances.tolist()),
        ([[best(row, 1)[0]] for row in case.logits.tolist()], [[1.0]] * case.count),
    )
