"""At each position of a text: how many of the drafts that a correct engine makes there are in the text.

With x[0..M] committed, a draft of depth j is accepted if all above it were and it is x[M+j]. Under greedy decoding, and where
the target alone accepts a sampled token, the text says all: no draft has to be sampled again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from eagletwin.harness.core.arrays import Array
from eagletwin.reference.draft_heads import DraftRows, behind
from eagletwin.reference.everywhere import chains_everywhere, layers_everywhere, trees_everywhere
from eagletwin.reference.growth import Growth, View, candidates
from eagletwin.reference.mtp import draft_extends

from .draft import DraftModel, on

NO, YES, EITHER = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Shape:
    """What is drafted in a round. num_draft_tokens counts the root; a chain has num_steps + 1."""

    num_steps: int
    topk: int = 1
    num_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Followed:
    """What is accepted behind each prefix x[0..M] of a text x[0..n-1]: row M, for M = 0..n-1. Row 0 means nothing.

    agrees  [n, S] whether the draft of depth j+1 is x[M+j+1], given that those above it are right: NO, YES, or EITHER, where
            the head's choice is too close to tell at the engine's precision. NO where the text has ended
    chosen  [n, S] the same without EITHER: as the reference chooses
    """

    agrees: Array
    chosen: Array

    def accepted(self, committed: int) -> int:
        """a(M): drafts accepted behind x[0..M], as the reference chooses."""
        return int(_in_a_row(self.chosen[committed]))

    @property
    def accepted_everywhere(self) -> Array:
        """[n] a(M) of every M."""
        return _in_a_row(self.chosen)

    def possible(self, committed: int) -> list[int]:
        """All that a(M) may be, as near ties go; in rising order."""
        found = []
        for depth, agrees in enumerate(self.agrees[committed]):
            if agrees != YES:
                found.append(depth)
            if agrees == NO:
                return found
        return [*found, self.agrees.shape[1]]

    @property
    def doubtful(self) -> Array:
        """[n] whether a near tie leaves open how many drafts are accepted."""
        return np.array([len(self.possible(committed)) > 1 for committed in range(len(self.agrees))])


def _in_a_row(chosen: Array) -> Array:
    """Drafts that are accepted before the first that is not. chosen [.., S] -> [..]."""
    accepted: Array = (chosen != NO).cumprod(-1).sum(-1)
    return accepted


def follow_chains(draft: DraftModel, tokens: Sequence[int], hidden: Tensor, num_steps: int, tie: float) -> Followed:
    """Chains behind every prefix of a text. hidden [>= n-1, ..]: what the target hands over.

    tie: two logits that differ by less, as a share of the largest of their row, are too close to tell.
    """
    count = len(tokens)
    ids = torch.tensor(list(tokens), device=hidden.device)
    agrees, chosen = np.full((count, num_steps), NO), np.full((count, num_steps), NO)
    for first, logits in chain_logits(draft, ids, hidden.to(draft.heads[0].embedding.dtype), num_steps):
        for step in range(num_steps):
            known = range(first, min(first + len(logits), count - 1 - step))  # M with M + step + 1 < n
            if known:
                rows = slice(known.start, known.stop)
                said = ids[known.start + step + 1 : known.stop + step + 1]
                agrees[rows, step], chosen[rows, step] = agreement(logits[: len(known), step], said, tie)
    return Followed(agrees, chosen)


def chain_logits(draft: DraftModel, tokens: Tensor, hidden: Tensor, num_steps: int) -> Iterator[tuple[int, Tensor]]:
    """Blocks of (first, logits [C, S, V]): what each draft behind x[0..M], M = first + c, is chosen from; its vocabulary is the
    target's. tokens [n]; hidden [>= n-1, ..] in the head's type."""
    with torch.no_grad(), on(tokens.device):
        if draft.algorithm == "MTP":
            yield from layers_everywhere(draft.heads[:num_steps], draft.chained, tokens, hidden)
        else:
            yield from chains_everywhere(draft.heads[0], tokens, hidden, num_steps)


def agreement(logits: Tensor, said: Tensor, tie: float) -> tuple[Array, Array]:
    """Of choices from logits [C, V]: whether each is the token that was said [C]; and the same without EITHER."""
    best = logits.topk(2)  # a vocabulary has two tokens
    size = torch.where(logits.isinf(), 0, logits).abs().amax(-1)
    own = logits.gather(1, said[:, None])[:, 0]
    is_best = best.indices[:, 0] == said
    lead = torch.where(is_best, best.values[:, 0] - best.values[:, 1], best.values[:, 0] - own)
    close = lead <= tie * size  # -inf, of a token that cannot be proposed, is never close
    agrees = torch.where(close, EITHER, torch.where(is_best, YES, NO))
    return agrees.cpu().numpy(), torch.where(is_best, YES, NO).cpu().numpy()


# Which drafts of a tree lie along a text, at every position of it.
#
# A token of the text is accepted at depth j if it is a proposal of the node above it, which must have been expanded, and if it
# is among the nodes that are verified. Each of the three is a cut in a ranking, and may be too close to tell.


def follow_trees(
    draft: DraftModel, tokens: Sequence[int], hidden: Tensor, shape: Shape, tie: float, view: View = "slot_layout"
) -> Followed:
    """Trees behind every prefix of a text. hidden [>= n-1, ..]; tie as in follow_chains.

    view: whom a node attends to. SGLang's is `slot_layout` (DESIGN 3.4).
    """
    count, head = len(tokens), draft.heads[0]
    agrees, chosen = np.full((count, shape.num_steps), NO), np.full((count, shape.num_steps), NO)
    ids = torch.tensor(list(tokens), device=hidden.device)
    with torch.no_grad(), on(hidden.device):
        ahead = torch.arange(1, shape.num_steps + 1)  # [S]
        grown = trees_everywhere(head, ids, hidden.to(head.embedding.dtype), shape.topk, shape.num_steps, view)
        for first, growth in grown:
            places = torch.arange(first, first + len(growth.logits))[:, None] + ahead  # [C, S]
            trees = _Trees(growth, ids[places.clamp(max=count - 1)], shape, tie, view)
            for number in range(len(places)):
                said = tokens[first + number + 1 : first + number + 1 + shape.num_steps]
                agrees[first + number, : len(said)], chosen[first + number, : len(said)] = trees.along(number, said)
    return Followed(agrees, chosen)


class _Trees:
    """C trees of a block, in plain numbers: all rankings are made at once, and a text then needs few of them.

    proposed   [C, R, k] tokens of each row, best first
    edge       [C, R, ..] the logits on both sides of the cut behind the last of them; one, where no token is left behind it
    own        [C, R, S] the logit, in each row, of the text's token of each depth
    expanded   [C, S-1, k] candidates: the frontier of each step
    close      [C] two logits that differ by less are too close to tell; scores of depth j, sums of so many, by j times that
    verified   the cut between the nodes that are verified and the other candidates
    frontiers  [S-1] at each step, the cut between the candidates that are expanded and the others of their depth
    order      [C] the first depth whose drafts depend on an order of the frontier that is too close to tell; S: none does
    """

    def __init__(self, growth: Growth, said: Tensor, shape: Shape, tie: float, view: View) -> None:
        """said [C, S]: the text's next tokens behind each root; where the text has ended, any."""
        self._topk, logits = shape.topk, growth.logits
        proposed, scores = candidates(logits, growth.expanded, shape.topk)  # [C, R, k]
        self._proposed, self._expanded = proposed.tolist(), growth.expanded.tolist()
        self._edge = _numbers(logits.topk(min(shape.topk + 1, logits.shape[-1])).values[..., shape.topk - 1 :])
        self._own = _numbers(logits.gather(2, said[:, None].expand(-1, logits.shape[1], -1)))
        self._close = tie * _numbers(torch.where(logits.isinf(), 0, logits).abs().amax((1, 2)))
        flat = scores.flatten(1)  # [C, R*k]
        self._verified = _Cut(flat, min(shape.num_draft_tokens - 1, flat.shape[1]))
        self._frontiers = [self._frontier(flat, step) for step in range(shape.num_steps - 1)]
        self._order = np.full(len(flat), shape.num_steps)
        if view == "slot_layout" and shape.topk > 1:
            for step in reversed(range(shape.num_steps - 2)):
                # rows of the next step read what stands under their number
                self._order[self._frontiers[step].near(self._close * (step + 1))] = step + 2

    def along(self, number: int, said: Sequence[int]) -> tuple[list[int], list[int]]:
        """(agrees, chosen) of a text's next tokens in one tree, by depth."""
        agrees: list[int] = []
        chosen: list[int] = []
        row = 0
        for depth, token in enumerate(said):
            if row < 0:  # the node above was not expanded, and it is too close to tell whether it should have been
                return _until_the_end(agrees, chosen, said, EITHER)
            proposed, tie = self._proposed[number][row], self._close[number] * (depth + 1)
            open_ = self._proposal(number, row, depth, token in proposed) or bool(depth >= self._order[number])
            if token not in proposed:
                agrees.append(EITHER if open_ else NO)
                chosen.append(NO)
                return _until_the_end(agrees, chosen, said, agrees[-1])
            candidate = row * self._topk + proposed.index(token)
            here = self._verified.has(number, candidate)
            open_ = open_ or self._verified.close(number, candidate, tie)
            agrees.append(EITHER if open_ else YES if here else NO)
            chosen.append(YES if here else NO)
            if agrees[-1] == NO:
                return _until_the_end(agrees, chosen, said, NO)
            if depth + 1 < len(said):
                row = self._row_of(number, candidate, depth)
                if row < 0 and not self._frontiers[depth].close(number, candidate, tie):
                    return _until_the_end(agrees, chosen, said, NO)
        return agrees, chosen

    def _proposal(self, number: int, row: int, depth: int, inside: bool) -> bool:
        """Whether it is too close to tell if a node proposes the text's token; inside: the reference does."""
        own, edge = self._own[number, row, depth], self._edge[number, row]
        if inside:
            return len(edge) > 1 and bool(own - edge[1] <= self._close[number])
        return bool(edge[0] - own <= self._close[number])

    def _row_of(self, number: int, candidate: int, depth: int) -> int:
        """The row that a candidate of this depth, from 0, was expanded into; -1: it was not."""
        frontier = self._expanded[number][depth]
        return 1 + depth * self._topk + frontier.index(candidate) if candidate in frontier else -1

    def _frontier(self, scores: Tensor, step: int) -> "_Cut":
        first, last = (0, self._topk) if step == 0 else (self._first(step), self._first(step + 1))
        return _Cut(scores[:, first:last], self._topk, first)

    def _first(self, step: int) -> int:
        """The first candidate of a depth, from 0."""
        return self._topk * (1 + (step - 1) * self._topk)


