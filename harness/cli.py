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
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from .cli_bench import bench
from .errors import (
    EXIT_DIVERGED,
    EXIT_EQUAL,
    EXIT_HARNESS,
    EXIT_INTERRUPTED,
    EXIT_UNKNOWN,
    EXIT_USAGE,
    EagletwinError,
    InputError,
    exit_code_of,
)

if TYPE_CHECKING:
    from eagletwin.cases.entry import Entry

    from .case import Case
    from .patch import Patch

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Run SGLang's real EAGLE worker next to a slow reference, and tell where they differ.",
    epilog="Exit codes: 0 equal, 1 diverged, 125 cannot tell, 128 and more: usage or harness error.",
)

app.add_typer(bench, name="bench")

Runs = Annotated[Path, typer.Option("--out", help="Folder under which run folders are made; nothing is overwritten.")]
StepSeconds = Annotated[
    float, typer.Option("--step-timeout", min=0.1, help="Seconds that one stage of one iteration may take.")
]
CaseSeconds = Annotated[float, typer.Option("--case-timeout", min=0.1, help="Seconds that a whole case may take.")]
KernelRuntime = Annotated[
    Literal["fast", "interpreter", "shadow", "checked"],
    typer.Option(
        "--kernels",
        help="What executes Triton kernels: the fast runtime; Triton's interpreter; both, compared; or the fast runtime three "
        "times a launch, to find undefined values and races.",
    ),
]
Reverts = Annotated[list[str] | None, typer.Option("--revert", metavar="PR", help="Undo this fix, in memory. Repeatable.")]
Remedies = Annotated[
    list[str] | None, typer.Option("--remedy", metavar="ENTRY", help="Apply a live bug's candidate fix, in memory. Repeatable.")
]
Views = Annotated[
    Literal["slot_layout", "true_tree", "last_fed", "committed"],
    typer.Option("--view", help="Hold the release to what is right where the judge declares otherwise: true_tree, committed."),
]
PatchFiles = Annotated[list[Path] | None, typer.Option("--patch", metavar="FILE", help="Apply this patch file, in memory.")]
Sglang = Annotated[
    str, typer.Option("--sglang", metavar="RELEASE|PATH", help="Run this SGLang: a published release, or a source tree.")
]
RulesOff = Annotated[list[str] | None, typer.Option("--without", metavar="RULE", help="Switch a rule off. Repeatable.")]
DEFAULT_RUNS = Path("eagletwin-runs")
STEP_SECONDS, CASE_SECONDS = 120.0, 900.0


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

    source = resolve(sglang)
    with Zygote(source) as zygote:
        zygote.start()  # it imports SGLang while this process imports torch
        from . import check as checking
        from .engines.process import Host, Limits, WouldNotStart
        from .paths import new_run_folder
        from .repro import write_script

        chosen, before = _case(case), tuple(_case(name) for name in after or ())
        other = [name for name, one in zip(after or (), before, strict=True) if one.configuration() != chosen.configuration()]
        if other:
            raise InputError(
                f"{other[0]} needs another engine configuration than {case}",
                consequence="nothing was run: the two cannot run in one process",
                remedy="give both the same model, num_steps, page_size, chunked_prefill_size and engine settings",
            )
        patches, off = _patches(revert, remedy, patch), _rules(without)
        words = ["eagletwin", "check", case, *_changes(revert, remedy, patch, without)]
        words += _unusual(("--view", view, "slot_layout"), ("--sglang", sglang, ""))
        words += _unusual(("--kernels", kernels, "fast"), ("--repeat", repeat, 1))
        words += _unusual(("--step-timeout", step_timeout, STEP_SECONDS), ("--case-timeout", case_timeout, CASE_SECONDS))
        again = shlex.join([*words, *(word for name in after or () for word in ("--after", name))])
        with Host(zygote, source) as host:
            try:
                engine = host.engine(chosen, patches, kernels)
            except WouldNotStart as error:
                print(f"UNKNOWN  {chosen.name}\n\n  {error}")
                return EXIT_UNKNOWN
            folder = new_run_folder(out, chosen.name)
            if not before:  # a script holds one case
                write_script(folder, chosen, command=again, patches=patches, kernels=kernels, without=off, view=view)
            limits = Limits(step=step_timeout, case=case_timeout)
            outcome = checking.check(
                engine, chosen, folder, limits, without=off, view=view, repeat=repeat, after=before, again=again
            )
    print(outcome.report)
    print(f"  folder: {folder}")
    return exit_code_of(outcome.verdict.status)


