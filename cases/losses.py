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
    """Entries that lose under the same condition with such a draft, each with whether the release has the bug; those first.

    A layout that is declared and followed (`view`) is none of them: what it costs is deserved."""
    found = [
        (entry, entry.is_in(server.release))
        for entry in LEDGER.values()
        if entry.loses is not None
        and entry.view is None
        and entry.loses.condition == server.condition
        and entry.loses.layers in (None, server.layers)
        and entry.loses.tree in (None, server.tree)
        and entry.loses.num_steps <= server.num_steps
    ]
    return sorted(found, key=lambda of: not of[1])
