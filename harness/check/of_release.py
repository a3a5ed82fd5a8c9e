"""Which releases have a bug of the ledger."""

from eagletwin.cases.entry import Known
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.engines.lock import releases


def has(release: str, entry: Known) -> bool:
    """Whether a release has the bug, by the entry's own facts. Raises InputError for a release that is not known."""
    order = releases()
    if release not in order:
        raise InputError(
            f"{release!r} is not a known release", consequence="nothing was listed", remedy=f"use one of {', '.join(order)}"
        )
    if entry.buggy.startswith("before"):  # the oldest release that eagletwin runs
        return False
    first, _, last = (part.strip() for part in entry.buggy.partition("-"))
    return order.index(first) <= order.index(release) <= (order.index(last) if last else len(order))