@app.command()
def fuzz(
    minutes: Annotated[float, typer.Option(min=0.01, help="How long to generate cases.")] = 5.0,
    max_cases: Annotated[
        int,
        typer.Option("--cases", min=1, help="Generate no more than this many; 30 at a time share most of one configuration."),
    ] = 1_000_000,
    seed: Annotated[int, typer.Option(min=0, help="The same seed draws the same cases.")] = 0,
    findings: Annotated[int, typer.Option(min=1, help="Go on until this many different rules were found broken.")] = 1,
    shrink_minutes: Annotated[
        float, typer.Option(min=0.0, help="How long to shrink a finding; the smallest case until then counts.")
    ] = 3.0,
    model: Annotated[str | None, typer.Option(help="Only this model recipe.")] = None,
    topk: Annotated[int | None, typer.Option(help="Only this topk: 1, 2, 3, 4, 8 or 16.")] = None,
    revert: Reverts = None,
    remedy: Remedies = None,
    patch: PatchFiles = None,
    without: RulesOff = None,
    kernels: KernelRuntime = "fast",
    out: Runs = DEFAULT_RUNS,
    step_timeout: StepSeconds = STEP_SECONDS,
    case_timeout: CaseSeconds = CASE_SECONDS,
) -> int:
    """Generate cases until one diverges, then shrink it."""
    from itertools import islice

    from .engines.process import Host, Limits, WouldNotStart
    from .fuzz import Fuzz
    from .paths import new_run_folder
    from .report.search import finding_text, tally_text, write_summary
    from .trial import Trials

    patches, off = _patches(revert, remedy, patch), _rules(without)
    held = _held(model=model, topk=topk)
    words = ["eagletwin", "fuzz", "--seed", str(seed), *_changes(revert, remedy, patch, without)]
    words += [word for name, value in held.items() for word in (f"--{name}", str(value))]
    words += _unusual(("--minutes", minutes, 5.0), ("--cases", max_cases, 1_000_000), ("--findings", findings, 1))
    words += _unusual(("--shrink-minutes", shrink_minutes, 3.0), ("--kernels", kernels, "fast"))
    words += _unusual(("--step-timeout", step_timeout, STEP_SECONDS), ("--case-timeout", case_timeout, CASE_SECONDS))
    folder = new_run_folder(out, f"fuzz-{seed}")
    found, search = [], None
    try:
        with Host() as host:
            limits = Limits(step=step_timeout, case=case_timeout)
            trials = Trials(host, patches=patches, kernels=kernels, without=off, limits=limits)
            search = Fuzz(
                trials,
                folder,
                seed=seed,
                seconds=60 * minutes,
                max_cases=max_cases,
                shrink_seconds=60 * shrink_minutes,
                command=shlex.join(words),
                held=held,
                progress=lambda text: print(text, file=sys.stderr, flush=True),
            )
            for finding in islice(search.search(), findings):
                found.append(finding)
                print(finding_text(finding))
    except WouldNotStart as error:
        print(f"UNKNOWN\n\n  {error}")
        return EXIT_UNKNOWN
    finally:
        if search is not None:
            write_summary(folder, search, found)
            print(tally_text(search, found))
    statuses = {finding.outcome.verdict.status for finding in found}
    if "diverged" in statuses:
        return EXIT_DIVERGED
    return EXIT_UNKNOWN if found or not search.tally.statuses["equal"] else EXIT_EQUAL


