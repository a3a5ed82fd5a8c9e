"""Which of several remedies a case needs: the fewest without any one of which it is wrong.

Each question runs the case once, so they are asked of halves: one that is needed among eight takes three to six runs, where
taking away one after the other takes eight.
"""

from collections.abc import Callable, Sequence


def fewest(parts: Sequence[str], clean: Callable[[Sequence[str]], bool]) -> tuple[str, ...]:
    """The parts that are needed, in their order; of two that do the same, the one that comes first. clean: whether a case is
    right with these alone; it is with all of them, and not with none."""
    found = _needed((), tuple(parts), clean, asked=True)
    if clean(found):
        return found
    found = tuple(parts)  # fewer may be wrong where more and less are right: then one after the other is taken away
    for part in reversed(parts):
        others = tuple(one for one in found if one != part)
        if others and clean(others):
            found = others
    return found


def _needed(
    kept: tuple[str, ...], parts: tuple[str, ...], clean: Callable[[Sequence[str]], bool], *, asked: bool
) -> tuple[str, ...]:
    """Those of `parts` that are needed beside those that are kept. asked: the kept alone are known to be too few."""
    if not asked and clean(kept):
        return ()
    if len(parts) == 1:
        return parts
    middle = (len(parts) + 1) // 2
    first, second = parts[:middle], parts[middle:]
    of_second = _needed(kept + first, second, clean, asked=False)
    of_first = _needed(kept + of_second, first, clean, asked=not of_second)
    return of_first + of_second
