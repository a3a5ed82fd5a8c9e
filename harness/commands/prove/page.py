"""The page of `eagletwin prove`: all its proofs, each with the pages of its two sides, from proofs.json alone."""

from pathlib import Path

import msgspec

from eagletwin.harness.core.errors import EXIT_EQUAL, EXIT_UNKNOWN
from eagletwin.harness.core.files import new_run_folder
from eagletwin.harness.page.render import NAME, Page, PageSection, Table, TableCell, TableRow, write_page

from ..as_json import tell_result
from ..page_facts import page_beside, read_facts, row
from ..result import ProofFacts, ProveFacts

PROOFS = "proofs.json"  # in the run folder: what --json prints
_WORDS = {EXIT_EQUAL: "holds", EXIT_UNKNOWN: "unknown"}
_STATUSES = {"equal": "right", "diverged": "wrong"}
_NAMED = 4  # entries in the title
_KINDS = {"holds": "right", "fails": "wrong", "unknown": "doubt"}


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


def proofs_page(folder: Path) -> Page:
    """The page of a run folder of `prove`. Raises InputError for facts that cannot be read."""
    facts = read_facts(folder / PROOFS, ProveFacts, "the run folder `prove` of `eagletwin prove`")
    words = [_word(proof) for proof in facts.proofs]
    status = next((word for word in ("fails", "unknown") if word in words), "unknown" if facts.interrupted else "holds")
    held = words.count("holds")
    return Page(
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


def _proofs(folder: Path, facts: ProveFacts) -> PageSection:
    table = Table(
        caption="Proofs",
        header=("entry", "what", "in", "with the fix", "without it", "proof", "why it does not hold"),
        rows=tuple(_row(folder, facts.folder, proof) for proof in facts.proofs),
        filters=(("Proof", tuple(dict.fromkeys(_word(proof) for proof in facts.proofs))),),
        searched=True,
        note="Each side links to its own page.",
    )
    line = "A proof holds if the case is equal with the fix, and diverges without it by the rule that the entry names."
    return PageSection(heading="Proofs", lines=(line,), tables=(table,))


def _row(folder: Path, kept: str, proof: ProofFacts) -> TableRow:
    word = _word(proof)
    sides = [
        TableCell(said or "not run", _STATUSES.get(said.partition(" ")[0], "doubt"), page_beside(folder, kept, place))
        for said, place in ((proof.green, proof.green_folder), (proof.red, proof.red_folder))
    ]
    return row(proof.entry, proof.title, proof.state, *sides, TableCell(word, _KINDS[word]), proof.why, tags=(word,))


def _not_reached(facts: ProveFacts) -> list[PageSection]:
    if not facts.not_reached:
        return []
    rows = tuple(row(entry) for entry in facts.not_reached)
    line = "This mode does not reach them, or no release has their fix. `eagletwin prove ENTRY` says why."
    table = Table(caption="Entries that were not run", header=("entry",), rows=rows, searched=True)
    return [PageSection(heading="Not run", lines=(line,), tables=(table,))]
