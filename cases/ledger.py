"""The ledger by name: how a number or a word becomes entries, cases and patches."""

from collections.abc import Iterable
from pathlib import Path

from eagletwin.harness.core.case import Case
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.patch import Patch, read_patch
from eagletwin.harness.core.words import nearest
from eagletwin.harness.families.valid import read_case

from .entry import Entry, Known
from .regressions import LEDGER, PROBES


def patches_of(revert: list[str] | None, remedy: list[str] | None, patch: list[Path] | None) -> tuple[Patch, ...]:
    """The patches that undo these fixes, apply these candidate fixes, and lie in these files. Raises InputError."""

    def refused(name: str, what: str, remedy: str) -> InputError:
        return InputError(f"entry {name} has no {what}", consequence="nothing was run", remedy=remedy)

    patches: list[Patch] = []
    for entry in (entry for name in revert or () for entry in entries_of(name)):
        if entry.revert is None:
            live = f"it is live: `eagletwin check {entry.id}` shows it as the release is, `prove {entry.id}` both sides"
            raise refused(entry.id, "fix that could be undone", live)
        patches.append(entry.revert)
    for entry in (entry for name in remedy or () for entry in entries_of(name)):
        if entry.remedy is None:
            raise refused(entry.id, "candidate fix", f"`eagletwin prove {entry.id}` shows both sides of it")
        patches.append(entry.remedy)
    # entries that share a fix, or the same one twice: an edit is made once
    return tuple(dict.fromkeys([*patches, *(read_patch(file) for file in patch or ())]))


def entry_of(name: str) -> Entry:
    """The entry of this id. Raises InputError if no id, or more than one, begins so."""
    found = entries_of(name)
    if len(found) > 1:
        raise InputError(
            f"{name} has several entries",
            consequence="nothing was run",
            remedy=f"use one of {', '.join(entry.id for entry in found)}",
        )
    return found[0]


def entries_of(name: str) -> list[Entry]:
    """The entry of this id, or all whose id begins with these words. Raises InputError if no id does."""
    found = _matching(name)
    if not found and name.removeprefix("#") in PROBES:
        raise InputError(
            f"entry {name} is a call of one function of SGLang, and has no case",
            consequence="nothing was run",
            remedy=PROBES[name.removeprefix("#")].command,
        )
    if not found:
        raise InputError(
            f"the ledger has no entry {name!r}",
            consequence="nothing was run",
            remedy=nearest(name, LEDGER, "`eagletwin ledger`"),
        )
    return found


def _matching(name: str) -> list[Entry]:
    """The entry of this id, or all whose id begins with these words; an empty list if no id does."""
    name = name.removeprefix("#")
    if name in LEDGER:  # and not also those that are named after it, such as draft-plan-flashmla after draft-plan
        return [LEDGER[name]]
    return [entry for entry in LEDGER.values() if entry.id.startswith(f"{name}-")]


def ledger_of(names: list[str]) -> list[Entry]:
    """The entries of these names; of `all`, the whole ledger. Raises InputError."""
    return list(LEDGER.values()) if "all" in names else [entry for name in names for entry in entries_of(name)]


def remedies_of(names: Iterable[str]) -> tuple[Patch, ...]:
    """The remedies of the entries with these ids, but for those that have none."""
    return tuple(remedy for name in names if (remedy := LEDGER[name].remedy) is not None)


def with_probes(names: list[str]) -> list[Known]:
    """The same, and the probes: calls of a single function instead of a case, which run on whole releases only."""
    probes = PROBES.values() if "all" in names else [PROBES[name] for name in names if name in PROBES]
    return [*ledger_of([name for name in names if name not in PROBES]), *probes]


def case_of(name: str) -> Case:
    """The case in this file, or of this entry. Raises InputError."""
    entry = entry_named(name)
    return entry.case if entry is not None else read_case(Path(name))


def entry_named(name: str) -> Entry | None:
    """The entry that is meant by the name of a case; None: it is a file. Raises InputError."""
    if Path(name).exists() or not (name.removeprefix("#").isdigit() or _matching(name)):
        return None
    return entry_of(name)  # says which entries there are
