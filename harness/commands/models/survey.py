"""Prove the ledger in a model, as far as it is not known yet."""

import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec.structs import replace

from eagletwin.cases.carried import cannot_be_in
from eagletwin.cases.entry import Entry
from eagletwin.cases.reach import on_a_cpu, unreached
from eagletwin.harness.core.run_spec import Limits, RunSpec
from eagletwin.harness.engines.host import Host

from ..prove.in_model import ProofInModel, prove_in_model
from ..prove.proof import NoProof
from .results import InModel, ModelCell, asked_of

_RUN = RunSpec(limits=Limits(step=60.0, case=300.0))


def due(found: InModel, entries: Sequence[Entry], *, again: bool) -> list[Entry]:
    """Entries of which it is not known what they come to in this model, or all of them."""
    return [
        entry for entry in entries if again or entry.id not in found.answers or found.answers[entry.id].asked != asked_of(entry)
    ]


def without_running(entry: Entry, model: str) -> ModelCell | None:
    """What can be said of an entry in a model without a run; None: it must be run."""
    why = unreached(entry, on_a_cpu(entry)).removeprefix(f"{entry.id} is ") or cannot_be_in(entry, model)
    return ModelCell(asked=asked_of(entry), status="cannot be", why=why) if why else None


def survey(
    host: Host, found: InModel, entries: Sequence[Entry], *, keep: Callable[[InModel], None], say: Callable[[str], None]
) -> None:
    """Fill in these entries, and hand what is known to `keep` after each."""
    for entry in entries:
        begun = time.monotonic()
        answer = without_running(entry, found.model)
        if answer is None:
            with tempfile.TemporaryDirectory(prefix="eagletwin-") as scratch:
                mode = on_a_cpu(entry)
                proof = prove_in_model(host.beside(mode=mode), entry, found.model, Path(scratch), replace(_RUN, mode=mode))
            answer = _answer(entry, proof, round(time.monotonic() - begun, 1))
            found.sglang = host.version
        found.answers[entry.id] = answer
        say(f"{found.model:18} {entry.id:26} {answer.status} {answer.rule or answer.why}".rstrip())
        keep(found)


def _answer(entry: Entry, result: ProofInModel, seconds: float) -> ModelCell:
    proof, asked = result.proof, asked_of(entry)
    if isinstance(proof, NoProof):
        return ModelCell(asked=asked, status="not run", why=" ".join(proof.error.cause.split()), seconds=seconds)
    if proof.holds:
        rule, case = proof.red.verdict.rule, proof.entry.case
        return ModelCell(asked=asked, status="proven", rule=rule, case=case, beside=result.beside, seconds=seconds)
    sides = [
        f"{name}: {' '.join(filter(None, (verdict.status, verdict.rule, verdict.reason)))}"
        for name, verdict in (("with the fix", proof.green.verdict), ("without it", proof.red.verdict))
    ]
    if proof.another:
        sides.append(f"equal with the fix of {proof.another} alone as well")
    return ModelCell(asked=asked, status="not shown", idle=result.idle, why="; ".join(sides), seconds=seconds)
