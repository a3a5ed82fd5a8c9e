"""The command line: what people type (DESIGN §7). Thin: each command reads its arguments, calls one function, prints.

Exit codes fit `git bisect run`: 0 equal, 1 diverged, 125 cannot tell, 128 and more for usage and harness errors.
"""

import gc
import os
import shlex
import sys
import time
import traceback
from collections.abc import Callable
from typing import Annotated

import typer

from .cli_bench import bench
from .cli_bisect import bisect
from .cli_fuzz import fuzz
from .cli_gpu import gpu
from .cli_options import (
    CASE_SECONDS,
    DEFAULT_GRAPHS,
    DEFAULT_RUNS,
    STEP_SECONDS,
    AttentionBackend,
    CaseSeconds,
    DataType,
    Device,
    Graphs,
    KernelRuntime,
    Overlap,
    PatchFiles,
    Ranks,
    Remedies,
    Reverts,
    RulesOff,
    Runs,
    Sglang,
    StepSeconds,
    Views,
    case_of,
    change_words,
    entry_named,
    ledger_of,
    mode_of,
    patches_of,
    rules_off,
    tell,
    unusual_words,
)
from .cli_releases import prove_on_wheels, releases
from .cli_traces import diff, judge
from .errors import (
    EXIT_EQUAL,
    EXIT_HARNESS,
    EXIT_INTERRUPTED,
    EXIT_UNKNOWN,
    EXIT_USAGE,
    EagletwinError,
    InputError,
    Told,
    exit_code_of,
)
from .words import count

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Run SGLang's real EAGLE worker next to a slow reference, and tell where they differ.",
    epilog="Exit codes: 0 equal, 1 diverged, 125 cannot tell, 128 and more: usage or harness error.",
)

app.add_typer(bench, name="bench")
app.add_typer(gpu, name="gpu")
app.add_typer(releases, name="releases")
app.command()(bisect)
app.command()(fuzz)
app.command()(judge)
app.command()(diff)


