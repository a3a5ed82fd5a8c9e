"""What share of drafts is accepted: by depth, by the length of the prompt, by the place in the text, with confidence intervals.

Shares are over all positions of what follows the prompts, not over an engine's rounds alone, which are a third of them: each
position is a round that some engine could have begun. The intervals are bootstrapped over texts, since positions of one text
are not independent.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import Struct

from eagletwin.harness.core.arrays import Array

from .follow import Followed
from .walk import walk

RESAMPLES, LEVEL = 1000, 0.95


class Interval(Struct, frozen=True):
    """A figure, and the 95 % confidence interval of it."""

    value: float
    low: float
    high: float


class Depth(Struct, frozen=True, kw_only=True):
    """A draft position j = 1.. of a chain or a depth of a tree.

    reached      positions at which all drafts above it were accepted, and the text goes on
    conditional  share of those at which it was accepted as well
    cumulative   share of all positions at which it was accepted
    """

    depth: int
    reached: int
    conditional: Interval
    cumulative: Interval


class Span(Struct, frozen=True, kw_only=True):
    """Texts or positions of a range [begin, end): how many, and the mean number of accepted drafts."""

    begin: int
    end: int
    count: int
    accepted: float


class Figures(Struct, frozen=True, kw_only=True):
    """What a pair deserves on some texts.

    rounds         of an engine that begins where each prompt ends
    accept_length  tokens a round, as SGLang counts them: tokens emitted / verify rounds
    fewest, most   rounds, as near ties go
    doubtful       share of positions that a near tie leaves open
    """

    texts: int
    tokens: int
    rounds: int
    fewest: int
    most: int
    accept_length: Interval
    positions: int
    doubtful: float
    depths: tuple[Depth, ...]
    by_prompt_length: tuple[Span, ...]
    by_place: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Text:
    """A text that was followed, and where its prompt ends."""

    tokens: Sequence[int]
    begin: int
    followed: Followed


@dataclass(frozen=True, slots=True)
class _Counted:
    """One text in numbers.

    tokens, rounds               behind the prompt
    drafts                       [P] accepted at each position that goes on, the first behind the prompt
    reached, accepted, possible  [S] by depth: at how many positions it was reached, was accepted, and lies in the text
    """

    tokens: int
    rounds: int
    drafts: Array
    reached: Array
    accepted: Array
    possible: Array


def figures(texts: Sequence[Text], num_steps: int) -> Figures:
    """The figures of some texts, at least one of which has a position to draft from."""
    walks = [walk(text.followed, text.begin) for text in texts]
    counted = [_count(text, found.rounds, num_steps) for text, found in zip(texts, walks, strict=True)]
    resampled = np.random.default_rng(0).integers(0, len(texts), (RESAMPLES, len(texts)))
    table = {
        name: np.array([getattr(one, name) for one in counted], np.float64)
        for name in ("tokens", "rounds", "reached", "accepted", "possible")
    }

    def share(of: Callable[[dict[str, Array]], Array]) -> list[Interval]:
        values = np.atleast_1d(of({name: part.sum(0) for name, part in table.items()}))
        again = of({name: part[resampled].sum(1) for name, part in table.items()}).reshape(RESAMPLES, -1)
        low, high = np.nanquantile(again, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=0)
        return [Interval(*map(float, row)) for row in zip(values, low, high, strict=True)]

    with np.errstate(invalid="ignore", divide="ignore"):
        conditional = share(lambda sums: sums["accepted"] / np.maximum(sums["reached"], 1))
        cumulative = share(lambda sums: sums["accepted"] / np.maximum(sums["possible"], 1))
        length = share(lambda sums: sums["tokens"] / np.maximum(sums["rounds"], 1))[0]
    doubtful = [text.followed.doubtful[text.begin : -1] for text in texts]
    return Figures(
        texts=len(texts),
        tokens=sum(one.tokens for one in counted),
        rounds=sum(one.rounds for one in counted),
        fewest=sum(found.fewest for found in walks),
        most=sum(found.most for found in walks),
        accept_length=length,
        positions=sum(map(len, doubtful)),
        doubtful=float(np.concatenate(doubtful).mean()),
        depths=tuple(
            Depth(
                depth=step + 1,
                reached=int(table["reached"][:, step].sum()),
                conditional=conditional[step],
                cumulative=cumulative[step],
            )
            for step in range(num_steps)
        ),
        by_prompt_length=_parts([(text.begin, one.drafts) for text, one in zip(texts, counted, strict=True)]),
        by_place=_parts([(place, one.drafts[place : place + 1]) for one in counted for place in range(len(one.drafts))]),
    )


def _count(text: Text, rounds: int, num_steps: int) -> _Counted:
    drafts, steps = text.followed.accepted_everywhere[text.begin : -1], np.arange(num_steps)
    known = np.arange(len(drafts), 0, -1)[:, None] > steps  # tokens that follow each position
    return _Counted(
        tokens=len(text.followed.agrees) - text.begin,
        rounds=rounds,
        drafts=drafts,
        reached=(known & (drafts[:, None] >= steps)).sum(0),
        accepted=(known & (drafts[:, None] > steps)).sum(0),
        possible=known.sum(0),
    )


def _parts(found: Sequence[tuple[int, Array]]) -> tuple[Span, ...]:
    """Mean accepted drafts of what lies at 0, 1, 2-3, 4-7, ..: ranges that double."""
    binned: dict[int, list[Array]] = {}
    for place, accepted in found:
        binned.setdefault(place.bit_length(), []).append(accepted)
    return tuple(
        Span(begin=1 << bits >> 1, end=1 << bits, count=len(values), accepted=float(values.mean()))
        for bits, values in ((bits, np.concatenate(parts)) for bits, parts in sorted(binned.items()))
        if len(values)
    )
