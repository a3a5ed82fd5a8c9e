"""Look at one version, or one variant of a case, as often as it takes. Whatever it dies of is a look like any other.

Every version has a host of its own, so its crash or its refusal to start takes nothing else along.
"""

import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from eagletwin.harness.check.known import fewest
from eagletwin.harness.core.case import Case, encode_case, pretty_case
from eagletwin.harness.core.errors import EagletwinError, InputError
from eagletwin.harness.core.patch import Patch
from eagletwin.harness.core.run_spec import Kernels
from eagletwin.harness.core.verdict import Verdict
from eagletwin.harness.engines.host import Host, PatchDoesNotApply, WouldNotStart
from eagletwin.harness.engines.source import resolve
from eagletwin.harness.families.dimensions import DIMENSIONS
from eagletwin.harness.families.dimensions.dimension import Dimension
from eagletwin.harness.families.valid import decode_case

from ..matrix import Matrix, Question
from .state import Fault, Looked, Mark, Sighting, Subject, brief, end_mark, is_settled, mark

# The features of a case that can be taken away one by one: its dimensions, each with a way to do so that leaves the rest as it
# is.
#
# Taking one away may be done in several ways (which request stays?): then the fault needs the feature if it shows in none.
# Ways are valid cases, or are left out.

FEATURES = tuple(dimension for dimension in DIMENSIONS.values() if dimension.without is not None)


def features_of(case: Case) -> tuple[Dimension, ...]:
    """The features that a case has."""
    return tuple(feature for feature in FEATURES if feature.has(case))


def variants(case: Case, without: Collection[Dimension]) -> list[Case]:
    """All ways to do without these features: valid cases that name nothing they are for. Equal ones once."""
    found = [replace(case, exercises=())]
    for feature in FEATURES:
        if feature in without and feature.without is not None:
            found = [other for one in found for other in (feature.without(one) if feature.has(one) else (one,))]
    return [other for other in dict.fromkeys(found) if _valid(other)]


def _valid(case: Case) -> bool:
    """Each field's bounds as well."""
    try:
        decode_case(encode_case(case), "a variant")
    except InputError:
        return False
    return True


# Feature bisection: the smallest set of a case's features with which the fault still shows.

T = TypeVar("T")


def smallest(things: Sequence[T], shows: Callable[[tuple[T, ...]], bool]) -> tuple[T, ...]:
    """A subset, in order, with which it shows, and without any single member of which it does not (1-minimal).

    `shows` is asked about each subset once, and must hold for all of them.
    """

    @cache
    def ask(subset: frozenset[T]) -> bool:
        return shows(tuple(thing for thing in things if thing in subset))

    if not things or ask(frozenset()):
        return ()
    found = fewest(things, lambda parts: ask(frozenset(parts)))
    while smaller := next(
        (rest for rest in (tuple(t for t in found if t != one) for one in found) if ask(frozenset(rest))), ()
    ):
        found = smaller  # more features can hide a fault
    return found


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

    def mark_case(case: Case) -> tuple[Mark, str]:
        if case not in seen:
            seen[case] = settle_vacuous(look(case))
        return mark(seen[case], fault)

    def shows(kept: tuple[Dimension, ...]) -> bool:
        found = any(mark_case(way)[0] == "bad" for way in ways(kept))
        tell(f"{'shows' if found else 'does not show'} with: {', '.join(one.name for one in kept) or 'no feature'}")
        return found

    needed = smallest(had, shows)
    least = next((way for way in ways(needed) if mark_case(way)[0] == "bad"), original)
    doubts = {feature.words: _doubt([mark_case(way) for way in variants(least, [feature])]) for feature in needed}
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


SMALLEST = "smallest.json"  # the smallest case, in the run folder of a feature bisection


