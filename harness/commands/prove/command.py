"""`eagletwin prove`: red without the fix, green with it, in memory or on published wheels."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eagletwin.cases.ledger import ledger_of, with_probes
from eagletwin.cases.reach import cannot_be_in, unreached, unreached_text
from eagletwin.harness.core.errors import EXIT_UNKNOWN, InputError
from eagletwin.harness.core.mode import CPU
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.core.terminal import count, progress, show
from eagletwin.harness.families.valid import check_model

from ..as_json import with_json
from ..options import DEFAULT_RUNS, ENGINE, Runs, tell
from ..result import ProveFacts
from ..run_options import HOW, LIMITS, SOURCE, STRICT, run_options
from .reasons import reason

if TYPE_CHECKING:
    from eagletwin.cases.entry import Entry
    from eagletwin.harness.engines.host import Host

    from .proof import NoProof, Proof, WheelProof


@with_json
@run_options(STRICT, SOURCE, HOW, LIMITS)
def prove(
    entries: Annotated[list[str], typer.Argument(metavar="PR…|all", help="Ids of ledger entries, or all.")],
    on_releases: Annotated[
        bool,
        typer.Option(
            "--releases",
            rich_help_panel=ENGINE,
            help="Use published wheels, unchanged: the last release before each fix, and the first with it.",
        ),
    ] = False,
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="RECIPE",
            rich_help_panel=ENGINE,
            help="Carry the cases over to this model. Other prompts are tried where they do not reach the bug there, and "
            "other live bugs that would show first are mended.",
        ),
    ] = "",
    out: Runs = DEFAULT_RUNS,
    *,
    spec: RunSpec,
) -> int:
    """Prove fixes of the ledger: without the fix the case diverges, with it the case is equal.

    With `all`, entries that this mode or model cannot reach are listed and not counted.
    """
    if model:
        check_model(model, "--model")
    if on_releases:
        _check_releases(spec, model)
        return _prove_on_wheels(entries, out, spec)
    others = [(entry, why) for entry in ledger_of(entries) if (why := _not_run(entry, model, spec))]
    left_out = {entry.id for entry, _ in others}
    chosen = [entry for entry in ledger_of(entries) if entry.id not in left_out]
    command = spec.command("prove", *entries, *(["--model", model] if model else []))
    code = _prove(_Asked(chosen, others, model, command), out, spec)
    named = others and "all" not in entries  # with `all`, entries that this mode cannot reach are not counted
    from .proof import worst

    return worst([code, *([EXIT_UNKNOWN] if named else [])])


def _not_run(entry: "Entry", model: str, spec: RunSpec) -> str:
    """Why an entry is not run, as text; empty: it is."""
    if unreached(entry, spec.mode):
        return unreached_text(entry, spec.mode)
    if not model or model == entry.case.model:
        return ""
    said = "  so:  neither side was run; this says nothing about the release\n  try: docs/records/models.md, for what can be\n"
    if why := cannot_be_in(entry, model):
        return f"UNKNOWN  {entry.id} cannot be in {model}: {why}\n{said}"
    # A reason was found on the installed release as it is, and says nothing of another SGLang.
    why = "" if spec.sglang or spec.patches else reason(entry.id, model)
    return f"UNKNOWN  {entry.id} does not show in {model}: {why}\n{said}" if why else ""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What was typed. others: entries that are not run, and why; model: what the cases are carried over to"""

    chosen: "Sequence[Entry]"
    others: "Sequence[tuple[Entry, str]]"
    model: str
    command: str


