"""`eagletwin ci`: the ledger and searches on one SGLang, as a job of a CI wants them."""

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace as changed

from eagletwin.cases.reach import unreached, unreached_text
from eagletwin.harness.core.errors import (
    EXIT_DIVERGED,
    EXIT_HARNESS,
    EXIT_INTERRUPTED,
    EXIT_UNKNOWN,
    AlreadyReported,
    EagletwinError,
    HarnessError,
    InputError,
)
from eagletwin.harness.core.run_spec import RunSpec, exact, unusual
from eagletwin.harness.core.terminal import nearest, show

from ..as_json import tell_result, with_json
from ..options import DEFAULT_RUNS, Runs, tell
from ..result import JobFacts
from ..run_options import HOW, LIMITS, SOURCE, STRICT, run_options
from .typed import MINUTES, BaseOption, Families, History, Ledger, Minutes, Seed, Summary

if TYPE_CHECKING:
    from eagletwin.cases.entry import Entry
    from eagletwin.harness.engines.source import Source

    from .searching import FamilySearch
    from .standing import Standing


@with_json
@run_options(STRICT, SOURCE, HOW, LIMITS)
def ci(
    minutes: Minutes = MINUTES,
    family: Families = None,
    ledger: Ledger = None,
    seed: Seed = 0,
    summary: Summary = None,
    history: History = None,
    base: BaseOption = "",
    out: Runs = DEFAULT_RUNS,
    *,
    spec: RunSpec,
) -> int:
    """Ask one SGLang for every fix of the ledger, then search it: a job of a CI.

    The search is that of `eagletwin fuzz`: what a known bug explains is counted, and mended. Exit codes: 1 a fixed bug shows,
    or a search found a wrong number that no known bug explains; 125 it cannot be told; 0 otherwise.
    """
    from eagletwin.harness.families import RECIPES

    from ..compare.questions import entries_named

    for option, file in (("--summary", summary), ("--history", history)):
        _must_take_more(option, file)
    families = list(dict.fromkeys(family or [""])) if minutes else []
    unknown = [name for name in families if name and name not in RECIPES]
    if unknown:
        raise InputError(
            f"--family {unknown[0]}: there is no such recipe",
            consequence="nothing was run",
            remedy=nearest(unknown[0], RECIPES, "`eagletwin info models`"),
        )
    entries = entries_named(ledger or ["all"])
    beyond = [entry for entry in entries if unreached(entry, spec.mode)]
    if beyond and "all" not in (ledger or ["all"]):
        print("\n".join(unreached_text(entry, spec.mode) for entry in beyond))
        return EXIT_UNKNOWN
    if not entries and not families:
        raise InputError("--ledger none and --minutes 0", consequence="nothing was run", remedy="give either")
    own = unusual((("--minutes", exact(minutes), exact(MINUTES)), ("--seed", seed, 0)))
    own += [word for name in family or () for word in ("--family", name)]
    own += [word for name in ledger or () for word in ("--ledger", name)]
    from .base import base_of_job

    with base_of_job(base, spec.sglang) as there:
        return _Job(entries, families, minutes, seed, spec, (base, there), own, out, summary, history).run()


