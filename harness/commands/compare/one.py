"""One tree: which fixes of the ledger it holds, which it lacks, which live bugs it has, and what searches of it find."""

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from msgspec.structs import replace as replace_fields

from eagletwin.cases.entry import Entry
from eagletwin.cases.ledger import entries_in
from eagletwin.harness.check.known import may_have
from eagletwin.harness.check.trials import Trials
from eagletwin.harness.core.errors import (
    EXIT_DIVERGED,
    EXIT_EQUAL,
    EXIT_HARNESS,
    EXIT_INTERRUPTED,
    EXIT_UNKNOWN,
    AlreadyReported,
    EagletwinError,
    HarnessError,
)
from eagletwin.harness.core.files import installed_version, new_run_folder
from eagletwin.harness.core.run_spec import DEFAULT_ENGINE, TITLES, Engine, RunSpec, unusual
from eagletwin.harness.core.signature import signature_of
from eagletwin.harness.core.terminal import show, width
from eagletwin.harness.core.verdict import View
from eagletwin.harness.engines.host import Host, WouldNotStart
from eagletwin.harness.engines.provision import releases
from eagletwin.harness.engines.source import Source
from eagletwin.harness.judge.completeness import shows_instead
from eagletwin.harness.page.render import markdown_of, text_of

from ..bisect.commits import commit_of, git, worktree
from ..fuzz.command import search
from ..fuzz.options import SearchOptions
from ..fuzz.tally import SUMMARY, FindingFacts, read_summary
from ..matrix import Matrix, Question
from ..options import log_progress, nothing_run
from ..result import JobFacts, emit_result
from .groups import SideResult
from .one_report import (
    UNCONFIRMED,
    FamilySearch,
    OneJob,
    Stand,
    Standing,
    annotations_of,
    document_of,
    facts_of,
    keep_job,
)
from .two import said_by, said_by_verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """What one release or tree is compared with.

    entries, families  of the ledger; model recipes, each of which is searched: "" is one search of everything
    search   the options of each search; base: of the tree, as it was typed; words: what was typed besides
    summary, history  files to which Markdown and a line of JSON are appended; markdown: printed in place of the report
    """

    entries: Sequence[Entry]
    families: Sequence[str]
    search: SearchOptions
    base: str
    words: Sequence[str]
    summary: Path | None
    history: Path | None
    markdown: bool

    def report(self) -> int:
        """Ask the engine, search it, and say what came of it, also where it is ended early; the exit code."""
        must_take_more("--history", self.history)
        with base_of(self.base, self.search.run.release, self.search.run.mode.engine) as base:
            return self._report(replace(self.search, base=base))

    def _report(self, search: SearchOptions) -> int:
        begun, spec, source = time.monotonic(), search.run, search.source
        job = self._job(source, str(new_run_folder(search.out, "compare")), spec)
        try:
            self._ask(source, job, spec)
            if not job.failed:
                self._search(job, search)
        except (KeyboardInterrupt, AlreadyReported):  # the latter is a search that was ended
            job.interrupted = True
            raise AlreadyReported(EXIT_INTERRUPTED) from None
        except BaseException as error:
            job.failed = " ".join((error.cause if isinstance(error, EagletwinError) else repr(error)).split())
            raise
        finally:
            job.seconds = time.monotonic() - begun
            code = self._keep(job)
        return code

    def _job(self, source: Source, folder: str, spec: RunSpec) -> OneJob:
        def command(name: str, base: str) -> str:
            words = [name] * bool(name) + [*self.words, *unusual((("--base", base, ""),))]
            return replace_fields(spec, release="").command("compare", *words)

        base, folders = self.base, bool(self.base) and Path(self.base).is_dir()
        return OneJob(
            named=spec.release,
            version=source.called,
            base=source.base.called if source.base is not None else "",
            folder=folder,
            command=command(spec.release, base),
            run=replace_fields(spec, release="TREE") if source.tree else spec,
            again=command("TREE" if source.tree else spec.release, "BASE" if folders else base),
        )

    def _ask(self, source: Source, job: OneJob, spec: RunSpec) -> None:
        """The entries, on one process that imports the engine once."""
        log_progress(f"importing {spec.mode.title} {source.called}; then the ledger's entries, {len(self.entries)} in number")
        with Host(source=source, mode=spec.mode) as host:
            try:
                host.connection()
            except WouldNotStart as error:
                log_progress(error.kept_in(Path(job.folder)))
                job.failed = " ".join(error.cause.split())
                return
            trials: dict[View, Trials] = {}
            for entry in self.entries:
                run = replace_fields(spec, view=entry.red.view)
                job.standings.append(_standing_of(trials.setdefault(run.view, Trials(host, run)), entry, job))

    def _search(self, job: OneJob, options: SearchOptions) -> None:
        for name in self.families:
            place = Path(job.folder) / f"search-{name or 'default'}"
            minutes = options.minutes / len(self.families)
            own = replace(options, only=(name,) if name else (), minutes=minutes, out=place)
            try:
                job.searches.append(search_family(own))
            except (KeyboardInterrupt, AlreadyReported):
                job.searches.append(search_so_far(own))
                raise

    def _keep(self, job: OneJob) -> int:
        document, facts = document_of(job, Path(job.folder)), facts_of(job)
        text = markdown_of(document)
        print(text) if self.markdown else show(text_of(document, width()))
        if os.environ.get("GITHUB_ACTIONS") == "true":
            print("\n".join(annotations_of(job)))
        emit_result(JobFacts(folder=job.folder, job=facts))
        when, summary = datetime.now(timezone.utc).isoformat(timespec="seconds"), Path(job.folder) / "summary.md"
        kept = [
            _try_write(summary, lambda: summary.write_text(f"{text}\n", encoding="utf-8")),
            _try_write(Path(job.folder), lambda: keep_job(job)),
            _try_write(self.summary, lambda: append(self.summary, text)),
            _try_write(self.history, lambda: append(self.history, json.dumps({"date": when, **facts}))),
        ]
        return job.exit_code if all(kept) or job.exit_code == EXIT_DIVERGED else EXIT_HARNESS


