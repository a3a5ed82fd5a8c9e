"""Which bugs of the ledger a server's lost drafts look like."""

from dataclasses import dataclass

from .entry import Entry
from .regressions import LEDGER


@dataclass(frozen=True, slots=True, kw_only=True)
class Losing:
    """How a server loses: under which condition (a Condition, or a word that is none), and what it drafts."""

    condition: str
    release: str
    layers: bool
    tree: bool
    num_steps: int


def losing_so(server: Losing) -> list[tuple[Entry, bool]]:
    """Entries that lose under the same condition with such a draft, each with whether the release has the bug; those first."""
    found = [
        (entry, in_range(server.release, entry))
        for entry in LEDGER.values()
        if entry.loses is not None
        and entry.loses.condition == server.condition
        and entry.loses.layers in (None, server.layers)
        and entry.loses.tree in (None, server.tree)
        and entry.loses.num_steps <= server.num_steps
    ]
    return sorted(found, key=lambda of: not of[1])


def in_range(release: str, entry: Entry) -> bool:
    """Whether a release has the bug, by what the ledger says: "FIRST - LAST", "FIRST -" or "before OLDEST"."""
    from packaging.version import InvalidVersion, Version

    first, _, last = entry.buggy.partition(" -")
    try:
        version = Version(release)
        if entry.buggy.startswith("before "):
            return version < Version(entry.buggy.removeprefix("before "))
        return Version(first) <= version and (not last.strip() or version <= Version(last.strip()))
    except InvalidVersion:  # a commit, or a fork: not known
        return False
