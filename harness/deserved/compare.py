"""Rounds deserved and rounds used, of one answer: equal, or from which token on an engine lost a round."""

from collections.abc import Sequence
from dataclasses import dataclass

from .cuts import ONCE, Cuts
from .follow import Followed, Shape
from .pair import Pair
from .server import Answer
from .target import Read
from .walk import Walk, walk


@dataclass(frozen=True, slots=True)
class Wrong:
    """A round that accepted another number of drafts than the head makes possible.

    committed  M of the round: the text x[0..M] was committed before it
    used       drafts that it accepted
    deserved   what it should have accepted: more than one number where a near tie leaves it open
    """

    committed: int
    used: int
    deserved: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Compared:
    """One answer beside what the pair deserves.

    deserved  the rounds of the text that came back, as SGLang's layout of drafted rows has it
    right     the rounds that the text needs where a node attends to its ancestors, and no row keeps a draft that was refused
    used      rounds that the engine counts
    told      whether the stream told where each round began
    wrong     rounds that accepted another number than they may, in order
    tie       below which share of the largest logit two were too close to tell
    open      rounds of which near ties leave open how many drafts they accept
    at_stake  drafts that these rounds must accept, however near ties go: losing one of them shows where rounds are told, and
              losing all of them in any case
    """

    deserved: Walk
    right: int
    used: int
    told: bool
    wrong: tuple[Wrong, ...]
    tie: float
    open: int
    at_stake: int

    @property
    def equal(self) -> bool:
        """Whether each round accepted what it may; where they are not told, whether there were as many as may be."""
        return not self.wrong if self.told else self.deserved.fewest <= self.used <= self.deserved.most


def compare(pair: Pair, shape: Shape, answer: Answer, read: Read, ways: Sequence[Cuts] = ONCE) -> Compared:
    """pair: as it is on this text; read: what its target makes of the prompt and what was emitted.

    ways: the cuts of each way in which the prompt may have been read. An answer that one of them makes equal is equal; of one
    that none does, the first is told.
    """
    right = pair.follow((*answer.prompt, *answer.tokens), read.hidden, shape)
    found = (_compared(pair, shape, answer, read, right, cuts) for cuts in ways)
    first = next(found)
    return first if first.equal else next((one for one in found if one.equal), first)


def _compared(pair: Pair, shape: Shape, answer: Answer, read: Read, right: Followed, cuts: Cuts) -> Compared:
    text, begin = (*answer.prompt, *answer.tokens), len(answer.prompt)
    own = pair.follow_layout(text, read.hidden, shape, begin, None, cuts) or right
    made, deserved = own, walk(own, begin)
    if pair.draft.layers > 1 and answer.starts not in (None, deserved.starts):  # what is proposed depends on the rounds before
        made = pair.follow_layout(text, read.hidden, shape, begin, answer.starts, cuts) or right
    wrong = _wrong(answer.starts, made) if answer.starts else ()
    starts = deserved.starts if answer.starts is None else answer.starts
    possible, last = [made.possible(start) for start in starts], len(text) - 1
    if answer.starts is None:  # a round commits one token beside the drafts that it accepts
        at_stake = max(last - begin - deserved.most, 0)
    else:  # what lies past the end of the text is not told
        at_stake = sum(min(*counts, last - start - 1) for start, counts in zip(starts, possible, strict=True))
    return Compared(
        deserved,
        walk(right, begin).rounds,
        answer.rounds,
        answer.starts is not None,
        wrong,
        pair.tie,
        sum(len(one) > 1 for one in possible),
        at_stake,
    )


def _wrong(starts: Sequence[int], followed: Followed) -> tuple[Wrong, ...]:
    last = len(followed.agrees) - 1
    found = []
    for start, end in zip(starts, [*starts[1:], last], strict=True):
        used = end - start - 1
        # The last round drafts past the end of the text, and only what lies in it is told.
        deserved = tuple(sorted({min(count, last - start - 1) for count in followed.possible(start)}))
        if used not in deserved:
            found.append(Wrong(start, used, deserved))
    return tuple(found)
