"""Prove the ledger in a model, as far as it is not known yet."""

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from eagletwin.cases.entry import Entry
from eagletwin.cases.reach import on_a_cpu
from eagletwin.harness.commands.prove.proof import ProofInModel, prove_in_model
from eagletwin.harness.core.run_spec import Limits, RunSpec
from eagletwin.harness.engines.host import Host

from ..gpu.in_model import InModel, ModelCell, asked_of, without_running
from .results import attempt_of

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
