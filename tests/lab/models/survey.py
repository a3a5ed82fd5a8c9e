"""The ledger in models: what is known of each entry, proofs of the rest, and jobs of a GPU plan for what is proven."""

import dataclasses
import hashlib
import tempfile
from collections.abc import Callable, Collection, Sequence
from itertools import islice
from pathlib import Path
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from eagletwin.cases.entry import Entry
from eagletwin.cases.ledger import LEDGER, remedies_of
from eagletwin.cases.reach import cannot_be_in, on_a_cpu, port_entry, why_unreachable
from eagletwin.harness.commands.prove.proof import ProofInModel, prove_in_model
from eagletwin.harness.core.case import Case, without_defaults
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.patch import Patch
from eagletwin.harness.core.run_spec import Limits, RunSpec
from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.provision import releases
from eagletwin.harness.families import RECIPES, runs_on
from eagletwin.harness.families.weights import target_says

from ..common import read_answers, write_answers
from ..gpu.job import Job
from ..gpu.plan import Options, proofs

# The ledger's proofs of a plan in another model than each entry's own, by the cases and rules with which a CPU proved them
# there: what `python -m tests.lab models` keeps next to its page.

FILE = "models.jsonl"
# Of DP attention: ranks meet in the same code in every model, and a cell would take two minutes. Of rows that are chosen: two
# steps of any chain show the ledger's dsa-draft-reads first.
ON_SGLANG = [name for name, recipe in RECIPES.items() if runs_on(recipe, "sglang")]
NOT_ASKED = ("not asked: each run builds all ranks anew", "not asked: as released every chain is wrong there (dsa-draft-reads)")


class ModelCell(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An entry in a model.

    asked   digest of the entry as it is at home, and how it is judged: another must be proven anew
    status  `proven`: red without the fix, green with it. `cannot be`: by what the entry is about, the model or the CPU.
            `not shown`: no case that was tried shows it. `not run`: no engine for it
    rule    of a proof: the one by which it shows
    attempt of a proof: which of the cases of `port_entry` shows it, from 0
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
    return {model: InModel(model=model, answers=answers.get(model, {}) | _impossible_in(model)) for model in ON_SGLANG}


def without_running(entry: Entry, model: str) -> ModelCell | None:
    """What can be said of an entry in a model without a run; None: it must be run."""
    why = why_unreachable(entry, on_a_cpu(entry)).removeprefix(f"{entry.id} is ") or cannot_be_in(entry, model)
    if why:
        return ModelCell(asked=asked_of(entry), status="cannot be", why=why)
    left_out = (entry.case.engine.sglang.attn_dp_size > 1, RECIPES[model].target.index is not None)
    whys = [why for why, out in zip(NOT_ASKED, left_out, strict=True) if out and model != entry.case.model]
    return ModelCell(asked=asked_of(entry), status="not run", why=whys[0]) if whys else None


def _impossible_in(model: str) -> dict[str, ModelCell]:
    cells = ((entry.id, without_running(entry, model)) for entry in LEDGER.values())
    return {name: cell for name, cell in cells if cell is not None}


def case_in(entry: Entry, model: str, attempt: int) -> Case:
    """The case by which an entry was proven in a model."""
    from eagletwin.harness.families.weights import target_says  # it imports torch

    return next(islice(port_entry(entry, model, target_says), attempt, None)).case


def proofs_in_model(entries: list[Entry], options: Options, records: Path) -> tuple[list[Job], list[str]]:
    """Both sides of the entries that are proven in the model of these options, and why the others are left out. Live bugs that
    would show first there are mended on both sides. records: the folder into which `python -m tests.lab models` wrote."""
    answers, jobs, others = read(records)[options.model].answers, list[Job](), list[str]()
    for entry in entries:
        answer = answers.get(entry.id)
        if answer is None or answer.asked != asked_of(entry):
            raise InputError(
                f"{records} does not say by which case {entry.id} shows in {options.model}",
                consequence="no plan was written",
                remedy=f"run `python -m tests.lab models {options.model} --entry {entry.id}` in a checkout, or give --records",
            )
        if answer.attempt is None:
            others.append(f"{entry.id} in {options.model}: {answer.why or answer.status}")
            continue
        mended = remedies_of(answer.beside)
        case = case_in(entry, options.model, answer.attempt)
        there = dataclasses.replace(entry, case=case, rule=answer.rule or entry.rule)
        jobs += [_beside(job, mended) for job in proofs([there], options)]
    return jobs, others


def _beside(job: Job, mended: tuple[Patch, ...]) -> Job:
    return replace(job, patches=(*job.patches, *(patch for patch in mended if patch not in job.patches)))


# Prove the ledger in a model, as far as it is not known yet, and write what came of it next to its page.

# What the entries of the ledger came to in other models, written next to the page that is made of it.


def write(folder: Path, found: Collection[InModel]) -> None:
    """Write what was run in all models, in place of what was there."""
    ran = {one.model: {name: cell for name, cell in one.answers.items() if _was_run(cell)} for one in found}
    write_answers(folder / FILE, ran)


def _was_run(cell: ModelCell) -> bool:
    return cell.status != "cannot be" and cell.why not in NOT_ASKED


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


# Prove the ledger in a model, as far as it is not known yet.

_RUN = RunSpec(limits=Limits(step=60.0, case=300.0))


def due(found: InModel, entries: Sequence[Entry], *, again: bool) -> list[Entry]:
    """Entries of which it is not known what they come to in this model, or all of them."""
    return [
        entry for entry in entries if again or entry.id not in found.answers or found.answers[entry.id].asked != asked_of(entry)
    ]


def survey(
    host: Host, found: InModel, entries: Sequence[Entry], *, keep: Callable[[], None], say: Callable[[str], None]
) -> None:
    """Fill in these entries, and `keep` what is known after each."""
    for entry in entries:
        if (answer := without_running(entry, found.model)) is None:
            with tempfile.TemporaryDirectory(prefix="eagletwin-") as scratch:
                there = host.beside(mode=on_a_cpu(entry))
                proof = prove_in_model(there, entry, found.model, Path(scratch), replace(_RUN, mode=there.mode))
            answer = replace(_answer(entry, proof), sglang=there.version)
        found.answers[entry.id] = answer
        say(f"{found.model:18} {entry.id:26} {answer.status} {answer.rule or answer.why}".rstrip())
        keep()


def _answer(entry: Entry, result: ProofInModel) -> ModelCell:
    proof, asked = result.proof, asked_of(entry)
    if proof.errors:
        return ModelCell(asked=asked, status="not run", why=" ".join(proof.why.split()))
    if proof.holds:
        assert isinstance(proof.entry, Entry)
        rule, attempt = proof.red.verdict.rule, attempt_of(entry, proof.entry.case)
        return ModelCell(asked=asked, status="proven", rule=rule, attempt=attempt, beside=result.beside)
    sides = [
        f"{name}: {' '.join(filter(None, (verdict.status, verdict.rule, verdict.reason)))}"
        for name, verdict in (("with the fix", proof.green.verdict), ("without it", proof.red.verdict))
    ]
    if proof.another:
        sides.append(f"equal with the fix of {proof.another} alone as well")
    return ModelCell(asked=asked, status="not shown", idle=result.idle, why="; ".join(sides))
