"""Run by each Python at hand: says how fast it is, if it can make the environment. The Makefile takes the first of the sorted.

A Python that was built with profile-guided optimisation, as distributions build theirs, runs cases a sixth faster than one that
was built without. 3.11 is what CI runs; a later one is taken where there is no 3.11.
"""

import ensurepip  # noqa: F401  a distribution may leave it out, and venv needs it
import sys
import time
import venv  # noqa: F401


class Pair:
    """What cases spend their time on: calls, attributes, small objects."""

    def __init__(self, one: int, two: int) -> None:
        self.one, self.two = one, two

    def plus(self, other: "Pair") -> "Pair":
        return Pair(self.one + other.one, self.two + other.two)


def spent() -> float:
    begun, pair = time.process_time(), Pair(1, 2)
    for _ in range(10_000):
        pair = pair.plus(Pair(3, 4))
    return time.process_time() - begun


farther = (sys.version_info[1] - 11) % 100  # an older one is the last choice, and the Makefile refuses it
print(farther, f"{min(spent() for _ in range(40)):.5f}", sys.executable)
