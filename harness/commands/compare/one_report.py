"""What a comparison of one SGLang with the ledger says: exit code, text, Markdown, annotations, a line of a history, a page."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace as changed

from eagletwin import __version__
from eagletwin.harness.check.argument import error
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.differs import Changes, shortened, unknown_changes
from eagletwin.harness.core.errors import EXIT_DIVERGED, EXIT_EQUAL, EXIT_UNKNOWN
from eagletwin.harness.core.run_spec import DEFAULT_RUN, RunSpec
from eagletwin.harness.core.terminal import count
from eagletwin.harness.core.verdict import DECLARED_VIEW, View
from eagletwin.harness.page.render import NAME, Page, PageSection, Table, TableCell, write_page

from ..page_facts import page_beside, read_facts, row
from .markdown import case_lines, code, folded, plain

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
_MOST_ROWS = 60


class Standing(Struct, frozen=True):
    """An entry of the ledger on this SGLang. folder: the run folder, of what is wrong."""

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


class FamilyFinding(Struct, frozen=True):
    """A finding of a search.

    line    rule, stage, exception; place: the first wrong number
    status  of its verdict, or UNCONFIRMED; known: the ledger's bug that it may be
    case    the smallest; changes: the options that it runs with; ran: changed functions that it called
    """

    line: str
    status: str
    folder: str
    known: str
    place: str = ""
    case: Case | None = None
    changes: tuple[str, ...] = ()
    ran: tuple[str, ...] = ()


class FamilySearch(Struct):
    """What came of one search.

    said       its headline, or why it did not run
    exit_code  as fuzz has it; but a finding whose smallest case may be a known bug is no news
    past       known bugs that explain what its cases showed; left_out: what it did not look at
    folder     its run folder, if it ran
    changes    what was changed in the SGLang, and how many cases ran it
    """

    family: str
    said: str
    exit_code: int
    cases: int = 0
    findings: tuple[FamilyFinding, ...] = ()
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
    """A comparison of one SGLang, filled while it goes on.

    base    what the SGLang is a change of, as traces call it; "": none was named
    run     how it was run, and again: the command, both without a path of this machine
    failed  why nothing ran
    entries what was changed in the SGLang, and how many entries ran it
    """

    sglang: str
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
        """1 if the case of a fixed bug is wrong or a search found a wrong number that no known bug explains; 125 if that cannot
        be told, or nothing ran of what was changed in a tree."""
        stands, codes = [one.stand for one in self.standings], [one.exit_code for one in self.searches]
        if set(stands) & set(WORSE) or EXIT_DIVERGED in codes:
            return EXIT_DIVERGED
        if self.failed or self.interrupted or "unknown" in stands or any(codes) or not (stands or codes):
            return EXIT_UNKNOWN
        return EXIT_UNKNOWN if self.changes.doubt or (self.run.strict and self.changes.headline) else EXIT_EQUAL

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
        unknown = unknown_changes(self.version)
        if self.base and not self.failed:
            unknown = f"It differs from {self.base} in too many files to say which of its functions ran."
        return lines or ([unknown] if unknown else [])

    def of(self, stand: Stand) -> list[Standing]:
        return [one for one in self.standings if one.stand == stand]

    @property
    def headline(self) -> str:
        numbers = [f"{len(self.of(stand))} {stand}" for stand in get_args(Stand) if self.of(stand)]
        ledger = f"ledger: {', '.join(numbers)}" if numbers else "no entry of the ledger was asked"
        searched = f"{count(sum(one.cases for one in self.searches), 'case')} searched" if self.searches else "no search"
        ended = "interrupted; " * self.interrupted
        return f"{_HEADLINE[self.exit_code]}; {ended}{ledger}; {searched}"


def text_of(job: OneJob) -> str:
    unseen = job.changes.headline
    lines = [f"{job.headline.upper().partition(';')[0]}  SGLang {job.version}", *[f"NOT SEEN  {unseen}"] * bool(unseen)]
    lines += ["", f"  {job.headline.partition('; ')[2]}"]
    lines += [f"  {job.failed}"] if job.failed else []
    for one in _first(job):
        lines.append(f"  {one.stand:8} {one.id}: {one.line or MEANING[one.stand]}")
    for search in job.searches:
        lines.append(f"  search   {search.called}: {search.said}")
        lines += [f"           {found.line}{_known(found.known)}; {found.folder}" for found in search.findings]
    lines += ["", *(f"  {line}" for line in job.change_lines)] if job.change_lines else []
    return "\n".join([*lines, "", f"  again: {job.command}", f"  folder: {job.folder}", f"  page:   {Path(job.folder) / NAME}"])


def _first(job: OneJob) -> list[Standing]:
    """What a person is told of first."""
    return [one for stand in (*WORSE, "unknown", "gone") for one in job.of(stand)]


def _known(bug: str) -> str:
    return f" (it may be {bug})" if bug else ""


def markdown_of(job: OneJob) -> str:
    """For the summary of a job: what is wrong first. All that is not eagletwin's own word is shown as it is."""
    lines = [f"## eagletwin: {_HEADLINE[job.exit_code]}", ""]
    lines += [f"**{plain(job.failed)}**", ""] if job.failed else []
    lines += [f"**Not seen**: {plain(job.changes.headline)}.", ""] if job.changes.headline else []
    for search in job.searches:
        for found in search.findings:
            lines += _finding(job, found)
    rows = [_row(job, one) for one in _first(job)]
    if rows:
        lines += ["| entry | | what | again |", "|---|---|---|---|", *rows[:_MOST_ROWS], ""]
    base = f" as a change of {code(job.base)}" if job.base else ""
    lines += [f"SGLang {code(job.version)}{base}: {job.headline.partition('; ')[2]}.", *map(plain, job.change_lines), ""]
    lines += [plain(f"Search of {one.called}: {one.said}.") for one in job.searches]
    live = [one.id for one in job.of("live")]
    known = list(dict.fromkeys([*live, *(name for one in job.searches for name in one.past)]))
    lines += ["", f"{count(len(known), 'known live bug')} of SGLang showed; the page names them."] if known else [""]
    for search in job.searches:
        if search.left_out:
            lines += ["", *folded(f"Not looked at by the search of {search.called}, and the option for it", search.left_out)]
    return "\n".join([*lines, f"Again: {code(job.again)}", ""])


