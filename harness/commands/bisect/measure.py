"""Look at one version of SGLang, or one variant of a case, as often as it takes. Whatever it dies of is a look like any other.

Every version has a host of its own, so its crash or its refusal to start takes nothing else along.
"""

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from eagletwin.harness.core.case import Case, pretty_case
from eagletwin.harness.core.errors import EagletwinError
from eagletwin.harness.core.patch import Patch
from eagletwin.harness.core.run_spec import Kernels
from eagletwin.harness.core.verdict import Verdict
from eagletwin.harness.engines.host import Host, PatchDoesNotApply, WouldNotStart
from eagletwin.harness.engines.source import resolve

from ..matrix import Matrix, Question
from .marks import Looked, Sighting, settled
from .reduce import Reduced, reduce
from .state import Subject

SMALLEST = "smallest.json"  # the smallest case, in the run folder of a feature bisection


def look_at_version(version: str, sglang: str, subject: Subject, folder: Path, again: str) -> Looked:
    """All looks at an SGLang, `sglang` by the name that --sglang takes. What they leave is in `folder`/`version`.

    again  the command that repeats a look. Raises HarnessError only if the harness itself cannot go on.
    """
    begun = time.monotonic()
    try:
        source = resolve(sglang)
    except EagletwinError as error:  # it could not be fetched, or is not an SGLang
        sightings: tuple[Sighting, ...] = (_not_run(error),)
    else:
        with Host(source=source) as host:
            sightings = look(host, subject, _fresh(folder / version), again)
    return Looked(version=version, sightings=sightings, seconds=time.monotonic() - begun)


def look(host: Host, subject: Subject, folder: Path, again: str) -> tuple[Sighting, ...]:
    """All looks on one host, each in a fresh fork."""
    matrix, sightings = Matrix(), list[Sighting]()
    while not settled(sightings):
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