def _until_the_end(agrees: list[int], chosen: list[int], said: Sequence[int], rest: int) -> tuple[list[int], list[int]]:
    """Both, as long as the text's next tokens: of the depths that are left, `rest` may agree, and none is chosen."""
    left = len(said) - len(agrees)
    return [*agrees, *[rest] * left], [*chosen, *[NO] * left]


class _Cut:
    """Of each of C trees, the `count` best of some candidates, the first of which has the number `first`. scores [C, N]."""

    def __init__(self, scores: Tensor, count: int, first: int = 0) -> None:
        self._scores, self._first, self._count = _numbers(scores), first, count
        ranked = scores.sort(descending=True, stable=True)
        self._ranked, self._inside = _numbers(ranked.values[:, : count + 1]), ranked.indices[:, :count].tolist()

    def has(self, number: int, candidate: int) -> bool:
        return candidate - self._first in self._inside[number]

    def close(self, number: int, candidate: int, tie: float) -> bool:
        """Whether it is too close to tell on which side of the cut a candidate is."""
        own, ranked = self._scores[number, candidate - self._first], self._ranked[number]
        if not self.has(number, candidate):
            return bool(ranked[self._count - 1] - own <= tie)
        return len(ranked) > self._count and bool(own - ranked[self._count] <= tie)

    def near(self, tie: Array) -> Array:
        """[C] whether the order of the best ones is too close to tell. tie [C]."""
        gaps = -np.diff(self._ranked)  # of neighbours in rank
        close: Array = gaps.min(1, initial=np.inf) <= tie
        return close