def look_at_version(version: str, named: str, subject: Subject, folder: Path, again: str) -> Looked:
    """All looks at a release or tree, `named` as it is typed. What they leave is in `folder`/`version`.

    again  the command that repeats a look. Raises HarnessError only if the harness itself cannot go on.
    """
    begun = time.monotonic()
    try:
        source = resolve(named, subject.run.mode.engine)
    except EagletwinError as error:  # it could not be fetched, or holds no engine
        sightings: tuple[Sighting, ...] = (_not_run(error),)
    else:
        with Host(source=source, mode=subject.run.mode) as host:
            sightings = look(host, subject, _fresh(folder / version), again)
    return Looked(version=version, sightings=sightings, seconds=time.monotonic() - begun)


def look(host: Host, subject: Subject, folder: Path, again: str) -> tuple[Sighting, ...]:
    """All looks on one host, each in a fresh fork."""
    matrix, sightings = Matrix(), list[Sighting]()
    while not is_settled(sightings):
        name = f"look-{len(sightings) + 1}"
        question = Question(what=subject.case, name=name, out=folder, run=subject.run, again=again, once=True)
        answer = matrix.ask(host, question)
        if isinstance(answer.error, WouldNotStart | PatchDoesNotApply):
            return (*sightings, _not_run(answer.error))
        if answer.error is not None:
            raise answer.error
        sightings.append(sighting_of(answer.verdict))
    return tuple(sightings)


@dataclass(frozen=True, slots=True)
class Reduction:
    """The result of a feature bisection, and of its smallest case under other circumstances.

    control      without the patches, if there are any
    interpreted  with Triton's interpreter in place of the fast runtime, if that was not what ran the kernels anyway
    """

    reduced: Reduced
    control: Looked | None
    interpreted: Looked | None
    variants: int
    runs: int
    seconds: float


def reduce_case(host: Host, subject: Subject, rule: str, folder: Path, tell: Callable[[str], None]) -> Reduction:
    """Find the features that the fault of a case needs. All variants run on one host; what they leave is in `folder`."""
    begun, seen = time.monotonic(), list[Looked]()

    def look_at(case: Case, patches: tuple[Patch, ...] = subject.run.patches, kernels: Kernels = subject.run.kernels) -> Looked:
        name = f"variant-{len(seen) + 1}"
        changed = replace(subject, case=case, run=replace(subject.run, kernels=kernels, patches=patches))
        seen.append(Looked(version=name, sightings=look(host, changed, folder / name, again="")))
        return seen[-1]

    reduced = reduce(subject.case, rule, look_at, tell)
    found = reduced.fault is not None
    control = look_at(reduced.least, patches=()) if found and subject.run.patches else None
    # Last, and of the smallest case alone: the interpreter takes some thirty times as long.
    interpreted = look_at(reduced.least, kernels="interpreter") if found and subject.run.kernels != "interpreter" else None
    if found:
        (folder / SMALLEST).write_text(pretty_case(reduced.least), encoding="utf-8")
    runs = sum(looked.runs for looked in seen)
    return Reduction(reduced, control, interpreted, len(seen), runs, time.monotonic() - begun)


def sighting_of(verdict: Verdict) -> Sighting:
    """What a verdict says, without numbers that differ from release to release."""
    found = verdict.first
    if found is None or verdict.status != "diverged":
        vacuous = verdict.vacuous and not verdict.gap
        return Sighting(status=verdict.status, rule=verdict.rule, why=_one_line(verdict.reason), vacuous=vacuous)
    place = f"request {found.request}, round {found.round}, " if found.request else ""
    place += found.stage + (f" step {found.step}" if found.step else "") + (f" layer {found.layer}" if found.layer else "")
    return Sighting(status="diverged", rule=found.rule, place=place, why=f"{found.actual} instead of {found.expected}")


def _not_run(error: EagletwinError) -> Sighting:
    return Sighting(status="unknown", why=_one_line(error.cause), ran=False)


def _one_line(text: str) -> str:
    """The gist of a message, for a line of a table."""
    return re.sub(r"\s+", " ", text).strip()[:300]


def _fresh(folder: Path) -> Path:
    """A folder that does not exist yet: an earlier look at the same version may have left one."""
    number, fresh = 1, folder
    while fresh.exists():
        number += 1
        fresh = folder.with_name(f"{folder.name}-{number}")
    return fresh
