"""The page of a search, made of its summary.json alone: what was drawn, exercised, found, known and left out, and how fast."""

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from eagletwin.harness.core.differs import Changes
from eagletwin.harness.core.errors import EXIT_DIVERGED, EXIT_EQUAL, EXIT_INTERRUPTED, EXIT_UNKNOWN
from eagletwin.harness.core.signature import Signature
from eagletwin.harness.core.terminal import count, others_in_plain_decode
from eagletwin.harness.families.dimensions import FEATURES
from eagletwin.harness.page.render import NAME, Page, PageSection, Table, TableCell, TableRow

from ..page_facts import left_out, never_happened, read_facts

SUMMARY = "summary.json"
# What the exit code of a search means.
MEANING = {
    EXIT_EQUAL: "nothing new was found",
    EXIT_DIVERGED: "a divergence was found that no known bug explains",
    EXIT_UNKNOWN: "cannot tell: a crash, a hang or another unknown was found, or too little was looked at",
    EXIT_INTERRUPTED: "the search was interrupted",
}


class _Tally(Struct, kw_only=True):
    cases: int
    statuses: dict[str, int]
    exercised: dict[str, int]
    accept_lens: dict[str, int]
    configurations: dict[str, int]
    topics: dict[str, int]
    choices: int = 0
    ties: int = 0
    undecided: int = 0
    excused: dict[str, int] = {}
    gaps: int = 0
    relaxed: int = 0
    deaths: int = 0
    lost: list[str] = []
    changes: Changes | None = None


class _Finding(Struct, kw_only=True):
    signature: Signature
    status: str
    folder: str
    cases: int
    seconds: float
    shrink_looks: int
    shrink_seconds: float
    partial: bool = False
    known: str = ""


class _Unconfirmed(Struct, kw_only=True):
    signature: Signature
    status: str
    folder: str
    cases: int
    shrink_looks: int


class _Aside(Struct, kw_only=True):
    signature: Signature
    cases: int
    example: str
    undecided: bool = False


class _Known(Struct, kw_only=True):
    id: str
    cases: int
    mended: int
    shows: dict[str, int] = {}
    example: str = ""


class Summary(Struct, kw_only=True):
    """summary.json, as far as a page shows it."""

    seconds: float
    tally: _Tally
    not_looked_at: list[str] = []
    findings: list[_Finding] = []
    unconfirmed: list[_Unconfirmed] = []
    set_aside: list[_Aside] = []
    known: list[_Known] = []
    refused: dict[str, str] = {}
    headline: str = ""
    not_seen: str = ""
    command: str = ""
    exit_code: int | None = None
    known_note: str = ""


def excused_text(excused: Mapping[str, int]) -> str:
    """Excuses by kind."""
    return ", ".join(f"{name} {number}" for name, number in sorted(excused.items()))


def read_summary(folder: Path) -> Summary:
    """Raises InputError for a summary that cannot be read."""
    return read_facts(folder / SUMMARY, Summary, "the folder of a search of this eagletwin")


def search_page(folder: Path) -> Page:
    """The page of a search's run folder."""
    summary = read_summary(folder)
    tally = summary.tally
    status = "found" if summary.findings or summary.unconfirmed else summary.headline.partition("  ")[0].lower() or "search"
    rate = tally.cases / summary.seconds if summary.seconds else 0.0
    facts = [
        ("cases", f"{tally.cases}: {', '.join(f'{number} {name}' for name, number in sorted(tally.statuses.items()))}"),
        ("time", f"{summary.seconds:.1f} s, {rate:.2f} cases/s"),
        ("choices", f"{tally.choices}, of them {count(tally.ties, 'tie')}"),
        ("undecided by the reference", count(tally.undecided, "case")),
        ("findings", f"{_of(summary, known=False)} new, {_of(summary, known=True)} known{_cut_short(summary)}"),
        ("configurations", str(len(tally.configurations))),
    ]
    facts += [("something never compared", count(tally.gaps, "case"))] if tally.gaps else []
    facts += [("excused", excused_text(tally.excused))] if tally.excused else []
    facts += [("plain decode", others_in_plain_decode(tally.relaxed))] if tally.relaxed else []
    facts += [("workers that ended", str(tally.deaths))] if tally.deaths else []
    facts += [("not searched", "; ".join(tally.lost))] if tally.lost else []
    facts += [("exit code", f"{summary.exit_code}: {MEANING[summary.exit_code]}")] if summary.exit_code in MEANING else []
    sections = [*_found(folder, summary), *_looked_at(tally), *left_out(summary.not_looked_at, summary.refused)]
    return Page(
        title=f"Search {folder.name}",
        status=status,
        headline=summary.headline or f"{count(tally.cases, 'case')}, {count(len(summary.findings), 'finding')}",
        facts=tuple(facts),
        reason=summary.not_seen,
        sections=tuple(sections),
        again=(summary.command,) if summary.command else (),
        files=(SUMMARY,),
    )