@contextmanager
def base_of(base: str, tree: str, engine: Engine = DEFAULT_ENGINE) -> Iterator[str]:
    """The base as a run names it: a release, a folder, or a revision of the same checkout, which lies in a worktree of its
    own until the block is left. Raises InputError."""
    if base in ("", installed_version(engine), *releases(engine)) or Path(base).is_dir():
        yield base
        return
    if not Path(tree).is_dir():
        raise nothing_run(
            f"--base {base} is neither a release nor a folder, and no checkout was named that has it",
            "name a release or a folder, or compare a checkout and give --base a revision of it",
        )
    checkout = Path(tree).resolve()
    repository = Path(git(checkout, "rev-parse", "--show-toplevel"))
    with worktree(repository, commit_of(repository, base)) as found:
        yield str(found / checkout.relative_to(repository))


def _standing_of(trials: Trials, entry: Entry, job: OneJob) -> Standing:
    """One entry, alone in a process. What should hold and does not is confirmed, in a run folder of its own."""
    run, host = trials.run, trials.host
    again = run.command("check", entry.id)
    try:
        trial = trials.look_alone(entry.case)
    except WouldNotStart as error:
        return _standing(entry, "unknown", " ".join(error.cause.split()), again)
    job.entries.add(trial.differs)
    found = decide(entry, said_by(trial), host.source.called, again)
    if found is not None:
        return found
    name = f"lacks-{entry.id}"
    question = Question(what=entry.case, name=name, out=Path(job.folder), run=run, again=again, script=run)
    answer = Matrix().ask(host, question)
    if (outcome := answer.run) is None:
        return _standing(entry, "unknown", answer.verdict.reason, again)
    said = said_by_verdict(outcome.verdict, signature_of(outcome.verdict, outcome.trace.header.ending))
    line = said.line or "nondeterministic: it was wrong once, and right alone"
    return _standing(entry, stand_of(entry, said), line, again, str(answer.folder))


def _standing(entry: Entry, stand: Stand, line: str, again: str, folder: str = "") -> Standing:
    return Standing(entry.id, entry.title, stand, line, again, folder, entry.red.view)


