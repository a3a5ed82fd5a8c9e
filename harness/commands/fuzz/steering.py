"""Which block of generated cases comes next.

A change that few cases run would be met by chance. So three blocks of four are, of those that are not run yet, among the few
whose settings are most often those of cases that ran the change, entries of the ledger among them. Each fourth comes in the
order of its number: a change may be wrong where none of its like has run it. `compare` begins with cases of the ledger, as
unlike each other as can be, until some run the change: generated ones may take minutes to meet it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import count
from random import Random
from threading import Lock

import msgspec

from eagletwin.cases.blocks import Asked, Block, block_of
from eagletwin.cases.ledger import LEDGER
from eagletwin.cases.reach import unreached
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.mode import Mode

from .looking import CaseSeen, Unstarted
from .unsearched import topics_of

_AHEAD = 400  # blocks among which is chosen: a setting that one block in fifty has is among them
_FEW = 20  # of these, among which one is drawn: the most similar alone would be the same again and again
_OFTEN = 0.5  # where so large a share of the cases runs the change, no block is preferred
_LED, _MOST_LED = 3, 40  # cases of the ledger that run the change, and that are run for it
_WEIGHT = 4  # cases of the overall share that are added to each setting, so that one block's cases alone decide nothing

Setting = tuple[str, object]


class Steering:
    """The blocks of one search: the same after the same cases."""

    def __init__(self, seed: int, asked: Asked) -> None:
        self._seed, self._asked = seed, asked
        self._of, self._ran = Counter[Setting](), Counter[Setting]()
        self._cases = self._reached = 0
        self._learned = Counter[bool]()  # of these, cases of the ledger, which are no share of what is drawn
        self._settings: dict[int, list[Setting]] = {}  # of blocks that wait

    def add(self, case: Case, *, reached: bool) -> None:
        """A case with these settings ran, and reached the change or not."""
        settings = _settings(case)
        self._of.update(settings)
        self._cases += 1
        if reached:
            self._ran.update(settings)
            self._reached += 1

    def begin(self, mode: Mode, reaches: Callable[[Case], bool]) -> None:
        """Learn from cases of the ledger, until some of them run the change; from none if as many cases ran it already.
        reaches: runs a case, and says whether it ran the change."""
        for case in () if self._reached >= _LED else _unlike(mode)[:_MOST_LED]:
            reached = reaches(case)
            self.add(case, reached=reached)
            self._learned[reached] += 1
            if self._learned[True] == _LED:
                return

    def blocks(self) -> Iterator[Block]:
        waiting, numbers = dict[int, Block](), count()
        for turn in count():
            drawn, ran = self._cases - self._learned.total(), self._reached - self._learned[True]
            steers = turn % 4 != 0 and self._reached > 0 and (drawn == 0 or ran < _OFTEN * drawn)
            while len(waiting) < (_AHEAD if steers else 1):
                number = next(numbers)
                waiting[number] = block_of(self._seed, number, self._asked)
            number = self._likely(waiting, turn) if steers else min(waiting)
            self._settings.pop(number, None)
            yield waiting.pop(number)

    def _likely(self, waiting: Mapping[int, Block], turn: int) -> int:
        best = sorted(waiting, key=lambda number: (-self._promise(waiting[number]), number))
        return Random(f"{self._seed} {turn}").choice(best[:_FEW])

    def _promise(self, block: Block) -> float:
        """The mean share of cases with each of the block's settings that ran the change."""
        if block.number not in self._settings:
            self._settings[block.number] = _settings(block.probe)
        settings, overall = self._settings[block.number], self._reached / self._cases
        return sum((self._ran[one] + _WEIGHT * overall) / (self._of[one] + _WEIGHT) for one in settings) / len(settings)


class Order:
    """Which block stands at each place of a search that begins up to `ahead` blocks before their turn. A place is chosen by the
    cases of the blocks that are `ahead` places before it, which are over then: whoever runs them comes to the same."""

    def __init__(self, seed: int, asked: Asked, ahead: int) -> None:
        self._steering, self._ahead = Steering(seed, asked), ahead
        self._blocks, self._lock = self._steering.blocks(), Lock()
        self._numbers, self._cases, self._counted = list[int](), dict[int, list[tuple[Case, bool]]](), 0

    def add(self, place: int, case: Case, *, reached: bool) -> None:
        """A case of the block at this place ran, and reached the change or not."""
        self._cases.setdefault(place, []).append((case, reached))

    def number(self, place: int) -> int:
        """The block at this place. Places may be read again, and are chosen in their order."""
        with self._lock:
            while len(self._numbers) <= place:
                while self._counted < len(self._numbers) - self._ahead:
                    for case, reached in self._cases.pop(self._counted, ()):
                        self._steering.add(case, reached=reached)
                    self._counted += 1
                self._numbers.append(next(self._blocks).number)
            return self._numbers[place]


def count_cases(order: Order, place: int, block: Iterator[CaseSeen | Unstarted]) -> Iterator[CaseSeen | Unstarted]:
    """What is seen in the block at this place. Where something is changed, the order counts which cases ran it."""
    for seen in block:
        if isinstance(seen, CaseSeen) and seen.differs is not None:
            order.add(place, seen.case, reached=seen.differs.reached)
        yield seen


def _unlike(mode: Mode) -> list[Case]:
    """The cases of the ledger that the mode reaches, the plainest first; then each has as many settings as can be that none
    before it has. Without those that end the worker: another one takes a second to start."""
    left = [entry.case for entry in LEDGER.values() if not unreached(entry, mode) and not entry.rule.startswith("engine.")]
    settings = {case.name: set(_settings(case)) for case in left}
    cases, had = list[Case](), set[Setting]()
    while left:
        new = {case.name: len(settings[case.name] - had) for case in left}
        case = (max if cases else min)(left, key=lambda case: new[case.name])
        left.remove(case)
        cases.append(case)
        had |= settings[case.name]
    return cases


def _settings(case: Case) -> list[Setting]:
    """The engine configuration, setting by setting, and the topics of a case."""
    sizes = [("model", case.model), ("num_steps", case.num_steps), ("topk", case.topk), ("page_size", case.page_size)]
    own = msgspec.structs.asdict(case.engine.sglang).items()
    return [*sizes, *((name, str(value)) for name, value in own), *(("topic", topic) for topic in topics_of(case))]
