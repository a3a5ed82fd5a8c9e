"""How many rounds a text takes, and rounds deserved beside rounds used of one answer: from which token on an engine lost
one."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import chain, combinations

from .follow import Followed, Shape
from .precision import Pair
from .server import Answer, Way
from .target import Read

# How many rounds a text takes: from M to M + a(M) + 1, until the text ends.


@dataclass(frozen=True, slots=True)
class Walk:
    """The rounds that an engine needs which computes as the reference does.

    starts    [R] M of each round, as the reference chooses
    accepted  [R] drafts accepted in each; the last round drafts past the end of the text, so its number is at most the true one
    fewest, most  rounds, as near ties go
    """

    starts: tuple[int, ...]
    accepted: tuple[int, ...]
    fewest: int
    most: int

    @property
    def rounds(self) -> int:
        """Rounds as the reference chooses."""
        return len(self.starts)


def walk(followed: Followed, begin: int) -> Walk:
    """The rounds of a text whose token x[begin] was the first that an engine emitted. The prefill emits that one by itself."""
    last = len(followed.agrees) - 1
    starts, accepted, committed = [], [], begin
    while committed < last:
        starts.append(committed)
        accepted.append(min(followed.accepted(committed), last - committed - 1))
        committed += accepted[-1] + 1
    size = max(begin, last) + 1
    fewest, most = [0] * size, [0] * size
    for place in range(last - 1, begin - 1, -1):
        after = [min(place + count + 1, last) for count in followed.possible(place)]
        fewest[place] = 1 + min(fewest[next] for next in after)
        most[place] = 1 + max(most[next] for next in after)
    return Walk(tuple(starts), tuple(accepted), fewest[begin], most[begin])


# Where the chunks of a prompt may have ended, as far as it decides what a draft of several layers is fed.
#
# Layer k of a row consumes the token k+1 places on. Where a chunk ends nearer to the prompt's end than the draft has layers,
# its last rows look ahead of the prompt: at drafts, which stay (follow.py).

Cuts = tuple[int, ...]  # in rising order; () where a prompt was read at once
ONCE: tuple[Cuts, ...] = ((),)  # the one way in which it can have been


def possible_cuts(way: Way, size: int, chunk: int | None, layers: int) -> tuple[Cuts, ...]:
    """Each way in which a prompt of `size` tokens may have been read, the likeliest first.

    chunk: tokens that the server prefills at once; 0, None: any number. layers: that propose something; one is fed none.
    By itself, a prompt is cut at each full chunk, and its rows are there when it comes again. Together with others, the rest of
    a chunk that others began is as long as arrivals had it, and nobody tells.
    """
    near = range(max(size - layers + 1, 1), size)
    if layers < 2 or not chunk or not near:
        return ONCE
    if way != "together":
        return (tuple(cut for cut in near if cut % chunk == 0),)
    return tuple(chain.from_iterable(combinations(near, number) for number in range(len(near) + 1)))


# Rounds deserved and rounds used, of one answer: equal, or from which token on an engine lost a round.


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
    found = (_compare_answer(pair, shape, answer, read, right, cuts) for cuts in ways)
    first = next(found)
    return first if first.equal else next((one for one in found if one.equal), first)


def _compare_answer(pair: Pair, shape: Shape, answer: Answer, read: Read, right: Followed, cuts: Cuts) -> Compared:
    text, begin = (*answer.prompt, *answer.tokens), len(answer.prompt)
    own = pair.follow_layout(text, read.hidden, shape, begin, None, cuts) or right
    made, deserved = own, walk(own, begin)
    if pair.draft.layers > 1 and answer.starts not in (None, deserved.starts):  # what is proposed depends on the rounds before
        made = pair.follow_layout(text, read.hidden, shape, begin, answer.starts, cuts) or right
    starts = deserved.starts if answer.starts is None else answer.starts
    possible, last = [made.possible(start) for start in starts], len(text) - 1
    if answer.drafted is not None:  # no more is accepted than is verified
        possible = [
            sorted({min(count, most) for count in counts}) for counts, most in zip(possible, answer.drafted, strict=True)
        ]
    wrong = _wrong(starts, possible, last) if answer.starts else ()
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


def _wrong(starts: Sequence[int], possible: Sequence[Collection[int]], last: int) -> tuple[Wrong, ...]:
    found = []
    for start, end, counts in zip(starts, [*starts[1:], last], possible, strict=True):
        used = end - start - 1
        # The last round drafts past the end of the text, and only what lies in it is told.
        deserved = tuple(sorted({min(count, last - start - 1) for count in counts}))
        if used not in deserved:
            found.append(Wrong(start, used, deserved))
    return tuple(found)
