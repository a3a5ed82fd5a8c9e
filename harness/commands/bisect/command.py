"""`eagletwin bisect CASE`: which release, which commit of a checkout, or which feature of the case a divergence depends on."""

import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec.structs import replace

from eagletwin.cases.ledger import case_of, find_entry
from eagletwin.cases.reach import unreached_text, why_unreachable
from eagletwin.harness.core.errors import EXIT_EQUAL, EXIT_INTERRUPTED, EXIT_UNKNOWN, AlreadyReported
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.core.terminal import progress, show, width
from eagletwin.harness.core.verdict import DECLARED_VIEW
from eagletwin.harness.judge.rules import find_rule

from ..options import (
    CHANGES,
    JUDGING,
    KERNELS,
    LIMITS,
    OUT,
    SOURCE,
    WHICH,
    flag,
    log_progress,
    nothing_run,
    option,
    run_options,
)
from ..result import BisectFacts, emit_result, with_json

if TYPE_CHECKING:
    from eagletwin.cases.entry import Entry

    from .commits import Look
    from .report import VersionsOutcome
    from .state import BisectionFolder, BisectionPlan, Looked, Subject

Command = Callable[..., str]

_SEARCH = "Search: over releases, unless --git or --features"

CaseName = Annotated[str, typer.Argument(help="A case file (JSON), or the id of a ledger entry such as 25015.")]
OPTIONS = (
    option(_SEARCH, "since", str, "", "RELEASE", "--from", show_default=False)("The oldest release to try."),
    option(_SEARCH, "until", str, "", "RELEASE", "--to", show_default=False)("The newest release to try."),
    option(_SEARCH, "git", tuple[str, str, str] | None, None, "PATH GOOD BAD")(
        "Search the commits of this checkout between two, by `git bisect` on a scratch worktree."
    ),
    flag(_SEARCH, "features")("Search for the smallest set of features of the case that the fault needs."),
    option(_SEARCH, "rule", str, "", "RULE", show_default=False)(
        "The rule that counts as the fault, wherever in the case it breaks: draft.slots, engine.crash, …"
    ),
    OUT,
)


@with_json
@run_options(OPTIONS, CHANGES, JUDGING, SOURCE, WHICH, KERNELS, LIMITS)
def bisect(
    case: CaseName,
    *,
    since: str,
    until: str,
    git: tuple[str, str, str] | None,
    features: bool,
    rule: str,
    out: Path,
    spec: RunSpec,
) -> int:
    """Name the release, commit or feature that a divergence depends on. 0: named; 125: cannot tell."""
    _check_options(since or until, git, features, spec)
    if rule and find_rule(rule) in spec.without:
        raise nothing_run(
            f"--rule {rule} and --without {rule} contradict each other: what is switched off is never found",
            "leave one of them out",
        )
    entry = find_entry(case)
    if entry is not None and why_unreachable(entry, spec.mode):
        print(unreached_text(entry, spec.mode))
        return EXIT_UNKNOWN
    if entry is not None and entry.view is not None and spec.view == DECLARED_VIEW:
        spec = replace(spec, view=entry.view)  # what is declared is looked for where it is a divergence
    chosen = case_of(case)
    log_progress(f"bisecting {chosen.name} over {'its features' if features else 'commits' if git is not None else 'releases'}")
    from .state import Subject

    subject = Subject(case=chosen, run=replace(spec, release=""))

    def command(target: str, name: str = case) -> str:
        """What to type to see a case on one release or tree."""
        return replace(spec, release=target).command("check", name)

    if features:
        return _features(subject, rule, out, command, (spec.release, _hint(entry, subject)))
    expected = entry.rule if entry is not None else ""
    if git is not None:
        return _commits(subject, rule, expected, git, out, command)
    return _releases(subject, rule, expected, since, until, out, command)


def _hint(entry: "Entry | None", subject: "Subject") -> str:
    """What brings back a bug that the release no longer has."""
    if entry is None or entry.revert is None or entry.revert in subject.run.patches:
        return ""
    return f"--revert {entry.id} undoes the fix of {entry.id}, where the code has it."


def _check_options(ranged: str, git: object, features: bool, spec: RunSpec) -> None:
    """Options that contradict each other."""
    chosen = [name for name, given in (("--git", git), ("--features", features), ("--from and --to", ranged)) if given]
    if len(chosen) > 1:
        raise nothing_run(f"{chosen[0]} and {chosen[1]}: a bisection goes over one thing", "give one of them; then the other")
    if spec.release and not features:
        named = f"--{spec.mode.engine}"
        raise nothing_run(
            f"{named} names one {spec.mode.title}, and a bisection over releases or commits goes over many",
            f"give --from and --to, or --git; {named} goes with --features",
        )


def _releases(subject: "Subject", rule: str, expected: str, since: str, until: str, out: Path, command: Command) -> int:
    from eagletwin.harness.engines.provision import releases

    from .report import bisect_releases
    from .state import BisectionPlan

    known = _range(releases(subject.run.mode.engine), since, until)
    plan = BisectionPlan(subject=subject, versions=known, rule=rule, expected=expected)

    def search(run: "BisectionFolder", look: "Look") -> "VersionsOutcome":
        return bisect_releases(run, lambda version: look(version, Path(version)))

    return _bisect_versions(plan, out, search, lambda version, folder: command(version))