@dataclass(slots=True)
class _Job:
    """One job, and what it has found so far: that is reported also of a job that is ended early. base: as it was typed, and as
    `--sglang` takes it."""

    entries: "Sequence[Entry]"
    families: Sequence[str]
    minutes: float
    seed: int
    spec: RunSpec
    base: tuple[str, str]
    words: Sequence[str]
    out: Path
    summary: Path | None
    history: Path | None
    standings: "list[Standing]" = field(default_factory=list)
    searches: "list[FamilySearch]" = field(default_factory=list)
    failed: str = ""

    def run(self) -> int:
        from eagletwin.harness.core.files import new_run_folder
        from eagletwin.harness.engines.source import as_change, resolve

        begun = time.monotonic()
        source = as_change(resolve(self.spec.sglang), self.base[1])
        folder = new_run_folder(self.out, "ci")
        interrupted = False
        try:
            self._ask(source, folder)
            if not self.failed:
                self._search(folder)
        except (KeyboardInterrupt, AlreadyReported):  # the latter is a search that was ended
            interrupted = True
            raise AlreadyReported(EXIT_INTERRUPTED) from None
        except BaseException as error:
            self.failed = " ".join((error.cause if isinstance(error, EagletwinError) else repr(error)).split())
            raise
        finally:
            code = self._report(source, folder, time.monotonic() - begun, interrupted=interrupted)
        return code

    def _ask(self, source: "Source", folder: Path) -> None:
        """The entries, on one process that imports SGLang once."""
        from eagletwin.harness.engines.host import Host, WouldNotStart

        from ..compare.questions import asked_of_ledger
        from .standing import OneSide

        questions = asked_of_ledger(self.entries, self.spec.mode)
        tell(f"importing SGLang {source.called}; then the ledger's entries, {len(questions)} in number")
        with Host(source=source, mode=self.spec.mode) as host:
            try:
                host.connection()
            except WouldNotStart as error:
                tell(error.kept_in(folder))
                self.failed = " ".join(error.cause.split())
                return
            side = OneSide(host, self.spec, folder)
            for question in questions:
                self.standings.append(side.ask(question))

    def _search(self, folder: Path) -> None:
        from .searching import search_family, search_so_far

        for name in self.families:
            share = self.minutes / len(self.families)
            place = folder / f"search-{name or 'default'}"
            try:
                self.searches.append(search_family(name, share, self.seed, self.spec, place, self.base[1]))
            except (KeyboardInterrupt, AlreadyReported):
                self.searches.append(search_so_far(name, self.seed, place))
                raise

    def _report(self, source: "Source", folder: Path, seconds: float, *, interrupted: bool) -> int:
        from .page import keep_job
        from .result import OneJob, annotations_of, facts_of, markdown_of, text_of

        run = changed(self.spec, sglang="TREE") if source.tree else self.spec
        base = self.base[0]
        job = OneJob(
            sglang=self.spec.sglang,
            version=source.called,
            base=source.base.called if source.base is not None else "",
            standings=self.standings,
            searches=self.searches,
            folder=folder,
            command=self.spec.command("ci", *self.words, *unusual((("--base", base, ""),))),
            run=run,
            again=run.command("ci", *self.words, *unusual((("--base", "BASE" if base and Path(base).is_dir() else base, ""),))),
            seconds=seconds,
            failed=self.failed,
            interrupted=interrupted,
        )
        show(text_of(job))
        if os.environ.get("GITHUB_ACTIONS") == "true":
            print("\n".join(annotations_of(job)))
        tell_result(JobFacts(folder=str(folder), job=facts_of(job)))
        when = datetime.now(timezone.utc).isoformat(timespec="seconds")
        kept = [
            _kept(folder / "summary.md", lambda: (folder / "summary.md").write_text(markdown_of(job), encoding="utf-8")),
            _kept(folder, lambda: keep_job(job)),
            _kept(self.summary, lambda: _append(self.summary, markdown_of(job))),
            _kept(self.history, lambda: _append(self.history, json.dumps({"date": when, **facts_of(job)}))),
        ]
        return job.exit_code if all(kept) or job.exit_code == EXIT_DIVERGED else EXIT_HARNESS


def _must_take_more(option: str, file: Path | None) -> None:
    """Raises InputError now for a file that cannot be appended to when the job is over."""
    try:
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.open("a", encoding="utf-8").close()
    except OSError as error:
        raise InputError(
            f"{option} {file} cannot be written: {error.strerror}",
            consequence="nothing was run",
            remedy="name a file in a folder that you may write to",
        ) from error


def _kept(place: Path | None, keep: Callable[[], object]) -> bool:
    """Whether something could be written. What cannot is said: the result stands without it."""
    try:
        keep()
    except OSError as error:
        why = HarnessError(
            f"{place} cannot be written: {error.strerror}",
            consequence="the result above stands, and this file lacks it",
            remedy="make room, or name another place",
        )
        tell(f"error: {why}")
        return False
    return True


def _append(file: Path | None, text: str) -> None:
    if file is not None:
        with file.open("a", encoding="utf-8") as end:
            end.write(f"{text}\n")
