"""The report of a comparison of one release or tree with the ledger: exit code, document, annotations, a line of a history."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace as replace_fields

from eagletwin import __version__
from eagletwin.harness.check.argument import error
from eagletwin.harness.core.case import Case, pretty_case
from eagletwin.harness.core.differs import Changes, join_names, unknown_changes
from eagletwin.harness.core.errors import EXIT_DIVERGED, EXIT_EQUAL, EXIT_UNKNOWN
from eagletwin.harness.core.run_spec import DEFAULT_RUN, RunSpec
from eagletwin.harness.core.terminal import count
from eagletwin.harness.core.verdict import DECLARED_VIEW, View
from eagletwin.harness.page.document import Document, DocumentSection, Item, TableCell, row, table
from eagletwin.harness.page.render import write_page

from ..fuzz.tally import FindingFacts
from ..page_facts import KINDS, left_out, page_beside, read_facts

JOB = "ci.json"
UNCONFIRMED = "unconfirmed"  # the search was ended while it made the case smaller
# holds: a fixed bug does not show; lacks: it does; wrong: its case is wrong by another rule than the bug breaks; live: a bug
# that no release has fixed shows by its own rule, or a fixed one in a release that is known to have it; gone: such a bug does
# not show.
Stand = Literal["holds", "lacks", "wrong", "live", "gone", "unknown"]
WORSE: tuple[Stand, ...] = ("lacks", "wrong")
MEANING: dict[Stand, str] = {
    "lacks": "a fixed bug shows",
    "wrong": "a fixed bug's case is wrong by another rule than the bug's, so it may be any other",
    "unknown": "cannot tell",
    "holds": "fixed, and it does not show",
    "live": "known to be there, and it shows",
    "gone": "known to be there, and it does not show",
}
_TITLES: dict[Stand, str] = {"lacks": "{} shows", "wrong": "the case of {} is wrong"}
_HEADLINE = {EXIT_EQUAL: "nothing found", EXIT_DIVERGED: "wrong numbers", EXIT_UNKNOWN: "cannot tell"}
_KINDS: dict[str, str] = {"lacks": "wrong", "wrong": "wrong", "unknown": "doubt", "holds": "right", "live": "wrong", "gone": ""}
_FIRST: tuple[Stand, ...] = (*WORSE, "unknown", "gone")  # what a person is told of first


class Standing(Struct, frozen=True):
    """An entry of the ledger on this release or tree. folder: the run folder, of what is wrong."""

    id: str
    title: str
    stand: Stand
    line: str = ""
    again: str = ""
    folder: str = ""
    view: View = DECLARED_VIEW

    @property
    def counts(self) -> bool:
        """Whether the result rests on it: what is known to be broken decides nothing."""
        return self.stand in (*WORSE, "unknown")


class FamilySearch(Struct):
    """What came of one search.

    said       its headline, or why it did not run; findings: also what was still being made smaller, UNCONFIRMED
    exit_code  as fuzz has it; but a finding whose smallest case may be a known bug is no news
    past       known bugs that explain what its cases showed; left_out: what it did not look at
    folder     its run folder, if it ran
    changes    what was changed in the tree, and how many cases ran it
    """

    family: str
    said: str
    exit_code: int
    cases: int = 0
    findings: list[FindingFacts] = []
    past: tuple[str, ...] = ()
    folder: str = ""
    changes: Changes = field(default_factory=Changes)
    left_out: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        news = any(found.status == "diverged" and not found.known for found in self.findings)
        if self.exit_code == EXIT_DIVERGED and not news:
            self.exit_code = EXIT_UNKNOWN

    @property
    def called(self) -> str:
        return self.family or "everything"


class OneJob(Struct, kw_only=True):
    """A comparison of one release or tree, filled while it goes on.

    base    what it is a change of, as traces call it; "": none was named
    run     how it was run, and again: the command, both without a path of this machine
    failed  why nothing ran
    entries what was changed in it, and how many entries ran it
    """

    named: str
    version: str
    folder: str
    command: str
    base: str = ""
    run: RunSpec = DEFAULT_RUN
    again: str = ""
    standings: list[Standing] = []
    searches: list[FamilySearch] = []
    entries: Changes = field(default_factory=Changes)
    seconds: float = 0.0
    failed: str = ""
    interrupted: bool = False

    @property
    def exit_code(self) -> int:
        """1 if something is wrong; 125 if that cannot be determined, or no changed statement ran."""
        stands, codes = [one.stand for one in self.standings], [one.exit_code for one in self.searches]
        if self.wrong:
            return EXIT_DIVERGED
        if self.failed or self.interrupted or "unknown" in stands or any(codes) or not (stands or codes):
            return EXIT_UNKNOWN
        return EXIT_UNKNOWN if self.changes.doubt or (self.run.strict and self.not_seen) else EXIT_EQUAL

    @property
    def wrong(self) -> bool:
        """Whether the case of a fixed bug is wrong, or a search found a wrong number that no known bug explains."""
        return any(one.stand in WORSE for one in self.standings) or any(one.exit_code == EXIT_DIVERGED for one in self.searches)

    @property
    def changes(self) -> Changes:
        """What was changed in a tree, and how many cases ran it, entries and generated ones."""
        all_of_them = Changes()
        for changes in (self.entries, *(search.changes for search in self.searches)):
            all_of_them.update(changes)
        return all_of_them

    @property
    def change_lines(self) -> list[str]:
        """What to say of these changes, or why nothing can be said of them."""
        lines, doubt = self.changes.lines, self.changes.doubt
        lines += ["No case ran any of that, so this job says nothing about it."] * bool(doubt)
        return lines

    @property
    def not_seen(self) -> str:
        """Which part of the change no case ran, or that the change is not known; "" if all of it ran, or nothing is changed.
        Where something is wrong, it does not matter whether the change is known."""
        if self.changes.differs is not None or self.wrong:
            return self.changes.headline
        if self.base and not self.failed:
            return f"It differs from {self.base} in too many files to say which of its functions ran"
        return unknown_changes(self.version)

    def of(self, stand: Stand) -> list[Standing]:
        return [one for one in self.standings if one.stand == stand]

    @property
    def headline(self) -> str:
        numbers = [f"{len(self.of(stand))} {stand}" for stand in get_args(Stand) if self.of(stand)]
        ledger = f"ledger: {', '.join(numbers)}" if numbers else "no entry of the ledger was asked"
        searched = f"{count(sum(one.cases for one in self.searches), 'case')} searched" if self.searches else "no search"
        ended = "interrupted; " * self.interrupted
        return f"{ended}{ledger}; {searched}"


def annotations_of(job: OneJob) -> Iterator[str]:
    """A line for all that makes the code other than 0."""
    if job.failed:
        yield error(job.failed, "eagletwin cannot tell")
    for one in job.standings:
        if one.counts:
            title = f"eagletwin: {_TITLES.get(one.stand, '{} cannot tell').format(one.id)}"
            what = MEANING["wrong"] if one.stand == "wrong" else one.title
            yield error(f"{what}\n{one.line}\nagain: {one.again}", title)
    if job.changes.doubt:
        yield error(" ".join(job.change_lines), "eagletwin: nothing ran of what was changed")
    for search in job.searches:
        if search.exit_code != EXIT_EQUAL:
            found = "".join(f"\n{each.title}" for each in search.findings)
            yield error(f"{search.said}{found}", f"eagletwin: search of {search.called}")


def facts_of(job: OneJob) -> dict[str, Any]:
    """A line of the history."""
    searches = []
    for one in job.searches:
        findings = [
            {"line": f"{each.status}: {each.signature}", "status": each.status, "known": each.known} for each in one.findings
        ]
        facts = {"family": one.family, "exit_code": one.exit_code, "cases": one.cases, "past": list(one.past)}
        searches.append(facts | {"findings": findings})
    return {
        "schema": 1,
        "eagletwin": __version__,
        job.run.mode.engine: job.named,
        "version": job.version,
        "base": job.base,
        "exit_code": job.exit_code,
        "seconds": round(job.seconds, 1),
        "failed": job.failed,
        "interrupted": job.interrupted,
        "not_seen": job.not_seen,
        "changes": job.change_lines,
        "ledger": {stand: [one.id for one in job.of(stand)] for stand in get_args(Stand)},
        "searches": searches,
    }


class _Kept(Struct):
    """ci.json, as far as a page shows it: beside a line of the history."""

    job: OneJob


def keep_job(job: OneJob) -> None:
    """Write ci.json and the page into the run folder."""
    folder = Path(job.folder)
    (folder / JOB).write_bytes(msgspec.json.format(msgspec.json.encode(facts_of(job) | {"job": job})) + b"\n")
    write_page(folder, lambda: document_of(job, folder))


def job_page(folder: Path) -> Document:
    """The document of the run folder of a comparison with the ledger. Raises InputError for a record that cannot be read."""
    return document_of(read_facts(folder / JOB, _Kept, "the run folder of `eagletwin compare`").job, folder)


def document_of(job: OneJob, folder: Path) -> Document:
    """The report: what is wrong comes first. folder: where its run folder is now."""
    known = {*(one.id for one in job.of("live")), *(name for one in job.searches for name in one.past)}
    facts = [
        (job.run.mode.title, job.version),
        ("time", f"{job.seconds:.1f} s"),
        *([("a change of", job.base)] if job.base else []),
    ]
    wrong = [found.title for one in job.searches for found in one.findings]
    wrong += [f"{one.id}: {MEANING[one.stand]}" for one in job.standings if one.stand in WORSE]
    lines = [job.failed, "It was ended before it was done." * job.interrupted, *job.change_lines]
    lines += [f"{count(len(known), 'known live bug')} of {job.run.mode.title} showed; the page names them." if known else ""]
    return Document(
        title=f"{job.run.mode.title} {job.version}{f' as a change of {job.base}' if job.base else ''}",
        status=_HEADLINE[job.exit_code],
        kind=KINDS.get(job.exit_code, "doubt"),
        headline=f"{'; '.join([*wrong[:1], job.headline])}.",
        lines=tuple(filter(None, lines)),
        facts=tuple(facts),
        reason=job.not_seen,
        sections=(
            DocumentSection(heading="Found by the searches", items=tuple(_findings(folder, job)), found=True),
            *(DocumentSection(heading=stand.capitalize(), items=tuple(_standings(folder, job, stand))) for stand in _FIRST),
            _searches(folder, job),
            _ledger(folder, job),
            *(section for search in job.searches for section in left_out(search.left_out, search.called)),
        ),
        again=(job.command,),
        portable=job.again,
        files=tuple(name for name in (JOB, "summary.md") if (folder / name).is_file()),
        folder=job.folder,
    )


def _findings(folder: Path, job: OneJob) -> Iterator[Item]:
    """Rule and place of each finding, and the smallest case."""
    for search in job.searches:
        for found in search.findings:
            lines = [f"Search of {search.called}."] if search.family else []
            lines += [f"{found.place}."] if found.place else []
            lines += [f"Changed functions that it runs: {join_names(found.ran)}."] if found.ran else []
            if found.status == UNCONFIRMED:
                lines.append("The search was ended while it made the case smaller.")
            yield Item(
                title=found.title,
                lines=tuple(lines),
                case=pretty_case(msgspec.convert(found.case, Case)) if found.case else "",
                portable=replace_fields(job.run, changes=tuple(found.changes)).command("check", "case.json"),
                folder=found.folder,
                href=page_beside(folder, job.folder, found.folder),
            )


def _standings(folder: Path, job: OneJob, stand: Stand) -> Iterator[Item]:
    for one in job.of(stand):
        yield Item(
            title=one.id,
            lines=(f"{one.title}.", f"{one.line or MEANING[stand]}."),
            again=one.again,
            portable=replace_fields(job.run, view=one.view).command("check", one.id),
            href=page_beside(folder, job.folder, one.folder),
        )


def _ledger(folder: Path, job: OneJob) -> DocumentSection:
    order = get_args(Stand)
    rows = [
        row(
            TableCell(each.id, href=page_beside(folder, job.folder, each.folder)),
            *(each.title, TableCell(each.stand, _KINDS[each.stand]), each.line or MEANING[each.stand], each.again),
            tags=(each.stand,),
        )
        for each in sorted(job.standings, key=lambda each: (not each.counts, order.index(each.stand)))
    ]
    header, filters = ("entry", "bug", "stand", "what", "again"), (("Stand", order),)
    note = "; ".join(f"{stand}: {MEANING[stand]}" for stand in order if job.of(stand))
    entries = table("Entries of the ledger", header, rows, filters=filters, searched=True, detail=True, note=note)
    return DocumentSection(heading="The ledger", tables=(entries,), brief="")


def _searches(folder: Path, job: OneJob) -> DocumentSection:
    rows = []
    for search in job.searches:
        name = TableCell(search.called, href=page_beside(folder, job.folder, search.folder))
        said = TableCell(search.said, KINDS.get(search.exit_code, "doubt"))
        rows.append((name, str(search.cases), said, ", ".join(search.past)))
    searches = table("Searches", ("search", "cases", "result", "known bugs that showed"), rows, detail=True)
    lines = tuple(f"Search of {one.called}: {one.said}." for one in job.searches)
    return DocumentSection(heading="Searches", lines=lines, tables=(searches,))
