"""`eagletwin bisect CASE`: which release, which commit of a checkout, or which feature of the case a divergence hangs on."""

import shlex
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .cli_options import (
    CASE_SECONDS,
    DEFAULT_RUNS,
    STEP_SECONDS,
    CaseSeconds,
    KernelRuntime,
    PatchFiles,
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
    patches_of,
    rule_of,
    rules_off,
    tell,
    unusual_words,
)
from .errors import EXIT_EQUAL, EXIT_INTERRUPTED, EXIT_UNKNOWN, InputError, Told

if TYPE_CHECKING:
    from eagletwin.cases.entry import Entry

    from .bisect.marks import Looked
    from .bisect.state import Run, Subject

Command = Callable[..., str]


def bisect(
    case: Annotated[str, typer.Argument(help="A case file (JSON), or the id of a ledger entry such as 25015.")],
    since: Annotated[str, typer.Option("--from", metavar="RELEASE", help="The oldest release to look at.")] = "",
    until: Annotated[str, typer.Option("--to", metavar="RELEASE", help="The newest release to look at.")] = "",
    git: Annotated[
        tuple[str, str, str] | None,
        typer.Option(
            "--git",
            metavar="PATH GOOD BAD",
            help="Look at the commits of this checkout between two, by `git bisect run` on a scratch worktree.",
        ),
    ] = None,
    features: Annotated[
        bool, typer.Option("--features", help="Look for the smallest set of features of the case that the fault needs.")
    ] = False,
    rule: Annotated[
        str,
        typer.Option(
            "--rule", metavar="RULE", help="What counts as the fault, wherever it shows: draft.slots, engine.crash, …"
        ),
    ] = "",
    sglang: Sglang = "",
    revert: Reverts = None,
    remedy: Remedies = None,
    patch: PatchFiles = None,
    without: RulesOff = None,
    view: Views = "slot_layout",
    kernels: KernelRuntime = "fast",
    out: Runs = DEFAULT_RUNS,
    step_timeout: StepSeconds = STEP_SECONDS,
    case_timeout: CaseSeconds = CASE_SECONDS,
) -> int:
    """Say which release, commit or feature a divergence hangs on. 0: it is named; 125: it cannot be told."""
    from .reach import unreached, unreached_text

    _check_options(since or until, git, features, sglang)
    if rule:
        rule_of(rule)
    entry = entry_named(case)
    if entry is not None and unreached(entry):
        print(unreached_text(entry))
        return EXIT_UNKNOWN
    if entry is not None and entry.view is not None and view == "slot_layout":
        view = entry.view  # what is declared is looked for where it is a divergence
    chosen, patches, off = case_of(case), patches_of(revert, remedy, patch), tuple(sorted(rules_off(without)))
    tell(f"bisecting {chosen.name} over {'its features' if features else 'commits' if git is not None else 'releases'}")
    from .bisect.state import Subject

    subject = Subject(
        case=chosen,
        patches=patches,
        kernels=kernels,
        without=off,
        view=view,
        step_seconds=step_timeout,
        case_seconds=case_timeout,
    )

    def command(target: str, name: str = case) -> str:
        """What to type to see a case on one SGLang."""
        words = ["eagletwin", "check", name, *change_words(revert, remedy, patch, without)]
        words += unusual_words(("--view", view, "slot_layout"), ("--sglang", target, ""), ("--kernels", kernels, "fast"))
        words += unusual_words(("--step-timeout", step_timeout, STEP_SECONDS), ("--case-timeout", case_timeout, CASE_SECONDS))
        return shlex.join(words)

    with terminated_as_interrupted():
        if features:
            return _features(subject, rule, sglang, out, command, _hint(entry, subject))
        expected = entry.rule if entry is not None else ""
        if git is not None:
            return _commits(subject, rule, expected, git, out, command)
        return _releases(subject, rule, expected, since, until, out, command)


def _hint(entry: "Entry | None", subject: "Subject") -> str:
    """What brings back a bug that the release no longer has."""
    if entry is None or entry.revert is None or entry.revert in subject.patches:
        return ""
    return f"--revert {entry.id} undoes the fix of {entry.id}, where an SGLang has it."


def _check_options(ranged: str, git: object, features: bool, sglang: str) -> None:
    """Options that contradict each other."""
    chosen = [name for name, given in (("--git", git), ("--features", features), ("--from and --to", ranged)) if given]
    if len(chosen) > 1:
        raise InputError(
            f"{chosen[0]} and {chosen[1]}: a bisection goes over one thing",
            consequence="nothing was run",
            remedy="give one of them; then the other",
        )
    if sglang and not features:
        raise InputError(
            "--sglang names one SGLang, and a bisection over releases or commits goes over many",
            consequence="nothing was run",
            remedy="give --from and --to, or --git; --sglang goes with --features",
        )