def stand_of(entry: Entry, said: SideResult) -> Stand:
    """Of a bug that was fixed, and whose case was confirmed. By another rule it may be any bug that the case meets first."""
    if said.status != "broken":
        return "unknown"
    own = said.rule == entry.rule or shows_instead(said.rule, entry.rule)
    return "lacks" if own else "wrong"


def decide(entry: Entry, said: SideResult, version: str, again: str) -> Standing | None:
    """What one look says of an entry; None: what should hold does not, which is to be confirmed.

    What breaks otherwise than a known bug does may be another bug, which nobody knows. An old release has bugs that were fixed
    later: in the case of another entry one of them may come first.
    """
    known = may_have(version, entry)
    if said.status != "broken":
        stand: Stand = "unknown" if said.status == "unknown" else "gone" if known else "holds"
        return _standing(entry, stand, said.line, again)
    fixed_later = said.rule in {
        other.rule for other in entries_in(entry.engine).values() if other.fixed and may_have(version, other)
    }
    if known and (fixed_later or said.rule == entry.rule):
        return _standing(entry, "live", said.line, again)
    if known:
        return _standing(entry, "unknown", f"its bug breaks {entry.rule}, and here another is the first: {said.line}", again)
    return _standing(entry, "unknown", f"it may be a bug that was fixed later: {said.line}", again) if fixed_later else None


def search_family(options: SearchOptions) -> FamilySearch:
    """Search one family, or everything."""
    family = "".join(options.only)
    try:
        code = search(options)
    except EagletwinError as error:  # it ends this search, and no other
        return FamilySearch(family, " ".join(error.cause.split()), EXIT_UNKNOWN)
    file = options.out / f"fuzz-{options.seed}" / SUMMARY
    if not file.is_file():  # it did not start
        return FamilySearch(
            family, f"{TITLES[options.run.mode.engine]} would not start", code if code != EXIT_EQUAL else EXIT_UNKNOWN
        )
    return _read(family, code, file)


def search_so_far(options: SearchOptions) -> FamilySearch:
    """What a search that was ended had looked at and found until then."""
    file, family = options.out / f"fuzz-{options.seed}" / SUMMARY, "".join(options.only)
    if not file.is_file():
        return FamilySearch(family, "interrupted before its first case", EXIT_UNKNOWN)
    seen = _read(family, EXIT_UNKNOWN, file)
    if any(found.status == "diverged" and not found.known for found in seen.findings):
        seen.exit_code = EXIT_DIVERGED
    return seen


def _read(family: str, code: int, file: Path) -> FamilySearch:
    summary = read_summary(file.parent)
    findings = list(summary.findings)
    for one in summary.unconfirmed:
        looks: dict[str, Any] = {"cases": one.cases, "seconds": 0.0, "shrink_looks": one.shrink_looks, "shrink_seconds": 0.0}
        findings.append(FindingFacts(signature=one.signature, status=UNCONFIRMED, folder=one.folder, **looks))
    past, left_out = tuple(one.id for one in summary.known if one.cases), tuple(summary.not_looked_at)
    folder, tally = str(file.parent), summary.tally
    return FamilySearch(family, summary.headline, code, tally.cases, findings, past, folder, tally.changes, left_out)


def must_take_more(option: str, file: Path | None) -> None:
    """Raises InputError now for a file that cannot be appended to when all is over."""
    try:
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.open("a", encoding="utf-8").close()
    except OSError as error:
        raise nothing_run(
            f"{option} {file} cannot be written: {error.strerror}", "name a file in a folder that you may write to"
        ) from error


def _try_write(place: Path | None, keep: Callable[[], object]) -> bool:
    """Whether something could be written. What cannot is said: the result stands without it."""
    try:
        keep()
    except OSError as error:
        why = HarnessError(
            f"{place} cannot be written: {error.strerror}",
            consequence="the result above stands, and this file lacks it",
            remedy="make room, or name another place",
        )
        log_progress(f"error: {why}")
        return False
    return True


def append(file: Path | None, text: str) -> None:
    if file is not None:
        with file.open("a", encoding="utf-8") as end:
            end.write(f"{text}\n")
