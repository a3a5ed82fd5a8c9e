"""Running several programs of one grid at once: every array carries a first axis of lanes, one lane per program (or
of length 1 where all programs have the same), so that one numpy call does the work of all, each program's block in one
piece.  Control flow must agree between the lanes; where it does not, Diverged sends the programs back to smaller
groups.  launch.py groups programs; what makes or folds blocks asks `extra()`, what combines them `align()`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .state import STATE

# Programs in one group at most: beyond this the blocks leave the second-level cache and gain nothing.
LARGEST_GROUP = 16
# A group that diverged is split for good, but sequence lengths change: start whole again after this many launches.
FORGET_AFTER = 256


class Diverged(Exception):
    """The lanes of a group disagree about a branch, a trip count, or use an operation without a lane form.

    agreeing: how many of the first lanes go the same way; 0 where that is not known.
    """

    def __init__(self, detail: str, agreeing: int = 0) -> None:
        super().__init__(detail)
        self.agreeing = agreeing


def extra() -> tuple[int, ...]:
    """What a new block's shape begins with: (1,) while lanes run, () for a program on its own."""
    return (1,) if STATE.lanes > 1 else ()


def align(*values: Any) -> tuple[Any, ...]:
    """The values ready for numpy to broadcast: axes that a smaller rank lacks come after its lane axis, not before."""
    if STATE.lanes == 1:
        return values
    ranks = [value.ndim for value in values if value.__class__ is np.ndarray]
    if not ranks or ranks.count(ranks[0]) == len(ranks):
        return values
    rank = max(ranks)
    return tuple(
        [
            value.reshape(value.shape[:1] + (1,) * (rank - value.ndim) + value.shape[1:])
            if value.__class__ is np.ndarray and value.ndim < rank
            else value
            for value in values
        ]
    )


def item(value: Any, key: tuple[Any, ...]) -> Any:
    """value[key] for a key of `:` and None, which leaves the lane axis where it is."""
    index = (_ALL, *key) if STATE.lanes > 1 else key
    return value[index]


_ALL = slice(None)


def truth(value: Any) -> Any:
    """A condition that Python can test: the value itself, or for lanes what they agree on."""
    if value.__class__ is not np.ndarray:
        return value
    if value.size > 1 and STATE.lanes > 1:
        if value.ndim != 1:
            raise Diverged("a block as a condition")
        if value.all():
            return True
        if value.any():
            raise Diverged("lanes branch differently", int(((value != 0) != (value[0] != 0)).argmax()))
        return False
    return bool(value)


def trip_range(*bounds: Any) -> range:
    """range of bounds that may differ between lanes, as long as the values and the number of trips do not."""
    if STATE.lanes > 1 and any(isinstance(bound, np.ndarray) and bound.size > 1 for bound in bounds):
        lists = [b.tolist() if isinstance(b, np.ndarray) and b.size > 1 else [int(b)] * STATE.lanes for b in bounds]
        trips = [range(*lane) for lane in zip(*lists, strict=True)]
        # Ranges are equal where they yield the same numbers, however their ends differ.
        agreeing = next((i for i, one in enumerate(trips) if one != trips[0]), len(trips))
        if agreeing < len(trips):
            raise Diverged("lanes loop differently", agreeing)
        return trips[0]
    return range(*(int(bound) for bound in bounds))


@dataclass(slots=True)
class Grouping:
    """How one kernel's grid was last cut into groups of consecutive programs."""

    sizes: list[int]
    launches: int = 0


@dataclass(slots=True)
class Groupings:
    """Groupings by (kernel function, grid)."""

    known: dict[Any, Grouping] = field(default_factory=dict)

    def of(self, key: Any, programs: int) -> Grouping:
        grouping = self.known.get(key)
        if grouping is None or grouping.launches >= FORGET_AFTER:
            pieces = -(-programs // LARGEST_GROUP)
            sizes = [programs // pieces + (i < programs % pieces) for i in range(pieces)]
            grouping = self.known[key] = Grouping(sizes)
        grouping.launches += 1
        return grouping