@app.callback(invoke_without_command=True)
def top(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Run SGLang's real EAGLE worker next to a slow reference, and tell where they differ."""
    if version:
        from eagletwin import __version__

        print(f"eagletwin {__version__}")
        raise typer.Exit


@app.command()
def check(
    case: Annotated[str, typer.Argument(help="A case file (JSON), or the id of a ledger entry such as 25015.")],
    revert: Reverts = None,
    remedy: Remedies = None,
    patch: PatchFiles = None,
    without: RulesOff = None,
    view: Views = "slot_layout",
    sglang: Sglang = "",
    kernels: KernelRuntime = "fast",
    device: Device = "cpu",
    graphs: Graphs = DEFAULT_GRAPHS,
    overlap: Overlap = None,
    tp: Ranks = 1,
    dtype: DataType = "float32",
    attention: AttentionBackend = "triton",
    repeat: Annotated[int, typer.Option(min=1, help="Look this many times before calling a case equal.")] = 1,
    after: Annotated[
        list[str] | None, typer.Option("--after", metavar="CASE", help="Run this case before, in the same process. Repeatable.")
    ] = None,
    out: Runs = DEFAULT_RUNS,
    step_timeout: StepSeconds = STEP_SECONDS,
    case_timeout: CaseSeconds = CASE_SECONDS,
) -> int:
    """Run one case on one engine and judge it."""
    from .engines.source import resolve
    from .engines.start import Zygote

    # what was typed is looked at first: no download in vain, and a mistake is told before anything slow is imported
    mode = mode_of(device, graphs, overlap, tp, dtype, attention)
    chosen, before = case_of(case), tuple(case_of(name) for name in after or ())
    other = [name for name, one in zip(after or (), before, strict=True) if one.configuration() != chosen.configuration()]
    if other:
        raise InputError(
            f"{other[0]} needs another engine configuration than {case}",
            consequence="nothing was run: the two cannot run in one process",
            remedy="give both the same model, num_steps, page_size, chunked_prefill_size and engine settings",
        )
    patches, off = patches_of(revert, remedy, patch), rules_off(without)
    source = resolve(sglang)
    with Zygote(source, mode) as zygote:
        zygote.start()  # it imports SGLang while this process imports torch
        from . import check as checking
        from .engines.process import Host, Limits, WouldNotStart
        from .paths import new_run_folder
        from .reach import unreached
        from .repro import write_script

        words = ["eagletwin", "check", case, *change_words(revert, remedy, patch, without)]
        words += unusual_words(("--view", view, "slot_layout"), ("--sglang", sglang, ""))
        words += unusual_words(("--kernels", kernels, "fast"), ("--repeat", repeat, 1))
        words += unusual_words(("--step-timeout", step_timeout, STEP_SECONDS), ("--case-timeout", case_timeout, CASE_SECONDS))
        words += mode.options
        again = shlex.join([*words, *(word for name in after or () for word in ("--after", name))])
        with Host(zygote) as host:
            try:
                engine = host.engine(chosen, patches, kernels)
            except WouldNotStart as error:
                print(f"UNKNOWN  {chosen.name}\n\n  {error}")
                return EXIT_UNKNOWN
            folder = new_run_folder(out, chosen.name)
            if not before:  # a script holds one case
                write_script(
                    *(folder, chosen),
                    command=again,
                    source=source,
                    mode=mode,
                    patches=patches,
                    kernels=kernels,
                    without=off,
                    view=view,
                )
            limits = Limits(step=step_timeout, case=case_timeout)
            outcome = checking.check(
                engine, chosen, folder, limits, without=off, view=view, repeat=repeat, after=before, again=again
            )
    print(outcome.report)
    print(f"  folder: {folder}")
    entry = entry_named(case)
    if entry is not None and unreached(entry, mode):
        print(f"  note: {unreached(entry, mode)}. The verdict is of the case here, and says nothing of that bug")
    return exit_code_of(outcome.verdict.status)


@app.command()
def prove(
    entries: Annotated[list[str], typer.Argument(metavar="PR…|all", help="Ids of ledger entries, or all.")],
    sglang: Sglang = "",
    on_releases: Annotated[
        bool,
        typer.Option("--releases", help="On published wheels, unchanged: the last before each fix, and the first with it."),
    ] = False,
    kernels: KernelRuntime = "fast",
    device: Device = "cpu",
    graphs: Graphs = DEFAULT_GRAPHS,
    overlap: Overlap = None,
    tp: Ranks = 1,
    dtype: DataType = "float32",
    attention: AttentionBackend = "triton",
    out: Runs = DEFAULT_RUNS,
    step_timeout: StepSeconds = STEP_SECONDS,
    case_timeout: CaseSeconds = CASE_SECONDS,
) -> int:
    """Prove fixes: red without the fix, green with it. Of `all`, those that this mode reaches; the rest is listed."""
    if on_releases:
        if sglang:
            raise InputError("--releases names the releases itself", consequence="nothing was run", remedy="leave --sglang out")
        return prove_on_wheels(entries, kernels, out, step_timeout, case_timeout)
    from .engines.source import resolve
    from .engines.start import Zygote
    from .reach import unreached, unreached_text

    begun = time.monotonic()
    mode, ledger = mode_of(device, graphs, overlap, tp, dtype, attention), ledger_of(entries)
    chosen = [entry for entry in ledger if not unreached(entry, mode)]
    others = [entry for entry in ledger if unreached(entry, mode)]
    source = resolve(sglang)
    with Zygote(source, mode) as zygote:
        zygote.start()  # it imports SGLang while this process imports torch
        if chosen:
            tell(f"importing SGLang {source.called}; then {count(len(chosen), 'proof')}: a case with the fix, and without it")
        from . import prove as proving
        from .engines.process import Host, Limits, WouldNotStart
        from .report.table import proof_table, proof_title

        for entry in others:
            print(f"{proof_title(entry)}{unreached_text(entry, mode)}")
        if not chosen:
            return EXIT_UNKNOWN
        proofs = []
        with Host(zygote) as host:
            try:
                for proof in proving.prove(host, chosen, out, Limits(step=step_timeout, case=case_timeout), kernels):
                    proofs.append(proof)
                    print(proof_title(proof.entry))
                    for outcome, side in ((proof.fixed, proof.entry.green), (proof.reverted, proof.entry.red)):
                        print(f"-- {proof.entry.says(side)}\n")
                        print(outcome.report)
                        print(f"  folder: {outcome.folder}\n")
            except WouldNotStart as error:
                print(f"UNKNOWN\n\n  {error}")
                return EXIT_UNKNOWN
    proof_table(proofs, others)
    print(f"{sum(proof.holds for proof in proofs)} of {len(proofs)} proven in {time.monotonic() - begun:.1f} s")
    if others:
        print(f"not reached in this mode, and so not run: {', '.join(entry.id for entry in others)}")
    named = others and "all" not in entries  # of `all`, what this mode has not is none of its proofs
    return proving.worst([proof.exit_code for proof in proofs] + ([EXIT_UNKNOWN] if named else []))


@app.command()
def doctor() -> int:
    """Say what can run on this machine, and why not."""
    from .doctor import examine
    from .report.table import doctor_table

    findings = examine()
    doctor_table(findings)
    return EXIT_EQUAL if all(finding.good or not finding.needed for finding in findings) else EXIT_UNKNOWN


INTERRUPTED = "interrupted: nothing more was judged; a run folder that holds no verdict.json is of an interrupted run"


def main() -> None:
    """Entry point."""
    if len(sys.argv) == 1:
        sys.argv.append("--help")
    code = guarded(lambda: app(standalone_mode=False))
    gc.freeze()  # the interpreter collects once more as it ends: 0.2 s of looking at torch, which holds nothing of ours
    sys.exit(code)


def guarded(run: Callable[[], int]) -> int:
    """The exit code of `run`. Every way out has one of errors.py; Python's own 1 for a crash would read as `diverged`."""
    try:
        code = run()
        sys.stdout.flush()  # if that fails as the interpreter ends, the exit code is Python's own
    except typer.Exit as stop:
        code = stop.exit_code
    except SystemExit:  # typer's own way out when stdout is a closed pipe, with Python's 1, which would read as `diverged`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  for the interpreter to flush into as it ends
        code = EXIT_HARNESS
    except typer.TyperException as error:
        print(f"error: {error.format_message()}", file=sys.stderr)
        print("  so:  nothing was run\n  try: eagletwin --help, or --help after a command", file=sys.stderr)
        code = EXIT_USAGE
    except Told as end:
        return end.exit_code
    except EagletwinError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = EXIT_INTERRUPTED
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115  as above
        print(f"error: {error}\n  so:  the command stopped there", file=sys.stderr)
        print("  try: look at the permissions and the free space of the folder", file=sys.stderr)
        code = EXIT_HARNESS
    except Exception:
        traceback.print_exc()
        print("error: eagletwin itself failed; this is a bug in it, and says nothing about the engine", file=sys.stderr)
        code = EXIT_HARNESS
    if code == EXIT_INTERRUPTED:  # also what typer returns when it sees Ctrl-C first
        print(INTERRUPTED, file=sys.stderr)
    return code if isinstance(code, int) else EXIT_EQUAL
