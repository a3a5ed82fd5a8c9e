"""Acceptance in figures, with intervals; the smallest loss that answers would have shown; what rejection sampling expects."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from eagletwin.cases.entry import Condition
from eagletwin.harness.core.arrays import Array

from .conditions import CONDITIONS, Seen
from .draft import DraftModel
from .follow import Followed, chain_logits
from .rounds import walk
from .server import Started

# What share of drafts is accepted: by depth, by the length of the prompt, by the place in the text, with confidence intervals.
#
# Shares are over all positions of what follows the prompts, not over an engine's rounds alone, which are a third of them: each
# position is a round that some engine could have begun. The intervals are bootstrapped over texts, since positions of one text
# are not independent.

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


# How small a loss answers would have shown.
#
# A round that must accept k drafts, however near ties go, shows the loss of any of them: these drafts are at stake. A bug that
# loses each by chance, one in N, leaves D of them all right with probability (1 - 1/N)**D. Greedy answers to one prompt are one
# text, and a wrong draft in it is as wrong in each: a text counts once.

_MISSED = 0.05  # of runs in which a loss of this size would not show


class Stake(Struct, frozen=True, kw_only=True):
    """Answers of a condition.

    prompts  to which there is one; None: whether an answer has the condition is not known of any
    drafts   at stake in their texts; of several ways in which a prompt may have been read, any may hide a loss: none is then
    one_in   N of the smallest loss that shows in 95 of 100 such runs: one draft in N; 0: no loss would
    """

    prompts: int | None
    drafts: int
    one_in: int


class Power(Struct, frozen=True, kw_only=True):
    """What a verdict could have been given on.

    every       all answers
    conditions  those of each condition
    merged      answers whose rounds are known in number alone, since chunks of the stream arrived together
    slack       rounds that such an answer may lose unseen, at most
    any_loss    whether a server that accepts nothing would have been found out
    """

    every: Stake
    conditions: Mapping[Condition, Stake]
    merged: int
    slack: int
    any_loss: bool


def power_of(all_seen: Sequence[Seen], started: Started) -> Power:
    """The power of some answers."""
    having = {name: [holds(seen, started) for seen in all_seen] for name, holds in CONDITIONS.items()}
    compared = [seen.compared for seen in all_seen if not seen.compared.told]
    return Power(
        every=_stake(all_seen),
        conditions={
            name: _stake(
                [seen for seen, has in zip(all_seen, known, strict=True) if has], known=any(one is not None for one in known)
            )
            for name, known in having.items()
        },
        merged=len(compared),
        slack=max((one.deserved.most - one.deserved.fewest for one in compared), default=0),
        any_loss=any(seen.compared.at_stake for seen in all_seen),
    )


def _stake(those: Sequence[Seen], *, known: bool = True) -> Stake:
    texts = {
        (seen.sent.answer.prompt, seen.sent.answer.tokens): seen.compared.at_stake
        for seen in those
        if seen.compared.told and len(seen.ways) == 1
    }
    drafts = sum(texts.values())
    prompts = len({seen.sent.number for seen in those}) if known else None
    return Stake(prompts=prompts, drafts=drafts, one_in=int(1 / (1 - _MISSED ** (1 / drafts))) if drafts else 0)


# What rejection sampling deserves along a text: an expectation, and whether a server's rounds are within chance of it.
#
# The draft draws d from q, and verify keeps it with probability min(1, p(d) / q(d)); where it does not, a token is drawn from
# what p has more of than q. So the next token is x with probability p(x) in all, and with probability min(p(x), q(x)) as a
# draft that was kept (Leviathan et al. 2023, Chen et al. 2023). Of a text that came back, the draft of its next token was
# therefore kept with probability min(1, q(x) / p(x)), whatever was drawn before it: the rounds of a text are a walk with known
# chances.

# Of servers that are right, one in 16,000 is further off than this by chance.
MOST_DEVIATIONS = 4.0
_SHOWN = 1.645  # deviations above which 95 of 100 lie


@dataclass(frozen=True, slots=True)
class Expected:
    """Rounds of texts: their expectation, and the variance of their sum. Texts are independent, given what they say."""

    rounds: float
    variance: float

    def __add__(self, other: "Expected") -> "Expected":
        return Expected(self.rounds + other.rounds, self.variance + other.variance)

    @property
    def smallest_loss(self) -> float:
        """Rounds by which a server must be off for 95 of 100 runs to show it."""
        return float((MOST_DEVIATIONS + _SHOWN) * self.variance**0.5)

    def deviations(self, used: int) -> float:
        """How many standard deviations a number of rounds is off; 0 where nothing is left to chance and none is."""
        off = used - self.rounds
        return off / max(self.variance, 1e-12) ** 0.5 if abs(off) > 1e-6 else 0.0


def chances(
    draft: DraftModel, tokens: Sequence[int], hidden: Tensor, said: Tensor, num_steps: int, temperature: float
) -> Array:
    """[n, S] the probability that the draft of depth j+1 behind x[0..M] was kept, given the text and that those above it were.

    said [n-1]: log p(x[i+1]) of the target, at this temperature and without cuts. 0 where the text has ended.
    """
    count, ids = len(tokens), torch.tensor(list(tokens), device=hidden.device)
    kept = np.zeros((count, num_steps))
    for first, logits in chain_logits(draft, ids, hidden.to(draft.heads[0].embedding.dtype), num_steps):
        for step in range(num_steps):
            known = range(first, min(first + len(logits), count - 1 - step))
            if known:
                rows = slice(known.start, known.stop)
                following = ids[known.start + step + 1 : known.stop + step + 1]
                drawn = (logits[: len(known), step] / temperature).log_softmax(-1)
                of_draft = drawn.gather(1, following[:, None])[:, 0]
                of_target = said[known.start + step : known.stop + step].to(of_draft)
                kept[rows, step] = (of_draft - of_target).exp().clamp(max=1).cpu().numpy()
    return kept


def expected_rounds(kept: Array, begin: int) -> Expected:
    """The rounds of a text whose token x[begin] was the first that was emitted. kept [n, S]: of `chances`."""
    last = len(kept) - 1
    mean, square = np.zeros(last + 1), np.zeros(last + 1)  # of the rounds from each M on
    for place in range(last - 1, begin - 1, -1):
        above = 1.0
        for drafts in range(kept.shape[1] + 1):
            stops = 1.0 if drafts == kept.shape[1] else 1 - float(kept[place, drafts])
            end = min(place + drafts + 1, last)
            chance = above * stops
            mean[place] += chance * (1 + mean[end])
            square[place] += chance * (1 + 2 * mean[end] + square[end])
            above *= 1 - stops
    return Expected(float(mean[begin]), max(0.0, float(square[begin] - mean[begin] ** 2)))
