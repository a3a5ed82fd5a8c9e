"""How small a loss answers would have shown.

A round that must accept k drafts, however near ties go, shows the loss of any of them: these drafts are at stake. A bug that
loses each by chance, one in N, leaves D of them all right with probability (1 - 1/N)**D. Greedy answers to one prompt are one
text, and a wrong draft in it is as wrong in each: a text counts once.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from eagletwin.cases.entry import Condition

from .conditions import CONDITIONS, Seen
from .server import Started

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
    return Stake(prompts=prompts, drafts=drafts, one_in=_one_in(drafts))


def _one_in(drafts: int) -> int:
    return int(1 / (1 - _MISSED ** (1 / drafts))) if drafts else 0