def _cut_short(summary: Summary) -> str:
    return f", {len(summary.unconfirmed)} not confirmed, since the search was ended" if summary.unconfirmed else ""


def _of(summary: Summary, *, known: bool) -> int:
    return sum(bool(finding.known) == known for finding in summary.findings)


def _found(folder: Path, summary: Summary) -> list[PageSection]:
    tables = []
    if summary.findings:
        rows = []
        for finding in summary.findings:
            place = Path(finding.folder)
            inside = Path(*place.parts[-2:])
            page = (inside / NAME).as_posix() if (folder / inside / NAME).is_file() else ""
            known = finding.known or "new"
            partial = ", not minimal: time was up" if finding.partial else ""
            cells = (
                TableCell(inside.parts[0], href=page),
                TableCell(finding.status, "wrong" if finding.status == "diverged" else "doubt"),
                TableCell(str(finding.signature)),
                TableCell(known),
                TableCell(f"case {finding.cases}, {finding.seconds:.1f} s"),
                TableCell(f"{count(finding.shrink_looks, 'run')}, {finding.shrink_seconds:.1f} s{partial}"),
            )
            rows.append(TableRow(cells))
        header = ("finding", "status", "what", "known as", "found after", "made small in")
        tables.append(Table(caption="Findings", header=header, rows=tuple(rows)))
    if summary.set_aside:
        rows = [
            TableRow(
                (
                    TableCell(str(one.signature)),
                    TableCell(str(one.cases)),
                    TableCell("undecided" if one.undecided else ""),
                    TableCell(one.example),
                )
            )
            for one in summary.set_aside
        ]
        caption = "Set aside: run once and not confirmed"
        tables.append(Table(caption=caption, header=("what", "cases", "why", "example"), rows=tuple(rows)))
    lines = tuple(
        f"{one.status.capitalize()}: {one.signature}, in case {one.cases}. The search was ended after "
        f"{count(one.shrink_looks, 'run')} of making it smaller, and nothing was confirmed: {one.folder} has the smallest."
        for one in summary.unconfirmed
    )
    lines = lines or (() if summary.findings else ("Nothing new was found.",))
    if summary.known:
        tables.append(_known_bugs(summary))
    return [PageSection(heading="What was found", lines=lines, tables=tuple(tables))]


def _known_bugs(summary: Summary) -> Table:
    rows = [
        TableRow(
            (
                TableCell(bug.id),
                TableCell(str(bug.cases)),
                TableCell(", ".join(bug.shows)),
                TableCell(str(bug.mended)),
                TableCell(bug.example),
            )
        )
        for bug in summary.known
    ]
    caption = "Known bugs: what is equal with their fixes"
    header = ("bug", "cases", "shown as", "cases that may show it, mended", "example")
    return Table(caption=caption, header=header, rows=tuple(rows), note=summary.known_note)


def _looked_at(tally: _Tally) -> list[PageSection]:
    def counted(caption: str, what: str, numbers: dict[str, int]) -> Table:
        rows = tuple(
            TableRow((TableCell(name), TableCell(str(number)), TableCell(f"{number / max(1, tally.cases):.0%}")))
            for name, number in numbers.items()
        )
        return Table(caption=caption, header=(what, "cases", "of all"), rows=rows, searched=True)

    reached = {name: number for name in FEATURES if (number := tally.exercised.get(name, 0))}
    tables = [
        counted("What was drawn: configurations", "configuration", tally.configurations),
        counted("What was drawn: kinds of cases", "kind", tally.topics),
        counted("What the cases exercised", "feature", reached),
        never_happened(reached),
        counted("Accept lengths", "accept length", dict(sorted(tally.accept_lens.items()))),
    ]
    sections = [PageSection(heading="What was looked at", tables=tuple(table for table in tables if table.rows))]
    if tally.changes is not None and tally.changes.lines:
        sections.append(PageSection(heading="What the tree changes", lines=tuple(tally.changes.lines)))
    return sections
