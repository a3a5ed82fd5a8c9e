"""Proofs as a person reads them, as --json has them, and as a page."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from eagletwin.cases.entry import Entry, Known
from eagletwin.harness.core.errors import EXIT_EQUAL, EXIT_UNKNOWN
from eagletwin.harness.core.files import new_run_folder
from eagletwin.harness.core.terminal import width
from eagletwin.harness.page.document import Document, DocumentSection, Table, TableCell, TableRow, row
from eagletwin.harness.page.render import NAME, write_page
from eagletwin.harness.page.text import print_table

from ..as_json import tell_result
from ..page_facts import page_beside, read_facts
from ..result import ProofFacts, ProveFacts
from .proof import Proof

PROOFS = "proofs.json"  # in the run folder: what --json prints
_WORDS = {EXIT_EQUAL: "holds", EXIT_UNKNOWN: "unknown"}
_STATUSES = {"equal": "right", "diverged": "wrong"}
_NAMED = 4  # entries in the title
_KINDS = {"holds": "right", "fails": "wrong", "unknown": "doubt"}


def proof_title(entry: Known) -> str:
    """What is about to be proven."""
    state = f"in {entry.buggy}, fixed in {entry.fixed}" if entry.fixed else f"LIVE, seen from {entry.buggy.rstrip(' -')} on"
    return f"== {entry.id}: {entry.title}\n   {state}; matters with {entry.trigger}\n"


def proof_text(proof: Proof) -> str:
    """The proof of an entry: the argument of each side, or why it could not be run."""
    entry, lines = proof.entry, [proof_title(proof.entry)]
    if proof.wheels:
        lines += [side.report() for side in (proof.red, proof.green) if side.error is None]
        return "\n".join([*lines, *[f"UNKNOWN  {proof.why}\n"] * bool(proof.why)])
    for error in proof.errors:
        return "\n".join([*lines, "UNKNOWN" if proof.exit_code == EXIT_UNKNOWN else "ERROR", f"\n  {error}\n"])
    assert isinstance(entry, Entry)
    for answer, side in ((proof.green, entry.green), (proof.red, entry.red)):
        lines += [f"-- {entry.says(side)}\n", answer.report(width())]
    return "\n".join(lines)


def proof_table(proofs: Sequence[Proof], others: Sequence[Entry] = ()) -> None:
    """Proofs, and the entries that the mode does not reach."""
    rows = list[tuple[str, ...]]()
    for proof in proofs:
        entry, (green, red) = proof.entry, (side.said or "not run" for side in (proof.green, proof.red))
        if proof.wheels:
            green, red = (f"{said}, in {name}" for said, name in ((green, entry.fixed), (red, entry.last_bad or "none")))
        rows.append((entry.id, entry.state, green, red, _result(proof)))
    rows += [(entry.id, entry.state, "not run", "not run", "[yellow]unknown[/]: not reached") for entry in others]
    print_table(("entry", "in", "with the fix", "without it", "proof"), rows)


def proof_facts(proof: Proof) -> ProofFacts:
    """A proof as --json has it; of published wheels, `green` is the release with the fix, and `red` the one before."""
    entry, places = proof.entry, [str(side.folder or "") for side in (proof.green, proof.red)]
    return ProofFacts(
        entry=entry.id,
        title=entry.title,
        state=entry.state,
        holds=proof.holds,
        exit_code=proof.exit_code,
        green=proof.green.said,
        red=proof.red.said,
        why="" if proof.holds else proof.why or _failure(proof),
        folders=[place for place in places if place],
        green_folder=places[0],
        red_folder=places[1],
    )


def _result(proof: Proof) -> str:
    """Whether the proof holds, and by which rule where a graph hides the entry's own."""
    if proof.errors:
        return f"[yellow]unknown[/]: {proof.why if proof.wheels else 'a side was not run'}"
    if not proof.holds:
        return f"[red]fails[/]: {_failure(proof)}"
    if proof.red.verdict.rule == proof.entry.rule:
        return "[green]holds[/]"
    if proof.any_rule:
        assert isinstance(proof.entry, Entry)
        return f"[green]holds[/] by {proof.red.verdict.rule}, the first to break in {proof.entry.case.model}"
    return f"[green]holds[/] by {proof.stands_in}, which stands in for {proof.entry.rule}: that is hidden in a graph"


