"""Many slots, most of which follow each other, in few numbers: how a trace lists what is free in a pool.

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
