"""Delta debugging: the smallest set of things that a fault needs. Pure.

After A. Zeller and R. Hildebrandt, "Simplifying and isolating failure-inducing input" (2002), with sets in place of strings.
"""

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def smallest(things: Sequence[T], shows: Callable[[tuple[T, ...]], bool]) -> tuple[T, ...]:
    """A subset, in order, with which it shows, and without any single member of which it does not (1-minimal).

    `shows` is asked about each subset once, and must hold for all of them.
    """
    results: dict[tuple[T, ...], bool] = {}

    def ask(subset: tuple[T, ...]) -> bool:
        if subset not in results:
            results[subset] = shows(subset)
        return results[subset]

    kept, parts = tuple(things), 2
    if kept and ask(()):
        return ()
    while len(kept) > 1:
        size = -(-len(kept) // parts)
        groups = [kept[at : at + size] for at in range(0, len(kept), size)]
        alone = next((group for group in groups if ask(group)), None)
        if alone is not None:
            kept, parts = alone, 2
            continue
        others = [tuple(thing for thing in kept if thing not in group) for group in groups]
        rest = next((other for other in others if ask(other)), None)
        if rest is not None:
            kept, parts = rest, max(parts - 1, 2)
        elif size == 1:
            break
        else:
            parts = min(len(kept), 2 * parts)
    return kept