def _failure(proof: Proof) -> str:
    """What should have come out, and what did."""
    rule, red = proof.entry.rule, proof.red.verdict
    if proof.unreached:
        return f"no changed statement of {proof.unreached[0]} ran: the entry needs an edit of the branch that does"
    if proof.another:
        return f"the case is equal with the candidate fix of {proof.another} alone as well: what diverges may be that bug"
    wrong = []
    if proof.green.verdict.status != "equal":
        wrong.append(f"with the fix the case must be equal, and is {proof.green.said}")
    if red.status == "equal" or red.rule != rule:
        wrong.append(f"without it the case must break {rule}, and is {proof.red.said}")
    return "; ".join(wrong) + ("" if proof.wheels else ". This SGLang has another bug there, or changes what the entry edits")


def keep_proofs(facts: ProveFacts, out: Path) -> None:
    """Tell the result, and keep it with its page in a run folder below `out`, if anything was proven."""
    if facts.proofs:
        folder = new_run_folder(out, "prove")
        facts.folder = str(folder)
        (folder / PROOFS).write_bytes(msgspec.json.format(msgspec.json.encode(facts)) + b"\n")
        print(f"folder: {folder}")
        if write_page(folder, lambda: proofs_page(folder)) is not None:
            print(f"page:   {folder / NAME}")
    tell_result(facts)


def proofs_page(folder: Path) -> Document:
    """The page of a run folder of `prove`. Raises InputError for facts that cannot be read."""
    facts = read_facts(folder / PROOFS, ProveFacts, "the run folder `prove` of `eagletwin prove`")
    words = [_word(proof) for proof in facts.proofs]
    status = next((word for word in ("fails", "unknown") if word in words), "unknown" if facts.interrupted else "holds")
    held = words.count("holds")
    return Document(
        title=f"Proofs: {', '.join(proof.entry for proof in facts.proofs[:_NAMED])}{' and more' * (len(words) > _NAMED)}",
        status=status,
        headline=f"{'Ended early: ' * facts.interrupted}{held} of {len(words)} proven in {facts.seconds:.1f} s",
        facts=(("SGLang", facts.sglang or "published wheels: the last before each fix, and the first with it"),),
        sections=(_proofs(folder, facts), *_not_reached(facts)),
        again=(facts.command,) if facts.command else (),
        files=(PROOFS,),
    )


def _word(proof: ProofFacts) -> str:
    return "holds" if proof.holds else _WORDS.get(proof.exit_code, "fails")


def _proofs(folder: Path, facts: ProveFacts) -> DocumentSection:
    table = Table(
        caption="Proofs",
        header=("entry", "what", "in", "with the fix", "without it", "proof", "why it does not hold"),
        rows=tuple(_row(folder, facts.folder, proof) for proof in facts.proofs),
        filters=(("Proof", tuple(dict.fromkeys(_word(proof) for proof in facts.proofs))),),
        searched=True,
        note="Each side links to its own page.",
    )
    line = "A proof holds if the case is equal with the fix, and diverges without it by the rule that the entry names."
    return DocumentSection(heading="Proofs", lines=(line,), tables=(table,))


def _row(folder: Path, kept: str, proof: ProofFacts) -> TableRow:
    word = _word(proof)
    sides = [
        TableCell(said or "not run", _STATUSES.get(said.partition(" ")[0], "doubt"), page_beside(folder, kept, place))
        for said, place in ((proof.green, proof.green_folder), (proof.red, proof.red_folder))
    ]
    return row(proof.entry, proof.title, proof.state, *sides, TableCell(word, _KINDS[word]), proof.why, tags=(word,))


def _not_reached(facts: ProveFacts) -> list[DocumentSection]:
    if not facts.not_reached:
        return []
    rows = tuple(row(entry) for entry in facts.not_reached)
    line = "This mode does not reach them, or no release has their fix. `eagletwin prove ENTRY` says why."
    table = Table(caption="Entries that were not run", header=("entry",), rows=rows, searched=True)
    return [DocumentSection(heading="Not run", lines=(line,), tables=(table,))]
