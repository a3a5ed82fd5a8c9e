"""Proofs as a person reads them one by one, what `prove` keeps of all (proofs.json), and its document."""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec

from eagletwin.cases.entry import Entry, Known
from eagletwin.harness.core.errors import EXIT_EQUAL, EXIT_INTERRUPTED, EXIT_UNKNOWN, AlreadyReported, EagletwinError
from eagletwin.harness.core.files import new_run_folder
from eagletwin.harness.core.run_spec import TITLES, RunSpec
from eagletwin.harness.core.terminal import progress, show, width
from eagletwin.harness.engines.host import Host
from eagletwin.harness.families import RECIPES
from eagletwin.harness.page.document import Document, DocumentSection, TableCell, TableRow, row, table
from eagletwin.harness.page.render import text_of, write_page

from ..page_facts import page_beside, read_facts
from ..result import ProofFacts, ProveFacts, emit_result
from .proof import Proof, prove, prove_in_model, show_claim, worst

_LONG = 72  # rows of windows that no case of the ledger is as long as


@cache
def _reasons() -> dict[str, dict[str, Any]]:
    """Why a bug does not show in a model where nothing forbids it: what was found where docs/records/models.md was open.

    By kind of model, then by entry."""
    found: dict[str, dict[str, Any]] = msgspec.json.decode(Path(__file__).with_name("reasons.json").read_bytes())
    return found


def reason(entry: str, model: str) -> str:
    """Why it does not show; empty: nobody knows."""
    recipe, reasons = RECIPES[model], _reasons()
    if why := reasons["in this model"].get(entry, {}).get(model):
        return str(why)
    chance = reasons["by no prompt"].get(entry)
    if chance is not None and model not in chance["but in"]:
        return str(chance["why"])
    kinds = {
        "windows": any(recipe.target.windows) and entry in reasons["windows"],
        "plain draft": not recipe.reads_states,
        "frozen KV": recipe.frozen and entry in reasons["frozen KV"],
        "states": bool(recipe.target.states),
        "long windows": recipe.window == _LONG and entry in reasons["long windows"],
        "layers": recipe.mtp_layers > 0 and (recipe.chained or entry in reasons["layers"]),
        "layers, each from the target's state": recipe.mtp_layers > 0,
    }
    kind = next((kind for kind, is_one in kinds.items() if is_one), "")
    return str(reasons.get(kind, {}).get(entry, ""))


PROOFS = "proofs.json"  # in the run folder: what --json prints
_WORDS = {EXIT_EQUAL: "holds", EXIT_UNKNOWN: "unknown"}
_STATUSES = {"equal": "right", "diverged": "wrong"}
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


def proof_facts(proof: Proof) -> ProofFacts:
    """A proof as --json has it; of published wheels, `green` is the release with the fix, and `red` the one before."""
    entry, places = proof.entry, [str(side.folder or "") for side in (proof.green, proof.red)]
    return ProofFacts(
        entry=entry.id,
        title=entry.title,
        state=entry.state,
        holds=proof.holds,
        exit_code=proof.exit_code,
        green=proof.green.summary,
        red=proof.red.summary,
        why=_instead(proof) if proof.holds else proof.why or _failure(proof),
        folders=[place for place in places if place],
        green_folder=places[0],
        red_folder=places[1],
    )


def _instead(proof: Proof) -> str:
    """By which rule a proof holds, where a graph hides the entry's own or another model breaks another one first."""
    if proof.red.verdict.rule == proof.entry.rule:
        return ""
    if proof.any_rule:
        assert isinstance(proof.entry, Entry)
        return f"by {proof.red.verdict.rule}, the first to break in {proof.entry.case.model}"
    return f"by {proof.stands_in}, which stands in for {proof.entry.rule}: that is hidden in a graph"


def _failure(proof: Proof) -> str:
    """What should have come out, and what did."""
    rule, red = proof.entry.rule, proof.red.verdict
    if proof.unreached:
        return f"no changed statement of {proof.unreached[0]} ran: the entry needs an edit of the branch that does"
    if proof.another:
        return f"the case is equal with the candidate fix of {proof.another} alone as well: what diverges may be that bug"
    wrong = []
    if proof.green.verdict.status != "equal":
        wrong.append(f"with the fix the case must be equal, and is {proof.green.summary}")
    if red.status == "equal" or red.rule != rule:
        wrong.append(f"without it the case must break {rule}, and is {proof.red.summary}")
    return "; ".join(wrong) + (
        "" if proof.wheels else ". This release or tree has another bug there, or changes what the entry edits"
    )