def _commits(subject: "Subject", rule: str, expected: str, git: tuple[str, str, str], out: Path, command: Command) -> int:
    from .commits import bisect_commits, ends_of
    from .state import BisectionPlan

    repository = Path(git[0]).absolute()
    ends = ends_of(repository, *git[1:])
    plan = BisectionPlan(subject=subject, versions=ends, checkout=str(repository), rule=rule, expected=expected)

    def show_command(commit: str, folder: Path) -> str:
        """What to type to see one commit: in a worktree of its own, which is made once."""
        tree = str((folder / f"tree-{commit[:12]}").absolute())
        made = shlex.join(["git", "-C", str(repository), "worktree", "add", "--detach", tree, commit[:12]])
        return f"{{ [ -e {shlex.quote(tree)} ] || {made}; }} && {command(tree)}"

    return _bisect_versions(plan, out, bisect_commits, show_command)


def _bisect_versions(
    plan: "BisectionPlan", out: Path, search: "Callable[[BisectionFolder, Look], VersionsOutcome]", command: Command
) -> int:
    """command: what to type to see one version, by its name and the run folder."""
    from .measure import look_at_version
    from .report import version_report
    from .state import open_run

    try:
        with open_run(out, plan) as run:
            run.tell(f"folder: {run.folder}")
            if run.resumed:
                run.tell(f"continuing an unfinished bisection of the same case: {run.resumed} are known")
            with progress("commits" if plan.checkout else "releases") as line:

                def look(version: str, tree: Path) -> "Looked":
                    line.look(version[:12])
                    again = "" if plan.checkout else command(version, run.folder)
                    found = look_at_version(version, str(tree), plan.subject, run.folder, again)
                    line.done()
                    return found

                outcome = search(run, look)
            run.save()
            shown = partial(command, folder=run.folder)
            return _end(run.folder, partial(version_report, outcome, plan.subject.case, run, shown), outcome.answered)
    except KeyboardInterrupt:  # the run says itself that it was interrupted, and what becomes of it
        raise AlreadyReported(EXIT_INTERRUPTED) from None


def _features(subject: "Subject", rule: str, out: Path, command: Command, where: tuple[str, str]) -> int:
    """where: the release or tree, and what to type if the case diverges nowhere, which may be empty."""
    named, hint = where
    from eagletwin.harness.core.files import new_run_folder
    from eagletwin.harness.engines.host import Host
    from eagletwin.harness.engines.source import resolve

    from .measure import SMALLEST, features_of, reduce_case
    from .report import feature_report
    from .state import LOOKS, log_line

    mode = subject.run.mode
    source = resolve(named, mode.engine)
    folder = new_run_folder(out, f"features-{subject.case.name}")
    had = ", ".join(feature.words for feature in features_of(subject.case)) or "none"
    log_line(folder, f"folder: {folder}")
    log_line(folder, f"features of {subject.case.name}: {had}")
    log_line(folder, f"importing {mode.title} {source.called}; first the case as it is, {LOOKS} times")
    try:
        with progress("looks") as line, Host(source=source, mode=mode) as host:

            def log(text: str) -> None:
                log_line(folder, text)
                line.done(text)

            reduction = reduce_case(host, subject, rule, folder, log)
    except KeyboardInterrupt:
        log_line(folder, "not finished: the same command begins the search for features again")
        raise AlreadyReported(EXIT_INTERRUPTED) from None
    again = command(named, str(folder / SMALLEST))
    return _end(folder, partial(feature_report, reduction, subject.case, folder, again, hint), reduction.reduced.answered)


def _end(folder: Path, report: Callable[..., str], answered: bool) -> int:
    """Write the report and the page into the run folder, and print the report in lines of the terminal's width."""
    from eagletwin.harness.page.render import write_page

    from .report import REPORT, bisection_page

    text = report()
    (folder / REPORT).write_text(f"{text}\n", encoding="utf-8")
    write_page(folder, lambda: bisection_page(folder))
    show(report(columns=width()))
    emit_result(BisectFacts(answer=text.partition("  ")[0].strip(), report=text, folder=str(folder)))
    return EXIT_EQUAL if answered else EXIT_UNKNOWN


def _range(known: tuple[str, ...], since: str, until: str) -> tuple[str, ...]:
    """The known releases from one to another."""
    for name in filter(None, (since, until)):
        if name not in known:
            raise nothing_run(f"no release {name} is known", f"use one of {', '.join(known)}")
    chosen = known[known.index(since or known[0]) : known.index(until or known[-1]) + 1]
    if len(chosen) < 2:
        raise nothing_run(
            f"from {since or known[0]} to {until or known[-1]} there are fewer than two releases",
            "give the older one to --from and the newer one to --to",
        )
    return chosen