def _numbers(tensor: Tensor) -> Array:
    found: Array = tensor.cpu().numpy()
    return found


# The rounds of a draft of several layers whose provisional rows stay, as in SGLang's layout (DESIGN 3.7, `last_fed`).
#
# A row of layer k that was written before its token was committed holds the draft of it. Where verification refused that draft,
# the row stays wrong. So what is proposed depends on the rounds before: where each began. A prompt's last chunks are alike: one
# that ends in front of the prompt's last token looks ahead of the prompt, at what was not said yet.

_BLOCK = 128  # rows that are computed at once, before it is known which rounds wrote them


def follow_last_fed(
    draft: DraftModel,
    tokens: Sequence[int],
    hidden: Tensor,
    begin: int,
    num_steps: int,
    tie: float,
    starts: Sequence[int] | None,
    cuts: Sequence[int] = (),
) -> Followed:
    """What is accepted at the rounds of a text whose token x[begin] was the first that was emitted; elsewhere, nothing.

    starts: M of the rounds that an engine made; None: those that follow from what the layers propose. cuts: where chunks of the
    prompt ended in front of its end, in rising order.

    Where rounds began decides what the rows behind them say, and these say where the next ones begin. So a block of rows is
    computed for the rounds that are supposed, then for those that it leads to, until they are the same. With each turn one
    more round is right, if not all: what a round says depends on the rounds before it alone.
    """
    count, heads = len(tokens), draft.heads[:num_steps]
    ids = torch.tensor(list(tokens), device=hidden.device)
    states = hidden.to(heads[0].embedding.dtype)
    found = Followed(np.full((count, num_steps), NO), np.full((count, num_steps), NO))
    stored: list[DraftRows | None] = [None] * len(heads)
    end, committed = 0, begin  # rows that are stored; M of the round that comes
    with torch.no_grad(), on(hidden.device):
        while committed < count - 1:
            stop = min(max(committed, end + _BLOCK), count - 1)
            rounds = [committed] if starts is None else [start for start in starts if committed <= start <= stop]
            while True:
                ends = _writing_rounds(rounds, end, stop)
                known = list(ends)
                for first, cut in pairwise((0, *cuts)) if not end else ():  # the prompt's rows; its end alone is known to them
                    ends[first:cut], known[first:cut] = [cut] * (cut - first), [begin - 1] * (cut - first)
                to, of = (torch.tensor(those, device=ids.device) for those in (known, ends))
                rows = draft_extends(heads, draft.chained, ids, states, range(end, stop), to, of, stored)
                said = _follow_rows(rows, ids, range(end, stop), tie)
                leads_to = list(_walk(said, end, committed, stop)) if starts is None else rounds
                if leads_to == rounds:
                    break
                rounds = leads_to
            last = rounds[-1]
            kept = [_first(layer, last - end) for layer in rows]
            stored = [behind(old, new) for old, new in zip(stored, kept, strict=True)]
            for start in rounds:
                found.agrees[start], found.chosen[start] = said.agrees[start - end], said.chosen[start - end]
            end = last
            committed = last + found.accepted(last) + 1 if starts is None else next((n for n in starts if n > last), count)
    return found


