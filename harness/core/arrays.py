"""What a trace has of many rows: those that changed, and slots in few numbers where most of them follow each other.

A run is (first slot, how many follow each other from there, how often each of them is listed).
"""

from itertools import pairwise
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def counts_of(slots: Array, size: int) -> Array:
    """How often each slot is listed, in any order: slots [n] -> [size], or longer if a slot is past it."""
    return np.bincount(slots, minlength=size)


def runs_of(counts: Array) -> Array:
    """Runs [r, 3] int32 of slots that are listed equally often, in order; counts: of each slot."""
    starts = [0, *(np.flatnonzero(counts[1:] != counts[:-1]) + 1).tolist(), len(counts)]
    runs = [(first, end - first, int(counts[first])) for first, end in pairwise(starts) if first < end and counts[first]]
    return np.array(runs, np.int32).reshape(len(runs), 3)


def changed_rows(now: Array, before: Array | None) -> Array:
    """Which of these rows [n, ...] are not as they were, or were not there, in rising order; before: fewer or more of them."""
    known = 0 if before is None else min(len(now), len(before))
    new = np.arange(known, len(now))
    if before is None or (now[:known] == before[:known]).all():
        return new
    changed = (now[:known] != before[:known]).any(tuple(range(1, now.ndim)))
    return np.concatenate([np.flatnonzero(changed), new])
