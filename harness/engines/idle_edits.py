"""Edits that did nothing in a run of several engines or stages: those that none of them reached."""

from msgspec import UNSET
from msgspec.structs import replace

from eagletwin.harness.core.differs import merged
from eagletwin.harness.core.records import Header


def of_both(one: Header, other: Header) -> Header:
    """The first header, with the edits of which both say that they were not reached, and the statements that either ran."""
    idle = tuple(name for name in one.idle_edits if name in other.idle_edits)
    unreached = [name for name in _unreached(one) if _did_nothing(name, other)]
    unreached += [name for name in _unreached(other) if name not in unreached and _did_nothing(name, one)]
    elsewhere = {change.patch: change for change in other.patched or ()}
    patched = [merged([change, elsewhere.get(change.patch, change)]) for change in one.patched or ()]
    return replace(one, idle_edits=idle, unreached_edits=tuple(unreached) or UNSET, patched=tuple(patched) or UNSET)


def _unreached(header: Header) -> tuple[str, ...]:
    return header.unreached_edits or ()


def _did_nothing(name: str, header: Header) -> bool:
    return name in _unreached(header) or name.startswith(header.idle_edits)
