"""Tables for the terminal."""

from collections.abc import Sequence

from eagletwin.cases.entry import Entry, Known
from eagletwin.harness.core.errors import EXIT_UNKNOWN
from eagletwin.harness.core.terminal import width
from eagletwin.harness.core.verdict import Verdict

from ..result import ProofFacts
from ..tables import print_table
from .proof import NoProof, Proof, WheelProof, WheelSide


def proof_title(entry: Known) -> str:
    """What is about to be proven."""
    state = f"in {entry.buggy}, fixed in {entry.fixed}" if entry.fixed else f"LIVE, seen from {entry.buggy.rstrip(' -')} on"
    return f"== {entry.id}: {entry.title}\n   {state}; matters with {entry.trigger}\n"


def proof_text(proof: Proof | NoProof) -> str:
    """The proof of an entry: the argument of each side, or why it could not be run."""
    if isinstance(proof, NoProof):
        word = "UNKNOWN" if proof.exit_code == EXIT_UNKNOWN else "ERROR"
        return f"{proof_title(proof.entry)}\n{word}\n\n  {proof.error}\n"
    lines = [proof_title(proof.entry)]
    for outcome, side in ((proof.green, proof.entry.green), (proof.red, proof.entry.red)):
        lines += [f"-- {proof.entry.says(side)}\n", outcome.text(width()), f"  folder: {outcome.folder}\n"]
    return "\n".join(lines)


def proof_table(proofs: Sequence[Proof | NoProof], others: Sequence[Entry] = ()) -> None:
    """Proofs, and the entries that the mode does not reach."""
    rows = list[tuple[str, ...]]()
    for proof in proofs:
        if isinstance(proof, NoProof):
            rows.append((proof.entry.id, proof.entry.state, "not run", "not run", "[yellow]unknown[/]: a side was not run"))
            continue
        red = proof.red.verdict
        rows.append(
            (
                proof.entry.id,
                proof.entry.state,
                proof.green.verdict.status,
                f"{red.status} {red.rule}".strip(),
                _result(proof),
            )
        )
    rows += [(entry.id, entry.state, "not run", "not run", "[yellow]unknown[/]: not reached") for entry in others]
    print_table(("entry", "in", "with the fix", "without it", "proof"), rows)


def proof_facts(proof: Proof | NoProof) -> ProofFacts:
    """A proof as --json has it."""
    entry = proof.entry
    if isinstance(proof, NoProof):
        return ProofFacts(
            entry=entry.id,
            title=entry.title,
            state=entry.state,
            holds=False,
            exit_code=proof.exit_code,
            green="",
            red="",
            why=proof.error.cause,
        )
    return ProofFacts(
        entry=entry.id,
        title=entry.title,
        state=entry.state,
        holds=proof.holds,
        exit_code=proof.exit_code,
        green=_said(proof.green.verdict),
        red=_said(proof.red.verdict),
        why="" if proof.holds else _failure(proof),
        folders=[str(outcome.folder) for outcome in (proof.green, proof.red)],
        green_folder=str(proof.green.folder),
        red_folder=str(proof.red.folder),
    )


def wheel_facts(proof: WheelProof) -> ProofFacts:
    """The same of a proof on published wheels: `green` is the release with the fix, and `red` the one before."""
    green, red = ("" if side is None else _said(side.verdict) for side in (proof.good, proof.bad))
    places = ["" if side is None or side.folder is None else str(side.folder) for side in (proof.good, proof.bad)]
    return ProofFacts(
        entry=proof.entry.id,
        title=proof.entry.title,
        state=proof.entry.state,
        holds=proof.holds,
        exit_code=proof.exit_code,
        green=green,
        red=red,
        why=proof.why,
        folders=[place for place in places if place],
        green_folder=places[0],
        red_folder=places[1],
    )


def _said(verdict: Verdict) -> str:
    return f"{verdict.status} {verdict.rule}".strip()


def _result(proof: Proof) -> str:
    """Whether the proof holds, and by which rule where a graph hides the entry's own."""
    if not proof.holds:
        return f"[red]fails[/]: {_failure(proof)}"
    if proof.red.verdict.rule == proof.entry.rule:
        return "[green]holds[/]"
    if proof.any_rule:
        return f"[green]holds[/] by {proof.red.verdict.rule}, the first to break in {proof.entry.case.model}"
    return f"[green]holds[/] by {proof.stands_in}, which stands in for {proof.entry.rule}: that is hidden in a graph"


def _failure(proof: Proof) -> str:
    """What should have come out, and what did."""
    green, red, rule = proof.green.verdict, proof.red.verdict, proof.entry.rule
    if proof.unreached:
        return f"no changed statement of {proof.unreached[0]} ran: the entry needs an edit of the branch that does"
    if proof.another:
        return f"the case is equal with the candidate fix of {proof.another} alone as well: what diverges may be that bug"
    wrong = []
    if green.status != "equal":
        wrong.append(f"with the fix the case must be equal, and is {green.status} {green.rule}".rstrip())
    if red.status == "equal" or red.rule != rule:
        wrong.append(f"without it the case must break {rule}, and is {red.status} {red.rule}".rstrip())
    return "; ".join(wrong) + ". This SGLang has another bug there, or changes what the entry edits"


def wheel_proof_table(proofs: Sequence[WheelProof]) -> None:
    rows = []
    for proof in proofs:
        result = (
            "[green]holds[/]" if proof.holds else proof.why or f"[red]fails[/]: must break {proof.entry.rule}, then be equal"
        )
        rows.append((proof.entry.id, _side(proof.entry.last_bad, proof.bad), _side(proof.entry.fixed, proof.good), result))
    print_table(("entry", "before the fix", "with it", "proof"), rows)


def _side(release: str, seen: WheelSide | None) -> str:
    verdict = "not run" if seen is None else f"{seen.verdict.status} {seen.verdict.rule}".strip()
    return f"{release}: {verdict}" if release else "none"
