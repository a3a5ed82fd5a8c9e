"""`eagletwin prove`: red without the fix, green with it, in memory or on published wheels."""

from collections.abc import Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from msgspec.structs import replace

from eagletwin.cases.ledger import ledger_of, with_probes
from eagletwin.cases.reach import cannot_be_in, unreached_text, why_unreachable
from eagletwin.harness.core.errors import EXIT_UNKNOWN
from eagletwin.harness.core.run_spec import CPU, RunSpec
from eagletwin.harness.core.terminal import count
from eagletwin.harness.families.valid import check_model

from ..options import ENGINE, HOW, LIMITS, OUT, SOURCE, STRICT, WHICH, log_progress, nothing_run, option, run_options
from ..result import ProveFacts, with_json

if TYPE_CHECKING:
    from eagletwin.cases.entry import Entry, Known
    from eagletwin.harness.engines.source import Source

OPTIONS = (
    option(ENGINE, "on_releases", bool, False, "", "--releases")(
        "Use published wheels, unchanged: the last release before each fix, and the first with it."
    ),
    option(ENGINE, "model", str, "", "RECIPE")(
        "Carry the cases over to this model. Other prompts are tried where they do not reach the bug there, and "
        "other live bugs that would show first are mended."
    ),
    OUT,
)


@with_json
@run_options(OPTIONS, STRICT, SOURCE, WHICH, HOW, LIMITS)
def prove(
    entries: Annotated[list[str], typer.Argument(metavar="PR…|all", help="Ids of ledger entries, or all.")],
    *,
    on_releases: bool,
    model: str,
    out: Path,
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
    from eagletwin.harness.engines.source import resolve
    from eagletwin.harness.engines.start import Zygote

    named = ledger_of(entries, spec.mode.engine)
    others = [(entry, why) for entry in named if (why := _not_run(entry, model, spec))]
    left_out = [entry for entry, _ in others]
    chosen = [entry for entry in named if entry not in left_out]
    source = resolve(spec.release, spec.mode.engine)
    with Zygote(source, spec.mode) as zygote:
        zygote.start()  # it imports the engine while this process imports torch
        if chosen:
            log_progress(
                f"importing {spec.mode.title} {source.called}; then {count(len(chosen), 'proof')}: a case with the fix, and "
                "without it"
            )
        from eagletwin.harness.engines.host import Host

        from .proof import worst
        from .report import proof_title, proofs_of, show_proofs

        for entry, why in others:
            print(f"{proof_title(entry)}{why}")
        if not chosen:
            return EXIT_UNKNOWN
        command = spec.command("prove", *entries, *(["--model", model] if model else []))
        facts = _result(command, left_out, chosen, source)
        with Host(zygote) as host:
            code = show_proofs(facts, proofs_of(host, chosen, out, spec, model), chosen, out)
    asked = others and "all" not in entries  # with `all`, entries that this mode cannot reach are not counted
    return worst([code, *([EXIT_UNKNOWN] if asked else [])])


def _not_run(entry: "Entry", model: str, spec: RunSpec) -> str:
    """Why an entry is not run, as text; empty: it is."""
    if why_unreachable(entry, spec.mode):
        return unreached_text(entry, spec.mode)
    if not model or model == entry.case.model:
        return ""
    said = "  so:  neither side was run; this says nothing about the release\n  try: docs/records/models.md, for what can be\n"
    if why := cannot_be_in(entry, model):
        return f"UNKNOWN  {entry.id} cannot be in {model}: {why}\n{said}"
    from .report import reason  # it imports torch

    # A reason was found on the installed release as it is, and says nothing of another engine.
    why = "" if spec.release or spec.patches else reason(entry.id, model)
    return f"UNKNOWN  {entry.id} does not show in {model}: {why}\n{said}" if why else ""


def _result(command: str, left: "Sequence[Known]", chosen: Sized, source: "Source | None" = None) -> ProveFacts:
    """The result before anything was proven. left: entries that are not run"""
    not_reached = [entry.id for entry in left]
    ran: dict[str, Any] = {} if source is None else {"sglang": source.called, "engine": source.engine}
    return ProveFacts(proofs=[], not_reached=not_reached, asked=len(chosen), seconds=0.0, command=command, **ran)


def _check_releases(spec: RunSpec, model: str) -> None:
    """Raises InputError for options that published wheels on a CPU do not go with."""
    if model:
        raise nothing_run(
            "--releases proves the entries' own cases",
            f"leave --model out; `python -m tests.lab releases --model {model}` asks every release, in a checkout",
        )
    if spec.release:
        raise nothing_run("--releases names the releases itself", f"leave --{spec.mode.engine} out")
    if spec.mode != replace(CPU, engine=spec.mode.engine):
        raise nothing_run(
            "--releases runs on the CPU engine as it is by default",
            "leave --device, --overlap, --tp, --dtype and --attention out",
        )


def _prove_on_wheels(entries: list[str], out: Path, spec: RunSpec) -> int:
    from .proof import prove_on_wheels, worst
    from .report import show_proofs

    known = with_probes(entries, spec.mode.engine)
    chosen, live = [entry for entry in known if entry.fixed], [entry for entry in known if not entry.fixed]
    facts = _result(spec.command("prove", "--releases", *entries), live, chosen)
    code = show_proofs(facts, prove_on_wheels(chosen, out, spec, log_progress), chosen, out)
    named = live and "all" not in entries
    return worst([code, *([EXIT_UNKNOWN] if named else [])])
