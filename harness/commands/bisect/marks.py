"""What several looks at one version say about one fault. Pure.

A look that shows the fault proves that it is there; one that does not proves little. So a version with a minority of such looks
is neither good nor bad, and a divergence of another kind, which may hide the fault, makes none of the two.
"""

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from .search import Mark

LOOKS = 3  # at each version, if they come out alike
MAX_LOOKS = 7  # if they do not: then the majority counts


class Sighting(Struct, frozen=True, kw_only=True):
    """The result of one look. `rule` and `place` are of the first divergence; `why` explains the result.

    vacuous  unknown only because the case did not reach what it is for, or what a patch edits; ran: an engine ran the case
    """

    status: Literal["equal", "diverged", "unknown"]
    rule: str = ""
    place: str = ""
    why: str = ""
    vacuous: bool = False
    ran: bool = True

    @property
    def kind(self) -> tuple[str, str, str]:
        """What two looks must share to have come out alike."""
        return (self.status, self.rule, self.place)


class Looked(Struct, frozen=True, kw_only=True):
    """A version and all looks at it, at least one. `seconds`: what it took, importing and building included."""

    version: str
    sightings: tuple[Sighting, ...]
    seconds: float = 0.0

    @property
    def runs(self) -> int:
        """How many times an engine ran the case."""
        return sum(sighting.ran for sighting in self.sightings)

    @property
    def usual(self) -> Sighting:
        """The result of more than half of the looks; else unknown."""
        for sighting in self.sightings:
            if 2 * sum(other.kind == sighting.kind for other in self.sightings) > len(self.sightings):
                return sighting
        kinds = sorted({brief(sighting) for sighting in self.sightings})
        return Sighting(status="unknown", why=f"{len(self.sightings)} looks did not agree: {'; '.join(kinds)}")


class Fault(Struct, frozen=True, kw_only=True):
    """The divergence that is looked for: by its rule, and where, unless that is of no importance (`place` "")."""

    rule: str
    place: str = ""

    def shown(self, sighting: Sighting) -> bool:
        """Whether a look shows it. A fault whose rule is that the worker survives shows in an `unknown`."""
        return sighting.status != "equal" and sighting.rule == self.rule and self.place in ("", sighting.place)


def settled(sightings: Sequence[Sighting]) -> bool:
    """Whether no further look is needed. After an unknown result one more look follows, and no other if it says the same."""
    if not sightings:
        return False
    alike = len({sighting.kind for sighting in sightings}) == 1
    enough = LOOKS if sightings[0].status != "unknown" else 2
    return len(sightings) >= (enough if alike else MAX_LOOKS)


def mark(looked: Looked, fault: Fault) -> tuple[Mark, str]:
    """The mark of a version, and for "skip" why it is neither."""
    sightings = looked.sightings
    shown = sum(fault.shown(sighting) for sighting in sightings)
    equal = sum(sighting.status == "equal" for sighting in sightings)
    if 2 * shown > len(sightings):
        return "bad", ""
    if 2 * equal > len(sightings) and not shown:
        return "good", ""
    if shown:
        return "skip", f"it showed in {shown} of {len(sightings)} looks, and not in the others"
    return "skip", doubt(looked)


def doubt(looked: Looked) -> str:
    """Why a version that does not show what is looked for is not good either."""
    usual = looked.usual
    if usual.status == "diverged":
        return f"it diverged otherwise, by {usual.rule} at {usual.place}, which may hide what is looked for"
    return usual.why or usual.rule


def brief(sighting: Sighting) -> str:
    """A look in a few words."""
    where = f" at {sighting.place}" if sighting.place else ""
    return f"{sighting.status} {sighting.rule}{where}".strip()


class Unclear(Exception):
    """The two ends do not say which divergence is looked for; the message says why."""


def end_mark(looked: Looked, rule: str) -> Mark:
    """The mark of a version as long as it is not known where the fault shows. rule: "" if any may be it."""
    usual = looked.usual
    if usual.status == "equal":
        return "good"
    return "bad" if (usual.rule == rule if rule else usual.status == "diverged") else "skip"


def fault_of(old: Looked, new: Looked, *, anywhere: bool) -> Fault | None:
    """The fault that one of two ends shows and the other does not; neither is "skip" by end_mark. None: neither shows any.

    anywhere  count it wherever the rule is broken. Raises Unclear.
    """
    found = [looked.usual for looked in (old, new) if looked.usual.status != "equal"]
    faults = {Fault(rule=sighting.rule, place="" if anywhere else sighting.place) for sighting in found}
    if len(faults) > 1:
        ends = "; ".join(f"{looked.version} {brief(looked.usual)}" for looked in (old, new))
        raise Unclear(f"both ends diverge, and not alike: {ends}")
    return next(iter(faults), None)