def _writing_rounds(rounds: Sequence[int], end: int, stop: int) -> list[int]:
    """M of the round that writes each of the rows end..stop-1; behind the last round it makes no difference."""
    spans = [round - before for before, round in pairwise([end, *rounds])]
    known = [round for round, span in zip(rounds, spans, strict=True) for _ in range(span)]
    return known + [stop] * (stop - rounds[-1])


def _walk(said: Followed, end: int, first: int, stop: int) -> Iterator[int]:
    """M of the rounds from the first on, as far as their rows are there."""
    start = first
    while start <= stop:
        yield start
        start += said.accepted(start - end) + 1


def _follow_rows(rows: Sequence[DraftRows], ids: Tensor, of: range, tie: float) -> Followed:
    """What is accepted behind x[0..M] for M = of.start..of.stop, by M - of.start; row 0 means nothing."""
    agrees, chosen = (np.full((len(of) + 1, len(rows)), NO) for _ in range(2))
    for step, layer in enumerate(rows):
        text = ids[of.start + step + 2 : of.stop + step + 2]  # x[M + step + 1]
        if len(text):
            here = slice(1, len(text) + 1), step
            agrees[here], chosen[here] = agreement(layer.logits[: len(text)], text, tie)
    return Followed(agrees, chosen)


def _first(rows: DraftRows, count: int) -> DraftRows:
    return DraftRows(rows.hidden[:count], rows.logits[:count], rows.keys[:, :count], rows.values[:, :count])