def _finding(job: OneJob, found: FamilyFinding) -> list[str]:
    """Rule and place, and the smallest case as a file that anybody can run."""
    lines = [f"### {plain(found.line + _known(found.known))}", ""]
    lines += [f"{plain(found.place)}."] if found.place else []
    lines += [f"Changed functions that it runs: {plain(shortened(found.ran))}."] if found.ran else []
    if found.case is None:
        return [*lines, "The search was ended while it made the case smaller.", ""]
    again = changed(job.run, changes=found.changes).command("check", "case.json")
    return [*lines, "", *case_lines(found.case), "", f"As {code('case.json')}: {code(again)}", ""]


def _row(job: OneJob, one: Standing) -> str:
    word = f"**{one.stand}**" if one.stand in WORSE else one.stand
    again = changed(job.run, view=one.view).command("check", one.id)
    return f"| {code(one.id)} | {word} | {plain(one.title)}<br>{plain(one.line or MEANING[one.stand])} | {code(again)} |"


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
            found = "".join(f"\n{each.line}{_known(each.known)}" for each in search.findings)
            yield error(f"{search.said}{found}", f"eagletwin: search of {search.called}")


def facts_of(job: OneJob) -> dict[str, Any]:
    """A line of the history."""
    searches = []
    for one in job.searches:
        findings = [{"line": each.line, "status": each.status, "known": each.known} for each in one.findings]
        facts = {"family": one.family, "exit_code": one.exit_code, "cases": one.cases, "past": list(one.past)}
        searches.append(facts | {"findings": findings})
    return {
        "schema": 1,
        "eagletwin": __version__,
        "sglang": job.sglang,
        "version": job.version,
        "base": job.base,
        "exit_code": job.exit_code,
        "seconds": round(job.seconds, 1),
        "failed": job.failed,
        "interrupted": job.interrupted,
        "not_seen": job.changes.headline,
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
    write_page(folder, lambda: job_page(folder))


def job_page(folder: Path) -> Page:
    """The page of the run folder of a comparison with the ledger. Raises InputError for a record that cannot be read."""
    job = read_facts(folder / JOB, _Kept, "the run folder of `eagletwin compare`").job
    facts = [("SGLang", job.version), ("time", f"{job.seconds:.1f} s")]
    facts += [(f"{stand}: {MEANING[stand]}", count(len(job.of(stand)), "bug")) for stand in get_args(Stand) if job.of(stand)]
    reasons = [job.failed, f"{job.changes.headline}." if job.changes.headline else ""]
    reasons += ["It was ended before it was done."] * job.interrupted
    changes = [PageSection(heading="What was changed in this tree", lines=tuple(job.change_lines))] if job.change_lines else []
    return Page(
        title=f"SGLang {job.version} against the ledger",
        status={EXIT_EQUAL: "nothing found", EXIT_DIVERGED: "diverged"}.get(job.exit_code, "unknown"),
        headline=job.headline,
        facts=tuple(facts),
        reason=" ".join(filter(None, reasons)),
        sections=(*_ledger(folder, job), *_searches(folder, job), *changes),
        again=(job.command,),
        files=tuple(name for name in (JOB, "summary.md") if (folder / name).is_file()),
    )


def _ledger(folder: Path, job: OneJob) -> list[PageSection]:
    order = get_args(Stand)
    rows = []
    for each in sorted(job.standings, key=lambda each: (not each.counts, order.index(each.stand))):
        bug = TableCell(each.id, href=page_beside(folder, job.folder, each.folder))
        stand = TableCell(each.stand, _KINDS[each.stand])
        rows.append(row(bug, each.title, stand, each.line or MEANING[each.stand], each.again, tags=(each.stand,)))
    table = Table(
        caption="Entries of the ledger",
        header=("entry", "bug", "stand", "what", "again"),
        rows=tuple(rows),
        filters=(("Stand", tuple(stand for stand in order if job.of(stand))),),
        searched=True,
    )
    return [PageSection(heading="The ledger", tables=(table,))] if rows else []


def _searches(folder: Path, job: OneJob) -> list[PageSection]:
    rows, found = [], []
    for search in job.searches:
        word = {EXIT_EQUAL: "right", EXIT_DIVERGED: "wrong"}.get(search.exit_code, "doubt")
        name = TableCell(search.called, href=page_beside(folder, job.folder, search.folder))
        rows.append(row(name, str(search.cases), TableCell(search.said, word), ", ".join(search.past)))
        for each in search.findings:
            kind = "wrong" if each.status == "diverged" else "doubt"
            what = TableCell(each.line, kind, page_beside(folder, job.folder, each.folder))
            found.append(row(what, search.called, each.known or "new"))
    tables = [Table(caption="Searches", header=("search", "cases", "result", "past"), rows=tuple(rows))]
    if found:
        columns = ("what", "search", "known as")
        tables.append(Table(caption="Findings of the searches", header=columns, rows=tuple(found), searched=True))
    return [PageSection(heading="Searches", tables=tuple(tables))] if rows else []
