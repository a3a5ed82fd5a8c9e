"""Jitter: seeded pauses on the streams of a GPU, and where they fell in a run. engines/sglang/jitter.py makes them."""

from typing import NamedTuple

from msgspec import Struct


class Jitter(Struct, frozen=True):
    """What is asked of a run that records nothing of its batches.

    seed     draws which points get a pause, and how long each is: the same seed and the same points, the same pauses
    share    of the points, 0 to 1, that get one
    longest  microseconds. Pauses are spread evenly over the orders of magnitude from a hundredth of it on; 0: there is none
    """

    seed: int
    share: float = 0.12
    longest: int = 20_000


class Pause(NamedTuple):
    """A pause. point: its number among the points of the run, from 0; place: the call that it follows, and the stream;
    microseconds: how long at least."""

    point: int
    place: str
    microseconds: int


class Jittered(Struct, frozen=True):
    """What became of it. points: calls after which a pause might have been."""

    asked: Jitter
    points: int
    pauses: tuple[Pause, ...]
