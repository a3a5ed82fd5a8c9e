"""Jobs on the page of a campaign: what was found, new or known; what was proven; and all of them."""

from collections import Counter

from eagletwin.harness.page.render import PageSection, Table, TableCell, TableRow

from ..page_facts import row
from .job import CaseResult, JobResult
from .tally import RACES, comparisons, proofs, statuses_of

_MOST = 2000  # rows of a table
_TRACES = "Traces are kept in job-NNN/cases; `eagletwin report` of a folder in it makes the page of the case."
_KINDS = {"equal": "right", "known": "", "found": "right", "hidden": "", "diverged": "wrong", "unknown": "doubt"}


def findings(jobs: list[JobResult]) -> list[PageSection]:
    """Cases that are not equal, where equal is what was expected; jobs that did not run; comparisons that came out wrong."""
    plain = [job for job in jobs if job.expected is None]
    rows = [_found(job, one) for job in plain for one in job.seen if one.status != "equal"]
    table = Table(
        caption="Cases that are not equal",
        header=("case", "job", "status", "rule", "where, or why", "known as"),
        rows=tuple(rows[:_MOST]),
        note=f"{_left(rows)} {_TRACES}".strip(),
        filters=(("As", ("new", "known", "unknown")),),
        searched=True,
    )
    bugs = Counter(one.known for job in plain for one in job.seen if one.known)
    known = tuple(row(bug, str(number)) for bug, number in bugs.most_common())
    tables = (table, Table(caption="Known bugs that explain a case", header=("bug", "cases"), rows=known), _others(jobs))
    shown = tuple(one for one in tables if one.rows)
    return [PageSection(heading="What was found", lines=() if shown else ("Nothing was found.",), tables=shown)]


def _found(job: JobResult, one: CaseResult) -> TableRow:
    news = "known" if one.known else "new" if one.status == "diverged" else one.status
    status = TableCell(one.status, "" if one.known else _KINDS.get(one.status, "doubt"))
    return row(one.case, job.name, status, one.rule, one.where or one.reason, one.known or news, tags=(news,))


def _others(jobs: list[JobResult]) -> Table:
    """What made a job count otherwise than its cases did."""
    rows = []
    for job in jobs:
        said = [text for text in comparisons(job) if "DIFFERENT" in text or "UNKNOWN" in text]
        rows += [row(job.name, TableCell(text, "doubt" if "UNKNOWN" in text else "wrong")) for text in said]
        if job.error:
            rows.append(row(job.name, TableCell(job.error, "doubt")))
    header = ("job", "what")
    return Table(
        caption="Jobs that did not run to their end, or came out otherwise",
        header=header,
        rows=tuple(rows[:_MOST]),
        note=_left(rows),
    )


def _left(rows: list[TableRow]) -> str:
    return f"{len(rows) - _MOST} more are not listed." if len(rows) > _MOST else ""


def proven(jobs: list[JobResult]) -> list[PageSection]:
    """Entries of the ledger and planted faults: whether what must be found was found."""
    rows = []
    for line in proofs(jobs):
        name, _, said = line.partition(": ")
        kind = "right" if said.startswith("proven") else "" if said.startswith("hidden") else "wrong"
        rows.append(row(name, TableCell(said, kind)))
    for job in jobs:
        if job.expected is not None and job.name.startswith(("faults/", RACES)):
            [word] = statuses_of(job)
            rows.append(row(job.name, TableCell(word, _KINDS[word])))
    table = Table(
        caption="Entries of the ledger, and planted faults", header=("what", "result"), rows=tuple(rows), searched=True
    )
    return [PageSection(heading="What must be found", tables=(table,))] if rows else []


def all_jobs(jobs: list[JobResult]) -> PageSection:
    rows = []
    for job in jobs:
        statuses = statuses_of(job)
        worst = next((word for word in ("diverged", "unknown") if statuses[word]), "equal" if statuses else "unknown")
        said = ", ".join(f"{number} {word}" for word, number in sorted(statuses.items())) or "nothing"
        cells = (TableCell(said, _KINDS[worst]), str(len(job.seen)), f"{job.start:.1f} s", f"{job.seconds:.1f} s")
        rows.append(row(job.name, job.mode.words or "the CPU engine", *cells, tags=(worst,)))
    table = Table(
        caption="Jobs",
        header=("job", "mode", "result", "cases", "start", "in all"),
        rows=tuple(rows[:_MOST]),
        note=_left(rows),
        filters=(("Result", ("equal", "diverged", "unknown")),),
        searched=True,
    )
    return PageSection(heading="All jobs", tables=(table,))
