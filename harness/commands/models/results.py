"""What the entries of the ledger came to in other models, next to the page that is made of it."""

import dataclasses
import hashlib
from collections.abc import Collection, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal

from msgspec import Struct

from eagletwin.cases.carried import cannot_be_in, carried
from eagletwin.cases.entry import Entry
from eagletwin.cases.ledger import LEDGER, remedies_of
from eagletwin.cases.reach import on_a_cpu, unreached
from eagletwin.harness.core.case import Case, without_defaults
from eagletwin.harness.core.patch import Patch
from eagletwin.harness.engines.lock import releases
from eagletwin.harness.families import RECIPES

from ..answer_store import read_answers, write_answers

FILE = "models.jsonl"


class ModelCell(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An entry in a model.

    asked   digest of the entry as it is at home, and how it is judged: another must be proven anew
    status  `proven`: red without the fix, green with it. `cannot be`: by what the entry is about, the model or the CPU.
            `not shown`: no case that was tried shows it. `not run`: no engine for it
    rule    of a proof: the one by which it shows
    attempt of a proof: which of the cases of `carried` shows it, from 0
    beside  live bugs that are mended on both sides, since they would show first
    idle    what the entry edits and this model's worker never calls
    why     why not, in short
    sglang  the version that gave the answer; empty, if none was asked
    """

    asked: str
    status: Literal["proven", "cannot be", "not shown", "not run"]
    rule: str = ""
    attempt: int | None = None
    beside: tuple[str, ...] = ()
    idle: tuple[str, ...] = ()
    why: str = ""
    sglang: str = ""


class InModel(Struct, kw_only=True):
    """A model: its answers by entry. It is filled while it is asked."""

    model: str
    answers: dict[str, ModelCell] = {}


def asked_of(entry: Entry) -> str:
    """A digest of what is asked of an entry in any model."""
    sides = [[patch.name for patch in side.patches] + [side.view] for side in (entry.green, entry.red)]
    return hashlib.sha256(f"{without_defaults(entry.case)} {sides} {entry.rule}".encode()).hexdigest()[:12]


def read(folder: Path) -> dict[str, InModel]:
    """Each model, with what is known of it. Raises InputError for a file of another kind."""
    answers = read_answers(folder / FILE, ModelCell, "nothing was proven")
    return {model: InModel(model=model, answers=answers.get(model, {}) | _impossible_in(model)) for model in RECIPES}


def write(folder: Path, found: Collection[InModel]) -> None:
    """Write what was run in all models, in place of what was there."""
    ran = {one.model: {name: cell for name, cell in one.answers.items() if cell.status != "cannot be"} for one in found}
    write_answers(folder / FILE, ran)


def without_running(entry: Entry, model: str) -> ModelCell | None:
    """What can be said of an entry in a model without a run; None: it must be run."""
    why = unreached(entry, on_a_cpu(entry)).removeprefix(f"{entry.id} is ") or cannot_be_in(entry, model)
    return ModelCell(asked=asked_of(entry), status="cannot be", why=why) if why else None


def _impossible_in(model: str) -> dict[str, ModelCell]:
    cells = ((entry.id, without_running(entry, model)) for entry in LEDGER.values())
    return {name: cell for name, cell in cells if cell is not None}


def case_in(entry: Entry, model: str, attempt: int) -> Case:
    """The case by which an entry was proven in a model."""
    from ..bench.acceptance import target_says  # it imports torch

    return next(islice(carried(entry, model, target_says), attempt, None)).case


def attempt_of(entry: Entry, case: Case) -> int:
    """Which of the cases of an entry in a model this one is."""
    from ..bench.acceptance import target_says

    return next(n for n, one in enumerate(carried(entry, case.model, target_says)) if one.case == case)


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