@app.command()
def prove(
    entries: Annotated[list[str], typer.Argument(metavar="PR…|all", help="Ids of ledger entries, or all.")],
    kernels: KernelRuntime = "fast",
    out: Runs = DEFAULT_RUNS,
    step_timeout: StepSeconds = STEP_SECONDS,
    case_timeout: CaseSeconds = CASE_SECONDS,
) -> int:
    """Prove fixes: red without the fix, green with it."""
    from .engines.start import Zygote

    begun = time.monotonic()
    with Zygote() as zygote:
        zygote.start()  # it imports SGLang while this process imports torch
        from eagletwin.cases.regressions import LEDGER

        from . import prove as proving
        from .engines.process import Host, Limits, WouldNotStart
        from .report.argument import argue
        from .report.table import proof_table, proof_title

        chosen = list(LEDGER.values()) if "all" in entries else [entry for name in entries for entry in _entries(name)]
        proofs = []
        with Host(zygote) as host:
            try:
                for proof in proving.prove(host, chosen, out, Limits(step=step_timeout, case=case_timeout), kernels):
                    proofs.append(proof)
                    print(proof_title(proof.entry))
                    for outcome, side in ((proof.fixed, proof.entry.green), (proof.reverted, proof.entry.red)):
                        print(f"-- {proof.entry.says(side)}\n")
                        print(
                            argue(outcome.trace.header, outcome.verdict, again=proof.entry.command(side), trace=outcome.trace)
                        )
                        print(f"  folder: {outcome.folder}\n")
            except WouldNotStart as error:
                print(f"UNKNOWN\n\n  {error}")
                return EXIT_UNKNOWN
    proof_table(proofs)
    print(f"{sum(proof.holds for proof in proofs)} of {len(proofs)} proven in {time.monotonic() - begun:.1f} s")
    return proving.worst([proof.exit_code for proof in proofs])


@app.command()
def judge(
    trace: Annotated[Path, typer.Argument(help="A folder with trace.json and trace.safetensors.")],
    without: RulesOff = None,
    view: Views = "slot_layout",
) -> int:
    """Judge a recorded trace again, without an engine."""
    from .judge import judge as judging
    from .report.argument import argue
    from .trace import read_trace

    off = _rules(without)
    recorded = read_trace(trace)
    verdict = judging(recorded, off, view)
    words = ["eagletwin", "judge", str(trace), *(word for rule in without or () for word in ("--without", rule))]
    words += _unusual(("--view", view, "slot_layout"))
    print(argue(recorded.header, verdict, again=shlex.join(words), trace=recorded))
    return exit_code_of(verdict.status)


@app.command()
def diff(
    left: Annotated[Path, typer.Argument(help="A trace folder.")],
    right: Annotated[Path, typer.Argument(help="Another trace of the same requests.")],
    lines: Annotated[int, typer.Option(min=1, help="How many differences to print.")] = 20,
) -> int:
    """Compare two traces number for number. 0: same within the judge's bound, 1: different."""
    from .diff import diff as compare
    from .trace import read_trace

    result = compare(read_trace(left), read_trace(right))
    for difference in sorted(result.differences, key=lambda d: d.bits)[:lines]:
        print(
            f"{difference.where}: {difference.left} | {difference.right}" + ("  (within the bound)" if difference.bits else "")
        )
    hidden = len(result.differences) - lines
    if hidden > 0:
        print(f"… and {hidden} more")
    exact = "identical" if not result.differences else f"largest relative float difference {result.largest:.3g}"
    print(f"{'SAME' if result.same else 'DIFFERENT'}: {result.compared} compared, {len(result.differences)} differ; {exact}")
    return EXIT_EQUAL if result.same else EXIT_DIVERGED


@app.command()
def doctor() -> int:
    """Say what can run on this machine, and why not."""
    from .doctor import examine
    from .report.table import doctor_table

    findings = examine()
    doctor_table(findings)
    return EXIT_EQUAL if all(finding.good or not finding.needed for finding in findings) else EXIT_UNKNOWN


