"""The page of a CI job, made of its ci.json alone: how the SGLang stands to the ledger, and what its searches came to."""

from pathlib import Path
from typing import Any, get_args

import msgspec
from msgspec import Struct

from eagletwin.harness.core.errors import EXIT_DIVERGED, EXIT_EQUAL
from eagletwin.harness.core.terminal import count
from eagletwin.harness.page.render import Page, PageSection, Table, TableCell, TableRow, write_page

from ..page_facts import page_beside, read_facts, row
from .result import MEANING, OneJob, facts_of
from .standing import WORSE, Stand

JOB = "ci.json"
_KINDS: dict[str, str] = {"lacks": "wrong", "wrong": "wrong", "unknown": "doubt", "holds": "right", "live": "wrong", "gone": ""}


class _Standing(Struct, kw_only=True):
    id: str
    title: str
    stand: Stand
    line: str
    again: str
    folder: str


class _Finding(Struct, kw_only=True):
    line: str
    status: str
    known: str
    folder: str


class _Search(Struct, kw_only=True):
    called: str
    said: str
    exit_code: int
    cases: int
    past: list[str] = []
    folder: str
    findings: list[_Finding]


class _Kept(Struct, kw_only=True):
    """ci.json, as far as a page shows it."""

    version: str
    exit_code: int
    seconds: float
    failed: str
    interrupted: bool
    headline: str
    command: str
    folder: str
    standings: list[_Standing]
    searched: list[_Search]
    changes: list[str] = []
    not_seen: str = ""


def keep_job(job: OneJob) -> None:
    """Write ci.json and the page into the run folder: a line of the history, and more of each entry and search."""
    facts: dict[str, Any] = facts_of(job) | {
        "headline": job.headline,
        "command": job.command,
        "folder": str(job.folder),
        "standings": [
            {
                "id": one.id,
                "title": one.question.entry.title if one.question.entry is not None else "",
                "stand": one.stand,
                "line": one.line,
                "again": one.again,
                "folder": str(one.folder or ""),
            }
            for one in job.standings
        ],
        "searched": [
            {
                "called": one.called,
                "said": one.said,
                "exit_code": one.exit_code,
                "cases": one.cases,
                "past": one.past,
                "folder": str(one.folder or ""),
                "findings": one.findings,
            }
            for one in job.searches
        ],
    }
    (job.folder / JOB).write_bytes(msgspec.json.format(msgspec.json.encode(facts)) + b"\n")
    write_page(job.folder, lambda: job_page(job.folder))


def job_page(folder: Path) -> Page:
    """The page of a CI job's run folder. Raises InputError for a record that cannot be read."""
    one = read_facts(folder / JOB, _Kept, "the run folder of `eagletwin ci`")
    stands = [(stand, sum(each.stand == stand for each in one.standings)) for stand in get_args(Stand)]
    facts = [("SGLang", one.version), ("time", f"{one.seconds:.1f} s")]
    facts += [(f"{stand}: {MEANING[stand]}", count(number, "bug")) for stand, number in stands if number]
    reasons = (
        [one.failed] * bool(one.failed)
        + [f"{one.not_seen}."] * bool(one.not_seen)
        + ["It was ended before it was done."] * one.interrupted
    )
    return Page(
        title=f"CI job on SGLang {one.version}",
        status={EXIT_EQUAL: "nothing found", EXIT_DIVERGED: "diverged"}.get(one.exit_code, "unknown"),
        headline=one.headline,
        facts=tuple(facts),
        reason=" ".join(reasons),
        sections=(*_ledger(folder, one), *_searches(folder, one), *_changes(one)),
        again=(one.command,),
        files=tuple(name for name in (JOB, "summary.md") if (folder / name).is_file()),
    )


def _ledger(folder: Path, one: _Kept) -> list[PageSection]:
    order = get_args(Stand)
    rows = []
    for each in sorted(one.standings, key=lambda each: (each.stand not in (*WORSE, "unknown"), order.index(each.stand))):
        bug = TableCell(each.id, href=page_beside(folder, one.folder, each.folder))
        stand = TableCell(each.stand, _KINDS[each.stand])
        rows.append(row(bug, each.title, stand, each.line or MEANING[each.stand], each.again, tags=(each.stand,)))
    table = Table(
        caption="Entries of the ledger",
        header=("entry", "bug", "stand", "what", "again"),
        rows=tuple(rows),
        filters=(("Stand", tuple(stand for stand in order if any(each.stand == stand for each in one.standings))),),
        searched=True,
    )
    return [PageSection(heading="The ledger", tables=(table,))] if rows else []


def _changes(one: _Kept) -> list[PageSection]:
    return [PageSection(heading="What was changed in this tree", lines=tuple(one.changes))] if one.changes else []


def _searches(folder: Path, one: _Kept) -> list[PageSection]:
    if not one.searched:
        return []
    rows = []
    for search in one.searched:
        word = {EXIT_EQUAL: "right", EXIT_DIVERGED: "wrong"}.get(search.exit_code, "doubt")
        name = TableCell(search.called, href=page_beside(folder, one.folder, search.folder))
        rows.append(row(name, str(search.cases), TableCell(search.said, word), ", ".join(search.past)))
    header = ("search", "cases", "result", "past")
    tables = [Table(caption="Searches", header=header, rows=tuple(rows))]
    found = tuple(_finding(folder, one, search, each) for search in one.searched for each in search.findings)
    if found:
        caption, columns = "Findings of the searches", ("what", "search", "known as")
        tables.append(Table(caption=caption, header=columns, rows=found, searched=True))
    return [PageSection(heading="Searches", tables=tuple(tables))]


def _finding(folder: Path, one: _Kept, search: _Search, each: _Finding) -> TableRow:
    kind = "wrong" if each.status == "diverged" else "doubt"
    return row(TableCell(each.line, kind, page_beside(folder, one.folder, each.folder)), search.called, each.known or "new")
