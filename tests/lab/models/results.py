"""What the entries of the ledger came to in other models, written next to the page that is made of it."""

import dataclasses
from collections.abc import Collection, Sequence
from pathlib import Path

from eagletwin.cases.entry import Entry
from eagletwin.cases.ledger import LEDGER, remedies_of
from eagletwin.cases.reach import port_entry
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.patch import Patch
from eagletwin.harness.engines.provision import releases
from eagletwin.harness.families.weights import target_says

from ..answers import write_answers
from ..gpu.in_model import FILE, InModel, asked_of, case_in, read


def write(folder: Path, found: Collection[InModel]) -> None:
    """Write what was run in all models, in place of what was there."""
    ran = {one.model: {name: cell for name, cell in one.answers.items() if cell.status != "cannot be"} for one in found}
    write_answers(folder / FILE, ran)


def attempt_of(entry: Entry, case: Case) -> int:
    """Which of the cases of an entry in a model this one is."""
    return next(n for n, one in enumerate(port_entry(entry, case.model, target_says)) if one.case == case)


def proven_in(folder: Path, model: str) -> list[Entry]:
    """The entries that are proven in a model as the ledger has them today, with the cases that show them; and beside each, for
    any release, the remedies of the live bugs that would show first there."""
    answers = read(folder)[model].answers
    return [
        dataclasses.replace(
            entry,
            case=case_in(entry, model, answer.attempt),
            beside=dict.fromkeys(releases(), remedies(answer.beside)) if answer.beside else {},
        )
        for entry in LEDGER.values()
        if (answer := answers.get(entry.id)) is not None and answer.attempt is not None and answer.asked == asked_of(entry)
    ]


def remedies(names: Sequence[str]) -> Patch:
    """One patch with the remedies of these live bugs."""
    patches = remedies_of(names)
    older = any(patch.otherwise for patch in patches)
    return Patch(
        name=" and ".join(patch.name for patch in patches),
        edits=tuple(edit for patch in patches for edit in patch.edits),
        otherwise=tuple(edit for patch in patches for edit in patch.otherwise or patch.edits) if older else (),
    )