def _held(**asked: str | int | None) -> dict[str, str | int]:
    """What all generated cases are to have: fields of cases.strategies.Focus. Raises InputError for what is never drawn."""
    from eagletwin.cases.strategies import VALUES

    held = {name: value for name, value in asked.items() if value is not None}
    for name, value in held.items():
        if value not in VALUES[name]:
            raise InputError(
                f"no case is generated with {name} {value}",
                consequence="nothing was run",
                remedy=f"use one of {', '.join(map(str, VALUES[name]))}, or write the case yourself (docs/case.md)",
            )
    return held


def _patches(revert: list[str] | None, remedy: list[str] | None, patch: list[Path] | None) -> "tuple[Patch, ...]":
    from .patch import read_patch

    def refused(name: str, what: str, remedy: str) -> InputError:
        return InputError(f"entry {name} has no {what}", consequence="nothing was run", remedy=remedy)

    patches: list[Patch] = []
    for entry in (entry for name in revert or () for entry in _entries(name)):
        if entry.revert is None:
            live = f"it is live: `eagletwin check {entry.id}` shows it as the release is, `prove {entry.id}` both sides"
            raise refused(entry.id, "fix that could be undone", live)
        patches.append(entry.revert)
    for entry in (entry for name in remedy or () for entry in _entries(name)):
        if entry.remedy is None:
            raise refused(entry.id, "candidate fix", f"`eagletwin prove {entry.id}` shows both sides of it")
        patches.append(entry.remedy)
    return (*patches, *(read_patch(file) for file in patch or ()))


def _changes(
    revert: list[str] | None, remedy: list[str] | None, patch: list[Path] | None, without: list[str] | None
) -> list[str]:
    """The options that change what is run or judged, as they were typed."""
    words = [word for number in revert or () for word in ("--revert", number)]
    words += [word for name in remedy or () for word in ("--remedy", name)]
    words += [word for file in patch or () for word in ("--patch", str(file))]
    return words + [word for rule in without or () for word in ("--without", rule)]


def _unusual(*options: tuple[str, object, object]) -> list[str]:
    """Options (name, value, default) that were not left at their default, as they were typed."""
    return [word for name, value, usual in options if value != usual for word in (name, str(value))]


def _rules(names: list[str] | None) -> frozenset[str]:
    """Rules to switch off. What happens to the engine or a kernel itself is not a comparison, and cannot be."""
    from .judge import RULES

    known = [rule for rule in RULES if not rule.startswith(("engine.", "kernel."))]
    for name in names or ():
        if name not in known:
            raise InputError(
                f"{name!r} is not a rule that can be switched off",
                consequence="nothing was run",
                remedy=f"use some of {', '.join(known)}",
            )
    return frozenset(names or ())


def _entry(name: str) -> "Entry":
    """The entry of this id. Raises InputError: there is none, or there are several of this number."""
    found = _entries(name)
    if len(found) > 1:
        raise InputError(
            f"{name} has several entries",
            consequence="nothing was run",
            remedy=f"use one of {', '.join(entry.id for entry in found)}",
        )
    return found[0]


def _entries(name: str) -> "list[Entry]":
    """The entry of this id, or all parts of this number. Raises InputError if there is none."""
    from eagletwin.cases.regressions import LEDGER

    name = name.removeprefix("#")
    found = [entry for entry in LEDGER.values() if entry.id == name or entry.id.startswith(f"{name}-")]
    if not found:
        raise InputError(
            f"the ledger has no entry {name!r}", consequence="nothing was run", remedy=f"use one of {', '.join(LEDGER)}"
        )
    return found


def _case(name: str) -> "Case":
    from .case import read_case

    number = name.removeprefix("#")
    if Path(name).exists() or not (number.isdigit() or _is_entry(number)):
        return read_case(Path(name))
    return _entry(number).case  # says which entries there are


def _is_entry(name: str) -> bool:
    from eagletwin.cases.regressions import LEDGER

    return name in LEDGER


INTERRUPTED = "interrupted: nothing was judged; a run folder that holds no verdict.json is of an interrupted run"


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
