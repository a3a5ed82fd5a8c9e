"""Feature bisection: the smallest set of a case's features with which the fault still shows.

By delta debugging, after A. Zeller and R. Hildebrandt, "Simplifying and isolating failure-inducing input" (2002), with sets in
place of strings.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from msgspec.structs import replace

from eagletwin.harness.core.case import Case
from eagletwin.harness.families.dimensions.dimension import Dimension

from .features import features_of, variants
from .marks import Fault, Looked, Mark, Sighting, brief, end_mark, mark

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


@dataclass(frozen=True, slots=True)
class Reduced:
    """The result of a reduction.

    whole    the case as it is; fault: what it shows; None: nothing, so that it cannot be reduced
    needed   with all of these it shows, and each is checked below
    gone     features that the case has and the fault does not need
    least    the case with nothing but the needed ones
    doubts   of a needed feature: "" if each way to take it from `least` was equal; else why this is not known
    """

    whole: Looked
    fault: Fault | None
    needed: tuple[Dimension, ...]
    gone: tuple[Dimension, ...]
    least: Case
    doubts: Mapping[str, str]

    @property
    def answered(self) -> bool:
        return self.fault is not None and not any(self.doubts.values())


def reduce(original: Case, rule: str, look: Callable[[Case], Looked], tell: Callable[[str], None]) -> Reduced:
    """Reduce a case to what its fault needs. rule: the one that counts; "": the one by which the case diverges."""
    whole = look(original)
    tell(f"the case as it is: {brief(whole.usual)}")
    if end_mark(whole, rule) != "bad":
        return Reduced(whole, None, (), (), original, {})
    # The same rule anywhere: rounds, rows and stages move with the sizes, as they do while a found case is made small.
    fault = Fault(rule=whole.usual.rule)
    had = features_of(original)
    seen: dict[Case, Looked] = {}

    def ways(kept: tuple[Dimension, ...]) -> list[Case]:
        return variants(original, [feature for feature in had if feature not in kept])

    def marked(case: Case) -> tuple[Mark, str]:
        if case not in seen:
            seen[case] = settle_vacuous(look(case))
        return mark(seen[case], fault)

    def shows(kept: tuple[Dimension, ...]) -> bool:
        found = any(marked(way)[0] == "bad" for way in ways(kept))
        tell(f"{'shows' if found else 'does not show'} with: {', '.join(one.name for one in kept) or 'no feature'}")
        return found

    needed = smallest(had, shows)
    least = next((way for way in ways(needed) if marked(way)[0] == "bad"), original)
    doubts = {feature.words: _doubt([marked(way) for way in variants(least, [feature])]) for feature in needed}
    gone = tuple(feature for feature in had if feature not in needed)
    return Reduced(whole, fault, needed, gone, least, doubts)


def _doubt(marks: Sequence[tuple[Mark, str]]) -> str:
    """Why it is not known that a feature is needed, from the marks of all ways to do without it; "" if all are good."""
    if not marks:
        return "every case without it is invalid"
    whys = (why or "it shows all the same, at other sizes" for mark, why in marks if mark != "good")
    return "; ".join(dict.fromkeys(whys))


def settle_vacuous(looked: Looked) -> Looked:
    """A variant names nothing it is for, so it is vacuous only if it never calls what a patch edits: then it runs the release
    as it is, and came out equal."""

    def settle(sighting: Sighting) -> Sighting:
        return replace(sighting, status="equal") if sighting.vacuous else sighting

    return replace(looked, sightings=tuple(map(settle, looked.sightings)))
