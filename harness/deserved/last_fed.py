"""The rounds of a draft of several layers whose provisional rows stay, as in SGLang's layout (DESIGN 3.7, `last_fed`).

A row of layer k that was written before its token was committed holds the draft of it. Where verification refused that draft,
the row stays wrong. So what is proposed depends on the rounds before: where each began. A prompt's last chunks are alike: one
that ends in front of the prompt's last token looks ahead of the prompt, at what was not said yet.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from eagletwin.reference.draft_heads import DraftRows, behind
from eagletwin.reference.mtp import draft_extends

from .device import on
from .draft import DraftModel
from .follow import NO, Followed, agreement

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
            rounds = [committed] if starts is None else _from(starts, committed, stop)
            while True:
                ends = _written(rounds, end, stop)
                known = list(ends)
                for first, cut in pairwise((0, *cuts)) if not end else ():  # the prompt's rows; its end alone is known to them
                    ends[first:cut], known[first:cut] = [cut] * (cut - first), [begin - 1] * (cut - first)
                to, of = (torch.tensor(those, device=ids.device) for those in (known, ends))
                rows = draft_extends(heads, draft.chained, ids, states, range(end, stop), to, of, stored)
                said = _said(rows, ids, range(end, stop), tie)
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


def _from(starts: Sequence[int], first: int, stop: int) -> list[int]:
    return [start for start in starts if first <= start <= stop]


def _written(rounds: Sequence[int], end: int, stop: int) -> list[int]:
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


def _said(rows: Sequence[DraftRows], ids: Tensor, of: range, tie: float) -> Followed:
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
