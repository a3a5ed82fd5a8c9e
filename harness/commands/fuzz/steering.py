"""Which block of generated cases comes next.

A change that few cases run would be met by chance. So nine blocks of ten go to one changed statement each, by turns, unless
every second case runs it by itself. Two of three repeat, with other cases, the configuration of a block whose cases ran the
statement. The third is a new block, one of the few whose settings promise most that their cases run it: at first a measurement
says that (coverage.py), then the cases of the search. Each tenth block comes in the order of its number: a change may be wrong
where none of its like has run it, and it shows how often a statement runs by itself.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from math import log, sqrt
from random import Random
from threading import Lock

from eagletwin.cases.blocks import AGAIN, Block, SearchConstraints, block_of
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.differs import Differs

from .coverage import UNMEASURED, Measured, Setting, settings_of
from .looking import NO_BLOCK, CaseSeen, Unstarted
from .options import Plan

_AHEAD = 200  # blocks among which is chosen: a setting that one block in fifty has is among them
_FEW = 10  # of these, among which one is drawn: the most similar alone would be the same again and again
_NEARLY = 0.75  # of the promise of the best one, that each of these has
_ELSEWHERE = 10  # one block of so many comes in the order of its number
_EXPLORED = 3  # of the blocks that are chosen for a statement, one of so many is a new one, once a block ran it
_OFTEN = 0.5  # where so large a share of the cases runs a statement by itself, no block is preferred for it
_WEIGHT = 4  # cases of the overall share that are added to each setting, so that one block's cases alone decide nothing
_SURE = 2  # standard deviations from what all cases do, from which on a setting counts
_ONCE = 0.25  # of a case of the search, what a measured one counts: it ran another engine


@dataclass(slots=True)
class _Counts:
    """Of cases with each setting, how many there are, and how many ran each changed statement. ran: statement -> the cases that
    ran it, as bits."""

    cases: int = 0
    of: Counter[Setting] = field(default_factory=Counter)
    with_setting: dict[str, Counter[Setting]] = field(default_factory=dict)
    ran: dict[str, int] = field(default_factory=dict)

    def add(self, settings: Collection[Setting], ran: Collection[str]) -> None:
        self.of.update(settings)
        for name in ran:
            self.with_setting.setdefault(name, Counter()).update(settings)
            self.ran[name] = self.ran.get(name, 0) | 1 << self.cases
        self.cases += 1


def draw_ahead(plan: Plan) -> None:
    """Draw the blocks among which the first one of a search is chosen, if something is changed."""
    for number in range(_AHEAD):
        block_of(plan.seed, number, plan.asked)


class Steering:
    """The blocks of one search: the same after the same cases."""

    def __init__(self, seed: int, asked: SearchConstraints, measured: Measured = UNMEASURED) -> None:
        self._seed, self._asked = seed, asked
        self._own, self._measured, self._unaimed = _Counts(), _Counts(), _Counts()
        for number, settings in enumerate(measured.cases):
            self._measured.add(settings, [name for name, cases in measured.ran.items() if cases >> number & 1])
        self._sent = Counter[str]()  # changed statement -> blocks that were chosen for it
        self._in_order = set[int]()  # blocks that were chosen for none, whose cases run it as often as all cases do
        self._settings: dict[int, list[Setting]] = {}  # of blocks that wait
        # Of blocks that were run, by the number of the first with the same configuration: their cases, those that ran each
        # changed statement, and how often they were repeated.
        self._cases, self._ran_in, self._repeats = Counter[int](), dict[str, Counter[int]](), Counter[int]()

    def add(self, case: Case, ran: Collection[str], block: int) -> None:
        """A case of this block, or of none, ran these changed statements."""
        self._own.add(settings := settings_of(case), ran)
        if block in self._in_order:
            self._unaimed.add(settings, ran)
        if block != NO_BLOCK:
            self._cases[block % AGAIN] += 1
            for name in ran:
                self._ran_in.setdefault(name, Counter())[block % AGAIN] += 1

    def blocks(self) -> Iterator[Block]:
        waiting, numbers = dict[int, Block](), count()
        for turn in count():
            aim = self._aim() if turn % _ELSEWHERE < _ELSEWHERE - 1 else ""
            if aim in self._ran_in and self._sent[aim] % _EXPLORED:
                yield self._repeat_block(aim, turn)
                continue
            while len(waiting) < (_AHEAD if aim else 1):
                number = next(numbers)
                waiting[number] = block_of(self._seed, number, self._asked)
            number = self._likely(waiting, turn, aim) if aim else min(waiting)
            self._in_order |= set() if aim else {number}
            self._settings.pop(number, None)
            yield waiting.pop(number)

    def _repeat_block(self, aim: str, turn: int) -> Block:
        """A block whose configuration is one of the few of which most cases ran the statement, and that was seldom drawn."""

        def promise(block: int) -> float:
            return (self._ran_in[aim][block] + 1) / (self._cases[block] + 2) / (1 + self._repeats[block])

        best = sorted(self._ran_in[aim], key=lambda block: (-promise(block), block))
        number = Random(f"{self._seed} {turn}").choice(best[:_FEW])
        self._repeats[number] += 1
        return block_of(self._seed, number + AGAIN * self._repeats[number], self._asked)

    def _aim(self) -> str:
        """The changed statement whose turn it is: of those that some case ran and not every second one, the one for which
        fewest blocks were chosen and which fewest cases ran. Of several that the same cases ran, one alone."""
        rare = dict[tuple[int, int], str]()
        for name in {**self._measured.ran, **self._own.ran}:
            ran = self._measured.ran.get(name, 0), self._own.ran.get(name, 0)
            if self._share(name) < _OFTEN:
                rare.setdefault(ran, name)
        turns = {name: self._sent[name] + ran.bit_count() for (_, ran), name in rare.items()}
        aim = min(turns, key=lambda name: (turns[name], name), default="")
        self._sent[aim] += 1
        return aim

    def _share(self, name: str) -> float:
        """The share of all cases that runs a statement, by those of the search that were chosen for none: half of those that
        were chosen for it run it, however rare it is."""
        parts = [(self._unaimed, 1.0), (self._measured, _ONCE if name in self._measured.ran else 0.0)]
        ran = sum(weight * part.ran.get(name, 0).bit_count() for part, weight in parts)
        return ran / max(sum(weight * part.cases for part, weight in parts), 1.0)

    def _likely(self, waiting: Mapping[int, Block], turn: int, aim: str) -> int:
        """One of the few waiting blocks whose settings promise most that their cases run the statement."""
        for number in waiting.keys() - self._settings.keys():
            self._settings[number] = settings_of(waiting[number].probe)
        tells = self._telling({one for number in waiting for one in self._settings[number]}, aim)
        promise = {number: sum(tells[one] for one in self._settings[number]) for number in waiting}
        best = sorted(waiting, key=lambda number: (-promise[number], number))[:_FEW]
        least = promise[best[0]] - (1 - _NEARLY) * abs(promise[best[0]])
        return Random(f"{self._seed} {turn}").choice([number for number in best if promise[number] >= least])

    def _telling(self, settings: Collection[Setting], aim: str) -> dict[Setting, float]:
        """How much more often than all cases those with each of these settings ran the statement, as a logarithm; 0 where that
        may be by chance: of dozens of settings that say nothing, some would outvote the one that does."""
        parts = [(self._own, 1.0), (self._measured, _ONCE if aim in self._measured.ran else 0.0)]
        cases = sum(weight * part.cases for part, weight in parts)
        overall = sum(weight * part.ran.get(aim, 0).bit_count() for part, weight in parts) / cases
        found = dict[Setting, float]()
        for one in settings:
            ran = sum(weight * part.with_setting[aim][one] for part, weight in parts if aim in part.with_setting)
            of = sum(weight * part.of[one] for part, weight in parts)
            chance = sqrt(sum(weight**2 * part.of[one] for part, weight in parts) * overall * (1 - overall))
            sure = abs(ran - of * overall) >= _SURE * chance
            found[one] = log((ran + _WEIGHT * overall) / (of + _WEIGHT) / overall) if sure else 0.0
        return found


class Order:
    """Which block stands at each place of a search that begins up to `ahead` blocks before their turn. A place is chosen by the
    cases of the blocks that are `ahead` places before it, which are over then: whoever runs them comes to the same."""

    def __init__(self, seed: int, asked: SearchConstraints, ahead: int, measured: Measured = UNMEASURED) -> None:
        self._steering, self._ahead = Steering(seed, asked, measured), ahead
        self._blocks, self._lock = self._steering.blocks(), Lock()
        self._numbers, self._cases, self._counted = list[int](), dict[int, list[tuple[Case, Collection[str], int]]](), 0

    def add(self, place: int, case: Case, ran: Collection[str], block: int) -> None:
        """A case of the block at this place, or of none, ran these changed statements."""
        self._cases.setdefault(place, []).append((case, ran, block))

    def number(self, place: int) -> int:
        """The block at this place. Places may be read again, and are chosen in their order."""
        with self._lock:
            while len(self._numbers) <= place:
                while self._counted < len(self._numbers) - self._ahead:
                    for case, ran, block in self._cases.pop(self._counted, ()):
                        self._steering.add(case, ran, block)
                    self._counted += 1
                self._numbers.append(next(self._blocks).number)
            return self._numbers[place]


def count_cases(order: Order, place: int, block: Iterator[CaseSeen | Unstarted]) -> Iterator[CaseSeen | Unstarted]:
    """What is seen in the block at this place. Where something is changed, the order counts which cases ran it."""
    for seen in block:
        if isinstance(seen, CaseSeen) and seen.differs is not None:
            order.add(place, seen.case, executed_places(seen.differs), seen.block)
        yield seen


def executed_places(differs: Differs | None) -> tuple[str, ...]:
    """The changed statements that a case ran, and what it met near them; of a trace that does not tell them apart, the
    functions."""
    return () if differs is None else (*(differs.executed or differs.ran), *differs.near)
