"""`eagletwin prove`: red without the fix, green with it, in memory or on published wheels."""

import time
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eagletwin.cases.ledger import ledger_of, with_probes
from eagletwin.cases.reach import unreached, unreached_text
from eagletwin.harness.core.errors import EXIT_UNKNOWN, InputError
from eagletwin.harness.core.mode import CPU
from eagletwin.harness.core.progress import progress
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.core.terminal import show
from eagletwin.harness.core.words import count

from ..as_json import tell_result, with_json
from ..options import DEFAULT_RUNS, ENGINE, Runs, tell
from ..result import ProveFacts
from ..run_options import HOW, LIMITS, SOURCE, run_options

if TYPE_CHECKING:
    from eagletwin.cases.entry import Entry


@with_json
@run_options(SOURCE, HOW, LIMITS)
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
    out: Runs = DEFAULT_RUNS,
    *,
    spec: RunSpec,
) -> int:
    """Prove fixes of the ledger: without the fix the case diverges, with it the case is equal.

    With `all`, entries that this mode cannot reach are listed and not counted.
    """
    if on_releases:
        _check_releases(spec)
        return _prove_on_wheels(entries, out, spec)
    ledger = ledger_of(entries)
    chosen = [entry for entry in ledger if not unreached(entry, spec.mode)]
    others = [entry for entry in ledger if unreached(entry, spec.mode)]
    code = _prove(chosen, others, out, spec)
    named = others and "all" not in entries  # with `all`, entries that this mode cannot reach are not counted
    from .proof import worst

    return worst([code, *([EXIT_UNKNOWN] if named else [])])


def _prove(chosen: "Sequence[Entry]", others: "Sequence[Entry]", out: Path, spec: RunSpec) -> int:
    from eagletwin.harness.engines.source import resolve
    from eagletwin.harness.engines.start import Zygote

    begun = time.monotonic()
    source = resolve(spec.sglang)
    with Zygote(source, spec.mode) as zygote:
        zygote.start()  # it imports SGLang while this process imports torch
        if chosen:
            tell(f"importing SGLang {source.called}; then {count(len(chosen), 'proof')}: a case with the fix, and without it")
        from eagletwin.harness.engines.host import Host

        from . import proof as proving
        from .report import proof_facts, proof_table, proof_text, proof_title

        for entry in others:
            print(f"{proof_title(entry)}{unreached_text(entry, spec.mode)}")
        if not chosen:
            return EXIT_UNKNOWN
        proofs = []
        with progress("proofs", len(chosen)) as line, Host(zygote) as host:
            line.look(chosen[0].id)
            for proof, following in zip_longest(proving.prove(host, chosen, out, spec), chosen[1:]):
                proofs.append(proof)
                show(proof_text(proof))
                line.done(following.id if following is not None else "")
    proof_table(proofs, others)
    seconds = time.monotonic() - begun
    print(f"{sum(proof.holds for proof in proofs)} of {len(proofs)} proven in {seconds:.1f} s")
    facts = [proof_facts(proof) for proof in proofs]
    tell_result(ProveFacts(proofs=facts, not_reached=[entry.id for entry in others], seconds=round(seconds, 3)))
    if others:
        print(f"not reached in this mode, and so not run: {', '.join(entry.id for entry in others)}")
    return proving.worst([proof.exit_code for proof in proofs])


def _check_releases(spec: RunSpec) -> None:
    """Raises InputError for options that published wheels on a CPU do not go with."""
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
    from .report import proof_title, wheel_facts, wheel_proof_table

    begun = time.monotonic()
    known = with_probes(entries)
    chosen, live = [entry for entry in known if entry.fixed], [entry.id for entry in known if not entry.fixed]
    proofs = []
    with progress("proofs", len(chosen)) as line:
        for proof in proving.prove_on_wheels(chosen, out, spec, tell):
            proofs.append(proof)
            line.done(proof.entry.id)
            print(proof_title(proof.entry))
            for seen in (proof.bad, proof.good):
                if seen is not None:
                    print(seen.text)
            if proof.why:
                print(f"UNKNOWN  {proof.why}\n")
    wheel_proof_table(proofs)
    seconds = time.monotonic() - begun
    print(f"{sum(proof.holds for proof in proofs)} of {len(proofs)} proven in {seconds:.1f} s")
    tell_result(ProveFacts(proofs=[wheel_facts(proof) for proof in proofs], not_reached=live, seconds=round(seconds, 3)))
    if live:
        print(f"not proven on releases, since none has a fix: {', '.join(live)}")
    named = live and "all" not in entries
    return proving.worst([*(proof.exit_code for proof in proofs), *([EXIT_UNKNOWN] if named else [])])