def _prove(asked: _Asked, out: Path, spec: RunSpec) -> int:
    from eagletwin.harness.engines.source import resolve
    from eagletwin.harness.engines.start import Zygote

    begun, chosen = time.monotonic(), asked.chosen
    source = resolve(spec.sglang)
    with Zygote(source, spec.mode) as zygote:
        zygote.start()  # it imports SGLang while this process imports torch
        if chosen:
            tell(f"importing SGLang {source.called}; then {count(len(chosen), 'proof')}: a case with the fix, and without it")
        from eagletwin.harness.engines.host import Host

        from . import proof as proving
        from .concluding import concluding, proven_text
        from .page import keep_proofs
        from .report import proof_facts, proof_table, proof_text, proof_title

        for entry, why in asked.others:
            print(f"{proof_title(entry)}{why}")
        if not chosen:
            return EXIT_UNKNOWN
        proofs, left_out = list["Proof | NoProof"](), [entry for entry, _ in asked.others]

        def conclude(early: str) -> None:
            proof_table(proofs, left_out)
            seconds = time.monotonic() - begun
            print(proven_text(proofs, chosen, early, seconds))
            if left_out:
                print(f"not reached in this mode, and so not run: {', '.join(entry.id for entry in left_out)}")
            facts = ProveFacts(
                proofs=[proof_facts(proof) for proof in proofs],
                not_reached=[entry.id for entry in left_out],
                seconds=round(seconds, 3),
                sglang=source.called,
                command=asked.command,
                interrupted=bool(early),
            )
            keep_proofs(facts, out)

        with concluding(conclude), progress("proofs", len(chosen)) as line, Host(zygote) as host:
            line.look(chosen[0].id)
            for proof, following in zip_longest(_proofs(host, chosen, out, spec, asked.model), chosen[1:]):
                proofs.append(proof)
                show(proof_text(proof))
                line.done(following.id if following is not None else "")
    return proving.worst([proof.exit_code for proof in proofs])


def _proofs(host: "Host", chosen: "Sequence[Entry]", out: Path, spec: RunSpec, model: str) -> "Iterator[Proof | NoProof]":
    """The proofs of these entries, in their own models or in this one."""
    from .in_model import prove_in_model
    from .proof import prove as prove_at_home

    if not model:
        yield from prove_at_home(host, chosen, out, spec)
        return
    for entry in chosen:
        yield prove_in_model(host, entry, model, out, spec).proof


def _check_releases(spec: RunSpec, model: str) -> None:
    """Raises InputError for options that published wheels on a CPU do not go with."""
    if model:
        raise InputError(
            "--releases proves the entries' own cases",
            consequence="nothing was run",
            remedy=f"leave --model out; `python -m tests.lab releases --model {model}` asks every release, in a checkout",
        )
    if spec.sglang:
        raise InputError("--releases names the releases itself", consequence="nothing was run", remedy="leave --sglang out")
    if spec.mode != CPU:
        raise InputError(
            "--releases runs on the CPU engine as it is by default",
            consequence="nothing was run",
            remedy="leave --device, --overlap, --tp, --dtype and --attention out",
        )


def _prove_on_wheels(entries: list[str], out: Path, spec: RunSpec) -> int:
    from . import proof as proving
    from .concluding import concluding, proven_text
    from .page import keep_proofs
    from .report import proof_title, wheel_facts, wheel_proof_table

    begun = time.monotonic()
    known = with_probes(entries)
    chosen, live = [entry for entry in known if entry.fixed], [entry.id for entry in known if not entry.fixed]
    proofs = list["WheelProof"]()

    def conclude(early: str) -> None:
        wheel_proof_table(proofs)
        seconds = time.monotonic() - begun
        print(proven_text(proofs, chosen, early, seconds))
        if live:
            print(f"not proven on releases, since none has a fix: {', '.join(live)}")
        facts = ProveFacts(
            proofs=[wheel_facts(proof) for proof in proofs],
            not_reached=live,
            seconds=round(seconds, 3),
            command=spec.command("prove", "--releases", *entries),
            interrupted=bool(early),
        )
        keep_proofs(facts, out)

    with concluding(conclude), progress("proofs", len(chosen)) as line:
        for proof in proving.prove_on_wheels(chosen, out, spec, tell):
            proofs.append(proof)
            line.done(proof.entry.id)
            print(proof_title(proof.entry))
            for seen in (proof.bad, proof.good):
                if seen is not None:
                    print(seen.text)
            if proof.why:
                print(f"UNKNOWN  {proof.why}\n")
    named = live and "all" not in entries
    return proving.worst([*(proof.exit_code for proof in proofs), *([EXIT_UNKNOWN] if named else [])])
