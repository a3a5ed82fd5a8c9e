"""Tables for the terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Column, Table

from eagletwin.cases.entry import Entry
from eagletwin.harness.doctor import Finding
from eagletwin.harness.probes import Probe
from eagletwin.harness.prove import Proof, Seen, WheelProof


def proof_title(entry: Entry | Probe) -> str:
    """What is about to be proven."""
    state = f"in {entry.buggy}, fixed in {entry.fixed}" if entry.fixed else f"LIVE, seen from {entry.buggy.rstrip(' -')} on"
    return f"== {entry.id}: {entry.title}\n   {state}; matters with {entry.trigger}\n"


def proof_table(proofs: Sequence[Proof], others: Sequence[Entry] = ()) -> None:
    """Proofs, and the entries that the mode does not reach."""
    table = Table(
        Column("entry", overflow="fold"),
        "in",
        "with the fix",
        Column("without it", overflow="fold"),
        Column("proof", overflow="fold"),
        title_justify="left",
    )
    for proof in proofs:
        reverted = proof.reverted.verdict
        table.add_row(
            proof.entry.id,
            _in(proof.entry),
            proof.fixed.verdict.status,
            f"{reverted.status} {reverted.rule}".strip(),
            "[green]holds[/]" if proof.holds else f"[red]fails[/]: must be equal, then {proof.entry.rule}",
        )
    for entry in others:
        table.add_row(entry.id, _in(entry), "not run", "not run", "[yellow]unknown[/]: not reached")
    Console().print(table)


def _in(entry: Entry) -> str:
    return entry.buggy + ("" if entry.fixed else " (live)")


def wheel_proof_table(proofs: Sequence[WheelProof]) -> None:
    table = Table(
        Column("entry", overflow="fold"), "before the fix", "with it", Column("proof", overflow="fold"), title_justify="left"
    )
    for proof in proofs:
        said = "[green]holds[/]" if proof.holds else proof.why or f"[red]fails[/]: must be {proof.entry.rule}, then equal"
        table.add_row(proof.entry.id, _side(proof.entry.last_bad, proof.bad), _side(proof.entry.fixed, proof.good), said)
    Console().print(table)


def _side(release: str, seen: Seen | None) -> str:
    verdict = "not run" if seen is None else f"{seen.verdict.status} {seen.verdict.rule}".strip()
    return f"{release}: {verdict}" if release else "none"


def doctor_table(findings: Sequence[Finding]) -> None:
    table = Table("", "what", Column("found", overflow="fold"), "remedy")
    for finding in findings:
        mark = "[green]ok[/]" if finding.good else ("[red]no[/]" if finding.needed else "[yellow]no[/]")
        table.add_row(mark, finding.what, finding.found, "" if finding.good else finding.remedy)
    Console().print(table)