def proofs_of(host: Host, entries: Sequence[Entry], out: Path, run: RunSpec, model: str) -> Iterator[Proof]:
    """The proofs of these entries in this model; "": in their own, after the claim as far as one of them can show it. Where its
    engine fails, its proof says why."""
    if not model:
        with suppress(EagletwinError):
            show(next(filter(None, (show_claim(host, entry, run) for entry in entries)), ""))
        yield from prove(host, entries, out, run)
    for entry in entries if model else ():
        yield prove_in_model(host, entry, model, out, run).proof


def show_proofs(facts: ProveFacts, proofs: Iterator[Proof], entries: Sequence[Known], out: Path) -> int:
    """Print each proof when it is done; the exit code. However they end, what was proven until then is printed and kept."""
    begun, shown = time.monotonic(), list[Proof]()
    facts.interrupted = True
    try:
        with progress("proofs", len(entries)) as line:
            line.look(entries[0].id if entries else "")
            for proof, following in zip_longest(proofs, entries[1:]):
                shown.append(proof)
                show(proof_text(proof))
                line.done(following.id if following is not None else "")
        facts.interrupted = False
    except KeyboardInterrupt:
        raise AlreadyReported(EXIT_INTERRUPTED) from None
    finally:
        facts.proofs, facts.seconds = [proof_facts(proof) for proof in shown], round(time.monotonic() - begun, 3)
        keep_proofs(facts, out)
    return worst([proof.exit_code for proof in shown])


def keep_proofs(facts: ProveFacts, out: Path) -> None:
    """Print the result, and keep it with its page in a run folder below `out`, if anything was proven."""
    if facts.proofs:
        folder = new_run_folder(out, "prove")
        facts.folder = str(folder)
        (folder / PROOFS).write_bytes(msgspec.json.format(msgspec.json.encode(facts)) + b"\n")
        write_page(folder, lambda: document_of(facts, folder))
    show(text_of(document_of(facts, Path(facts.folder)), width()))
    emit_result(facts)


def proofs_page(folder: Path) -> Document:
    """The document of a run folder of `prove`. Raises InputError for facts that cannot be read."""
    return document_of(read_facts(folder / PROOFS, ProveFacts, "the run folder `prove` of `eagletwin prove`"), folder)


def document_of(facts: ProveFacts, folder: Path) -> Document:
    """The report of proofs. folder: where their run folder is now."""
    words = [_word(proof) for proof in facts.proofs]
    status = next((word for word in ("fails", "unknown") if word in words), "unknown" if facts.interrupted else "holds")
    held, of = words.count("holds"), f"{len(words)}{f' of {facts.asked} asked' * facts.interrupted}"
    proofs = table(
        "Proofs",
        ("entry", "in", "with the fix", "without it", "proof", "why", "what"),
        (_row(folder, facts.folder, proof) for proof in facts.proofs),
        filters=(("Proof", tuple(_KINDS)),),
        searched=True,
        more=1,
    )
    left = f"Not run, as this mode does not reach them or no release has their fix: {', '.join(facts.not_reached)}."
    ran = (
        f"{TITLES[facts.engine]} {facts.sglang}."
        if facts.sglang
        else "Published wheels: the last before each fix, and the first with it."
    )
    return Document(
        title=f"{'ended early, ' * facts.interrupted}{held} of {of} proven in {facts.seconds:.1f} s",
        status=status,
        kind=_KINDS[status],
        headline=ran,
        lines=(left,) if facts.not_reached else (),
        sections=(
            DocumentSection(
                heading="Proofs",
                lines=("A proof holds if the case is equal with the fix, and without it diverges by the entry's rule.",),
                tables=(proofs,),
            ),
        ),
        again=(facts.command,) if facts.command else (),
        files=(PROOFS,),
        folder=facts.folder,
    )


def _word(proof: ProofFacts) -> str:
    return "holds" if proof.holds else _WORDS.get(proof.exit_code, "fails")


def _row(folder: Path, kept: str, proof: ProofFacts) -> TableRow:
    word = _word(proof)
    sides = [
        TableCell(said or "not run", _STATUSES.get(said.partition(" ")[0], "doubt"), page_beside(folder, kept, place))
        for said, place in ((proof.green, proof.green_folder), (proof.red, proof.red_folder))
    ]
    return row(proof.entry, proof.state, *sides, TableCell(word, _KINDS[word]), proof.why, proof.title, tags=(word,))
