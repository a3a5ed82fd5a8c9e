"""Proofs as a person reads them one by one, what `prove` keeps of all (proofs.json), and its document."""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path

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

# Why a bug does not show in a model where nothing forbids it: what was found where the table was open.

# entry -> of drafts of several layers
_LAYERS = {
    "8409": "a draft of several layers has no draft decode: no branch of its trees stores a row",
    "26997-bonus": "a tree of several layers has num_steps + 1 nodes, and with so many both strides are the same",
    "26329": "the worker of several layers has a chunk's tail elsewhere (multi-layer-chunk-tail)",
    "retracted-chunk-tail": "the worker of several layers looks up no tail (multi-layer-chunk-tail), and the "
    "remedy of that looks in what was emitted as well",
}
_NO_CHAIN = {"chain-hidden": "its layers all consume the target's state, and hand none on"}

_OWN_TOKEN = "a language model's row consumes its own token, and asks for none behind the chunk (standalone-shift)"
_NO_STATES = "beside a plain draft no state is given at all (hidden-standalone)"
_PLAIN_DRAFT = {
    "10846": "keys of single tokens, which it makes of pairs, are the right ones for a language model (standalone-keys)",
    "26329": _OWN_TOKEN,
    "retracted-chunk-tail": _OWN_TOKEN,
    "26997-hidden": "a language model as draft consumes no states of the target",
    "hidden-rows": _NO_STATES,
    "hidden-rows-2": _NO_STATES,
    "hidden-no-tokens": _NO_STATES,
    "session-hidden": _NO_STATES,
    "context-end-reads": "the remedy of standalone-shift, which stands beside in this model, is of Triton's backend",
    "grammar-end": "its case ends with the prefill, and the remedy of standalone-shift changes a round, too, which never runs",
}
# Of a target whose windows are longer than any case of the ledger.
_NO_END = "no case of the ledger is as long as its windows of 72 rows, which must end for it"
_LONG_WINDOWS = {"tree-window": _NO_END, "deterministic-window": _NO_END, "decode-window": _NO_END}
_LONG = 72
_STATES = {
    "10846": "no prefix of fewer than 64 tokens is gone on from where layers keep states; longer ones show it as released, "
    "since keys are single tokens there (hybrid-keys)"
}

_NO_ROWS = "a draft that reads the target's rows has none of its own, no draft extend and no worker's draft decode but its own"
_FROZEN = dict.fromkeys(("10846", "25015", "26329", "8409", "indices-overflow", "retracted-chunk-tail"), _NO_ROWS) | {
    "grammar-end": "it does not show where batches overlap, and the worker of such a draft cannot be run otherwise (frozen-kv)"
}

# entry -> of a target with sliding windows, whatever their length
_WINDOWS = {
    "mixed-memory": "with windows a prompt in chunks waits for slots: what would end a server elsewhere is late here",
    "tree-sinks": "no layer of this model has sinks",
    "22958": "these drafts have windows alone, whose slots are filled from the batch's plan, and no padded row is in it",
}

# entry -> what the prompts that are tried do not reach, in any model but its own and these
_CHANCE = {
    "certain-node": (
        "no prompt that is tried makes the draft certain of the last token that is selected",
        "deepseek-nextn-wide",
    ),
    "overlap-context-end": (
        "no prompt that is tried has a last round with enough accepted drafts to end behind its context",
        "llama-wide deepseek-nextn deepseek-nextn-yarn kimi-k2-eagle3 qwen3-eagle3 qwen3-eagle3-norm qwen3-eagle3-deep "
        "qwen3-next-nextn nemotron-h-nextn qwen3.5-nextn",
    ),
    "guidance-rollback": (
        "no prompt that is tried has a draft refused for a token behind which the same terminals may come",
        "llama-gqa deepseek-nextn deepseek-nextn-yarn deepseek-nextn-wide qwen3-eagle3.1 qwen3-next-nextn qwen3.5-nextn",
    ),
}

_BESIDE = (
    "equal with the fix and diverged without it, but the remedy of decode-window, which stands beside in this model, changes "
    "an eviction that so short a decode never comes to, and so the proof does not hold"
)

# (entry, model) -> what the prompts that are tried do not reach there, or what this model alone does otherwise
_NOT_REACHED = {
    ("retracted-logprobs", "gemma-4-assistant-window"): _BESIDE,
    ("retracted-stream", "gemma-4-assistant-window"): _BESIDE,
    (
        "host-layers",
        "mimo-v2-window",
    ): "its configuration has num_nextn_predict_layers, with which all of its layers are packed behind the target's",
    (
        "prefill-graph",
        "nemotron-h-nextn",
    ): "its draft joins embeddings and hidden states in the body, which the graph holds",
    ("29354", "nemotron-h-nextn"): "a prefill of Mamba-2 that has no prefix reads no state, whatever its slot holds",
    ("pipeline-zeros", "llama-wide"): "no coin that is tried lies between one and two parts of token 0, which is rare there",
    ("guidance-end", "qwen3-eagle3"): "no prompt that is tried has the target send an end token where the text could go on",
    (
        "penalties",
        "qwen3-eagle3.1",
    ): "no prompt that is tried accepts a draft that would be the best token again; in the case of "
    "penalties-2, carried over, a later round does, and breaks verify.accept",
}


def reason(entry: str, model: str) -> str:
    """Why it does not show; empty: nobody knows."""
    recipe = RECIPES[model]
    if (entry, model) in _NOT_REACHED:
        return _NOT_REACHED[entry, model]
    why, reached = _CHANCE.get(entry, ("", ""))
    if why and model not in reached.split():
        return why
    if any(recipe.target.windows) and entry in _WINDOWS:
        return _WINDOWS[entry]
    if not recipe.reads_states:
        return _PLAIN_DRAFT.get(entry, "")
    if recipe.frozen and entry in _FROZEN:
        return _FROZEN[entry]
    if recipe.target.states:
        return _STATES.get(entry, "")
    if recipe.window == _LONG and entry in _LONG_WINDOWS:
        return _LONG_WINDOWS[entry]
    if not recipe.mtp_layers:
        return ""
    return _LAYERS.get(entry, "") or ("" if recipe.chained else _NO_CHAIN.get(entry, ""))


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
