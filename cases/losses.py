"""Which bugs of the ledger a server's lost drafts look like."""

from dataclasses import dataclass
from typing import Literal

from .entry import Condition, Doing, Entry
from .ledger import LEDGER

State = Literal["in this release", "not known", "fixed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Losing:
    """A server: its release, what it drafts, and what else it does."""

    release: str
    layers: bool
    tree: bool
    num_steps: int
    does: frozenset[Doing] = frozenset()


@dataclass(frozen=True, slots=True)
class Suspect:
    """A bug that the server may have, and whether its release has it; of a commit or a fork that is not known."""

    entry: Entry
    state: State

    def __str__(self) -> str:
        return f"{self.entry.id} ({self.where})"

    @property
    def needs(self) -> Doing | None:
        """Without this no server has it."""
        return None if self.entry.loses is None else self.entry.loses.needs

    @property
    def where(self) -> str:
        """Which code has it, in words."""
        return {
            "in this release": "in this release",
            "not known": f"in {self.entry.buggy}; this one is not known",
            "fixed": f"fixed in {self.entry.fixed}: only a tree without the fix has it",
        }[self.state]


def losing_so(condition: Condition, server: Losing) -> list[Suspect]:
    """Bugs that lose under a condition and that the server can have: those of its release first, then those that a change of it
    may have brought back. One that came after its release is none of them, nor is a layout that is declared and followed
    (`view`): what it costs is deserved."""
    found = [
        Suspect(entry, state)
        for entry in LEDGER.values()
        if entry.loses is not None
        and entry.view is None
        and entry.loses.condition == condition
        and entry.loses.layers in (None, server.layers)
        and entry.loses.tree in (None, server.tree)
        and entry.loses.num_steps <= server.num_steps
        and entry.loses.needs in (None, *server.does)
        and (state := _state(entry, server.release)) is not None
    ]
    order: tuple[State, ...] = ("in this release", "not known", "fixed")
    return sorted(found, key=lambda one: order.index(one.state))


def _state(entry: Entry, release: str) -> State | None:
    """None: the release is older than the bug."""
    from packaging.version import InvalidVersion, Version

    try:
        version = Version(release)
    except InvalidVersion:
        return "not known"
    if entry.is_in(release):
        return "in this release"
    return "fixed" if entry.fixed and version >= Version(entry.fixed) else None
