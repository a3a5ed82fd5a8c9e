"""The process that imports the SGLang that was named and runs the kernel tier on it. Started by command.py as
`python -m eagletwin.harness.commands.kernels.runner FD JOB [CHANGES]`; each message is one line of JSON, written to FD.
"""

import dataclasses
import os
import sys
import traceback
from typing import Any

import msgspec
from hypothesis import settings
from msgspec import UNSET

from eagletwin.harness.engines import triton_cpu
from eagletwin.harness.engines.inside import changes, own_loader
from eagletwin.harness.engines.inside.patches import PatchFailed

from . import release
from .properties import ALL
from .results import Began, Done, FaultsCaught, Function, Imported, Message, NotImported, PropertyJob, PropertyOutcome, Status
from .runtime import WRONG, plant_fault, running
from .tier import CASES, Property, Unequal, format_value, same_cases, seeded_settings

TRIAL = 10  # cases that show whether a function can be called
SEARCH = 20 * CASES  # cases of which one must fail with a planted fault: the first that does ends the search


def main() -> None:
    pipe, job = int(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=PropertyJob)

    def send(message: Message) -> None:
        data = msgspec.json.encode(message) + b"\n"
        while data:
            data = data[os.write(pipe, data) :]

    try:
        if job.root:
            own_loader.install("sglang")
        if len(sys.argv) > 3:
            changes.install(sys.argv[3])
            changes.watch_kernels()
            changes.watch_launches(fast=job.kernels != "interpreter")
        release.prepare(release.MODULES[0])
        if job.root:
            own_loader.confirm("sglang", job.version, job.root)
        else:
            own_loader.confirm_installed("sglang")
    except BaseException as error:
        traceback.print_exc()
        send(NotImported(f"SGLang would not import: {type(error).__name__}: {error}"))
        sys.exit(1)
    send(Imported(str(sys.modules["sglang"].__file__), own_loader.version("sglang")))
    for name in job.functions:
        send(look(name))
    for of in ALL:
        if of.name in job.properties:
            for name in of.functions:
                look(name)  # what it imports takes none of a property's time
    with running(job.kernels):
        for of in ALL:
            if of.name in job.properties:
                send(Began(of.name))
                send(outcome(of, job))
    differs = changes.differs()
    send(Done(None if differs is UNSET else differs))


def look(name: str) -> Function:
    """Where this SGLang has a function of the tier."""
    try:
        return Function(name, where=release.find(name)[0])
    except release.Absent as error:
        return Function(name, why=str(error))
    except release.Broken as error:
        return Function(name, why=str(error), broken=True)


class Watched:
    """A property's `holds`, with how often it ran and the last case with which it did not finish."""

    def __init__(self, of: Property) -> None:
        self.examples, self.case = 0, ""
        self._holds = of.holds

    def __call__(self, case: Any) -> None:
        self.examples += 1
        try:
            self._holds(case)
        except Exception:
            self.case = format_value(case)
            raise


def outcome(of: Property, job: PropertyJob) -> PropertyOutcome:
    """Run one property: its cases, and if it holds the planted faults of the job's functions."""
    watched, count = Watched(of), TRIAL if job.trial else job.examples
    drawn = seeded_settings if job.seed else same_cases
    there = tuple(name for name in of.functions if look(name).where)

    def make_outcome(status: Status, **details: Any) -> PropertyOutcome:
        return PropertyOutcome(property=of.name, status=status, functions=there, examples=watched.examples, **details)

    triton_cpu.clear()
    try:
        dataclasses.replace(of, holds=watched, named=of.name).check(drawn(count), job.seed or None)
    except release.Absent as error:
        return make_outcome("absent", detail=str(error))
    except Unequal as error:
        what = f"{error.what}{error.place}"
        return make_outcome("diverged", case=watched.case, what=what, expected=error.expected, actual=error.found)
    except WRONG as error:
        return make_outcome("diverged", case=watched.case, what=type(error).__name__, detail=str(error))
    except Exception as error:
        traceback.print_exc()
        return make_outcome("unknown", case=watched.case, detail=f"{type(error).__name__}: {' '.join(str(error).split())}")
    if triton_cpu.faults():
        fault = triton_cpu.faults()[0]
        return make_outcome("diverged", what=type(fault).__name__, detail=f"{fault}; SGLang caught the exception")
    slow = triton_cpu.fallbacks()
    if slow and job.kernels != "interpreter":
        return make_outcome(
            "unknown", detail=f"ran in Triton's interpreter, where no access is checked: {', '.join(sorted(slow))}"
        )
    if job.trial or job.kernels == "interpreter":  # which checks no access: a planted fault could write anywhere, or never end
        return make_outcome("equal")
    proofs = tuple(proof(of, name, drawn(max(count, SEARCH)), job.seed or None) for name in there if name in job.functions)
    return make_outcome("unknown" if any(found.missed for found in proofs) else "equal", proofs=proofs)


def proof(of: Property, function: str, config: settings, seed: int | None) -> FaultsCaught:
    """Plant this function's faults, each alone. If none of them fits this source, the function does nothing instead."""
    caught, unfit, missed = 0, 0, []
    for fault in of.faults:
        if fault.target != function:
            continue
        try:
            with plant_fault(fault):
                case = of.failing(config, seed, (Exception,))
        except PatchFailed:
            unfit += 1
            continue
        caught += case is not None
        missed += [f"{fault.match!r} as {fault.replacement!r}"] if case is None else []
    if caught or missed:
        return FaultsCaught(function, caught, unfit, tuple(missed))
    noticed = of.notices(function, config, seed)
    return FaultsCaught(function, int(noticed), unfit, () if noticed else ("it does nothing",), silenced=True)


if __name__ == "__main__":
    main()
