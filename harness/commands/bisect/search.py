"""Where a change lies in a row of versions that can be looked at one by one, some of which cannot be decided. Pure.

The two functions that choose know nothing but what is known so far, so a search can be left and taken up again anywhere.
`known` maps the index of a version that was looked at to its mark: "good", "bad", or "skip" if it cannot be decided.
One change is supposed between the ends: from good to bad, or from bad to good. The versions named as its two sides were looked
at, whatever is supposed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Mark = Literal["good", "bad", "skip"]


@dataclass(frozen=True, slots=True)
class Found:
    """What is known of the row. All are indices.

    old, new  the versions next to the change on either side; `old` is that of the lower index. Both None: there are not two
              versions that can be decided. If `came` is None they are the outermost ones that can, and alike
    came      whether the change made good bad; False: bad good; None: no change was seen
    between   versions between `old` and `new`, none of which can be decided: the change is in one of them, or in `new`
    outside   versions beyond the outermost ones that can be decided
    """

    old: int | None
    new: int | None
    came: bool | None
    between: tuple[int, ...]
    outside: tuple[int, ...]

    @property
    def exact(self) -> bool:
        """Whether `new` is the first on its side."""
        return self.came is not None and not self.between


def next_end(count: int, known: Mapping[int, Mark]) -> int | None:
    """The next version to look at until both ends are decided: from either end inward. None: they are, or nothing is left."""
    low = next((index for index in range(count) if known.get(index) != "skip"), None)
    if low is None or low not in known:
        return low
    high = next(index for index in reversed(range(count)) if known.get(index) != "skip")
    return high if high not in known else None


def next_between(count: int, known: Mapping[int, Mark]) -> int | None:
    """The next version to look at once both ends are known. None: nothing more can be learned.

    The middle, but with some distance from what could not be decided: the neighbours of a version that does not start often do
    not start either, and need not be looked at if the change lies elsewhere.
    """
    found = conclude(count, known)
    if found.came is None or found.old is None or found.new is None:
        return None
    low, high = found.old, found.new
    skipped = [index for index in range(low + 1, high) if known.get(index) == "skip"]

    def merit(index: int) -> tuple[int, int]:
        halves = min(index - low, high - index)
        distance = min((abs(index - other) for other in skipped), default=count)
        return min(halves, 2 * distance), halves

    return max((index for index in range(low + 1, high) if index not in known), key=merit, default=None)


def conclude(count: int, known: Mapping[int, Mark]) -> Found:
    """The result so far, at any time; `between` also holds the versions that were not looked at yet."""
    decided = sorted(index for index, mark in known.items() if mark != "skip")
    if len(decided) < 2:
        return Found(None, None, None, (), tuple(index for index in range(count) if index not in decided))
    outside = tuple(index for index in range(count) if not decided[0] <= index <= decided[-1])
    before = known[decided[0]]
    if known[decided[-1]] == before:
        return Found(decided[0], decided[-1], None, (), outside)
    new = next(index for index in decided if known[index] != before)
    old = max(index for index in decided if index < new)
    return Found(old, new, before == "good", tuple(range(old + 1, new)), outside)
