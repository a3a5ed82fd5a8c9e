"""What an entry of the ledger came to in another model, as a JSON file of its own for each model."""

import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct

from eagletwin.cases.entry import Entry
from eagletwin.cases.ledger import remedies_of
from eagletwin.cases.regressions import LEDGER
from eagletwin.harness.core.case import Case, without_defaults
from eagletwin.harness.core.patch import Patch
from eagletwin.harness.engines.lock import releases

from ..kept import read_kept, write_kept

FOLDER = Path("data") / "models"


class ModelCell(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An entry in a model.

    asked   digest of the entry as it is at home, and how it is judged: another must be proven anew
    status  `proven`: red without the fix, green with it. `cannot be`: by what the entry is about, the model or the CPU.
            `not shown`: no case that was tried shows it. `not run`: no engine for it
    rule    of a proof: the one by which it shows
    case    of a proof: the one that shows it
    beside  live bugs that are mended on both sides, since they would show first
    idle    what the entry edits and this model's worker never calls
    why     why not, in short
    """

    asked: str
    status: Literal["proven", "cannot be", "not shown", "not run"]
    rule: str = ""
    case: Case | None = None
    beside: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    why: str = ""
    seconds: float = 0.0


class InModel(Struct, kw_only=True):
    """A model: its answers by entry, and the SGLang that gave them. It is filled while it is asked."""

    model: str
    sglang: str = ""
    answers: dict[str, ModelCell] = {}


def asked_of(entry: Entry) -> str:
    """A digest of what is asked of an entry in any model."""
    sides = [[patch.name for patch in side.patches] + [side.view] for side in (entry.green, entry.red)]
    return hashlib.sha256(f"{without_defaults(entry.case)} {sides} {entry.rule}".encode()).hexdigest()[:12]


def read(folder: Path, model: str) -> InModel:
    """What is known of a model; nothing, if it has no file. Raises InputError for a file of another kind."""
    return read_kept(folder / FOLDER / f"{model}.json", InModel(model=model), "nothing was proven")


def write(folder: Path, found: InModel) -> None:
    """Keep it, in place of what was there."""
    write_kept(folder / FOLDER / f"{found.model}.json", found)


def proven_in(folder: Path, model: str) -> list[Entry]:
    """The entries that are proven in a model as the ledger has them today, with the cases that show them; and beside each, for
    any release, the remedies of the live bugs that would show first there."""
    answers = read(folder, model).answers
    return [
        dataclasses.replace(
            entry, case=answer.case, beside=dict.fromkeys(releases(), remedies(answer.beside)) if answer.beside else {}
        )
        for entry in LEDGER.values()
        if (answer := answers.get(entry.id)) is not None and answer.case is not None and answer.asked == asked_of(entry)
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
