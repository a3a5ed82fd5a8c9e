"""Prove the ledger in a model, as far as it is not known yet, and write what came of it next to its page."""

import dataclasses
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from msgspec.structs import replace

from eagletwin.cases.entry import Entry
from eagletwin.cases.ledger import LEDGER, remedies_of
from eagletwin.cases.reach import on_a_cpu, port_entry
from eagletwin.harness.commands.prove.proof import ProofInModel, prove_in_model
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.patch import Patch
from eagletwin.harness.core.run_spec import Limits, RunSpec
from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.provision import releases
from eagletwin.harness.families.weights import target_says

from ..common import write_answers
from ..gpu.in_model import FILE, InModel, ModelCell, asked_of, case_in, read, without_running

# What the entries of the ledger came to in other models, written next to the page that is made of it.


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
                mode = on_a_cpu(entry)
                proof = prove_in_model(host.beside(mode=mode), entry, found.model, Path(scratch), replace(_RUN, mode=mode))
            answer = replace(_answer(entry, proof), sglang=host.version)
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
