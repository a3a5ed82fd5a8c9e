"""Bisection over published releases: which of them has the change. One at a time, each in processes of its own."""

from collections.abc import Callable

from eagletwin.harness.core.terminal import count

from .marks import Looked, Unclear, brief
from .outcome import VersionsOutcome, fault_between, marks, outcome_of
from .search import next_between, next_end
from .state import BisectionFolder


def bisect_releases(run: BisectionFolder, look: Callable[[str], Looked]) -> VersionsOutcome:
    """Search the plan's versions; `look` looks at one of them. What is known already is not looked at again."""
    plan, looked = run.state.plan, run.state.looked
    versions, rule = plan.versions, plan.rule or plan.expected

    def look_at(index: int) -> None:
        version = versions[index]
        run.tell(f"{version}: looking …")
        run.add(look(version))
        run.tell(said(looked[version]))

    while (index := next_end(len(versions), marks(versions, looked, None, rule))) is not None:
        look_at(index)
    try:
        fault = fault_between(versions, looked, rule, anywhere=bool(plan.rule))
    except Unclear as error:
        return outcome_of(versions, looked, None, rule, unclear=str(error))
    run.state.fault = fault
    if fault is not None:
        for choose in (next_end, next_between):
            while (index := choose(len(versions), marks(versions, looked, fault, rule))) is not None:
                look_at(index)
    run.state.finished = True
    return outcome_of(versions, looked, fault, rule)


def said(looked: Looked) -> str:
    """A line of progress."""
    usual = looked.usual
    why = f" ({usual.why})" if usual.status == "unknown" and usual.why else ""
    return f"{looked.version}: {brief(usual)}{why}, {count(len(looked.sightings), 'look')}, {looked.seconds:.1f} s"
