"""Bisection over versions: over published releases one at a time, and the result of either kind. How the marks of versions
follow from what was seen of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from eagletwin.harness.core.terminal import count

from .marks import Fault, Found, Looked, Mark, Unclear, brief, conclude, doubt, end_mark, fault_of, mark, next_between, next_end
from .state import BisectionFolder


@dataclass(frozen=True, slots=True)
class VersionsOutcome:
    """versions, oldest first, to which the indices of `found` refer; looked: all that were looked at, in order.

    fault    what was looked for; None: nothing, for no end shows it
    unclear  why it has no answer, unless too few versions can be decided
    names    what a person calls a version, where that is not its own name
    """

    versions: tuple[str, ...]
    looked: Mapping[str, Looked]
    found: Found
    fault: Fault | None
    rule: str = ""
    unclear: str = ""
    names: Mapping[str, str] = field(default_factory=dict)

    def name(self, version: str) -> str:
        return self.names.get(version, version)

    def why_not(self, version: str) -> str:
        """Why a version cannot be decided; "" if it can, or was not looked at."""
        looked = self.looked.get(version)
        if looked is None:
            return ""
        if self.fault is None:
            return doubt(looked) if end_mark(looked, self.rule) == "skip" else ""
        return mark(looked, self.fault)[1]

    @property
    def answered(self) -> bool:
        """Whether a first version is named."""
        return self.found.exact and not self.unclear


def marks(versions: Sequence[str], looked: Mapping[str, Looked], fault: Fault | None, rule: str) -> dict[int, Mark]:
    """The marks of the versions that were looked at, by index. fault: None as long as it is not known where it shows."""
    seen = ((index, looked[version]) for index, version in enumerate(versions) if version in looked)
    return {index: end_mark(one, rule) if fault is None else mark(one, fault)[0] for index, one in seen}


def fault_between(versions: Sequence[str], looked: Mapping[str, Looked], rule: str, *, anywhere: bool) -> Fault | None:
    """The fault by which the outermost versions that can be decided differ. Raises Unclear."""
    decided = sorted(index for index, mark in marks(versions, looked, None, rule).items() if mark != "skip")
    if len(decided) < 2:
        return None
    return fault_of(looked[versions[decided[0]]], looked[versions[decided[-1]]], anywhere=anywhere)


def outcome_of(
    versions: Sequence[str],
    looked: Mapping[str, Looked],
    fault: Fault | None,
    rule: str,
    *,
    unclear: str = "",
    names: Mapping[str, str] = MappingProxyType({}),
) -> VersionsOutcome:
    """What follows from all that was seen."""
    found = conclude(len(versions), marks(versions, looked, fault, rule))
    seen = {version: looked[version] for version in versions if version in looked}
    return VersionsOutcome(tuple(versions), seen, found, fault, rule, unclear, names)


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