def _releases(subject: "Subject", rule: str, expected: str, since: str, until: str, out: Path, command: Command) -> int:
    from .bisect.measure import look_at_version
    from .bisect.releases import bisect_releases
    from .bisect.state import open_run, plan_of
    from .engines.lock import releases
    from .report.bisection import version_report

    versions = _range(releases(), since, until)
    with _told_where_it_stands(), open_run(out, plan_of(subject, versions, rule=rule, expected=expected)) as run:
        _begin(run)

        def look(version: str) -> "Looked":
            return look_at_version(version, version, subject, run.folder, command(version))

        outcome = bisect_releases(run, look)
        return _end(run, version_report(outcome, subject.case, run, command), outcome.answered)


def _commits(subject: "Subject", rule: str, expected: str, git: tuple[str, str, str], out: Path, command: Command) -> int:
    from .bisect.commits import bisect_commits, ends_of
    from .bisect.measure import look_at_version
    from .bisect.state import open_run, plan_of
    from .report.bisection import version_report

    repository = Path(git[0]).absolute()
    ends = ends_of(repository, git[1], git[2])
    plan = plan_of(subject, ends, checkout=str(repository), rule=rule, expected=expected)
    with _told_where_it_stands(), open_run(out, plan) as run:
        _begin(run)

        def look(commit: str, tree: Path) -> "Looked":
            return look_at_version(commit, str(tree), subject, run.folder, again="")

        outcome = bisect_commits(run, look)
        place = f"git -C {shlex.quote(str(repository))} worktree add --detach /tmp/sglang"
        report = version_report(outcome, subject.case, run, lambda commit: f"{place} {commit[:12]} && {command('/tmp/sglang')}")
        return _end(run, report, outcome.answered)


def _features(subject: "Subject", rule: str, sglang: str, out: Path, command: Command, hint: str) -> int:
    """hint: what to type if the case diverges nowhere; may be empty."""
    from .bisect.features import features_of
    from .bisect.marks import LOOKS
    from .bisect.measure import SMALLEST, reduce_case
    from .bisect.state import say
    from .engines.process import Host
    from .engines.source import resolve
    from .paths import new_run_folder
    from .report.bisection import REPORT, feature_report

    source = resolve(sglang)
    folder = new_run_folder(out, f"features-{subject.case.name}")
    had = ", ".join(feature.name for feature in features_of(subject.case)) or "none"
    say(folder, f"folder: {folder}")
    say(folder, f"features of {subject.case.name}: {had}")
    say(folder, f"importing SGLang {source.called}; first the case as it is, {LOOKS} times")
    try:
        with Host(source=source) as host:
            reduction = reduce_case(host, subject, rule, folder, lambda text: say(folder, text))
    except KeyboardInterrupt:
        say(folder, "not finished: features are looked for anew when it is typed again")
        raise Told(EXIT_INTERRUPTED) from None
    again = command(sglang, str(folder / SMALLEST))
    report = feature_report(reduction, subject.case, folder, again, hint)
    (folder / REPORT).write_text(report + "\n", encoding="utf-8")
    print(report)
    return EXIT_EQUAL if reduction.reduced.answered else EXIT_UNKNOWN


def _begin(run: "Run") -> None:
    """Where it is kept, and what is known from before."""
    run.tell(f"folder: {run.folder}")
    if run.resumed:
        run.tell(f"an unfinished bisection of the same: {run.resumed} are known, going on")


def _end(run: "Run", report: str, answered: bool) -> int:
    from .report.bisection import REPORT

    (run.folder / REPORT).write_text(report + "\n", encoding="utf-8")
    print(report)
    return EXIT_EQUAL if answered else EXIT_UNKNOWN


def _range(known: tuple[str, ...], since: str, until: str) -> tuple[str, ...]:
    """The known releases from one to another."""
    for name in filter(None, (since, until)):
        if name not in known:
            raise InputError(
                f"no release {name} is known", consequence="nothing was run", remedy=f"use one of {', '.join(known)}"
            )
    chosen = known[known.index(since or known[0]) : known.index(until or known[-1]) + 1]
    if len(chosen) < 2:
        raise InputError(
            f"from {since or known[0]} to {until or known[-1]} there are no two releases",
            consequence="nothing was run",
            remedy="give the older one to --from and the newer one to --to",
        )
    return chosen


@contextmanager
def _told_where_it_stands() -> Iterator[None]:
    """A run says itself that it was interrupted, and what becomes of it."""
    try:
        yield
    except KeyboardInterrupt:
        raise Told(EXIT_INTERRUPTED) from None


@contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """A polite request to end is one to clean up: engines, the scratch worktree and git's record of it."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    # SIGHUP: the terminal was closed; one that is ignored, as by nohup, stays so
    numbers = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
