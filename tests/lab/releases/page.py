"""The ledger on every release as a page that can be narrowed down: made of the same measurements as releases.md."""

from collections.abc import Sequence

from eagletwin.cases.entry import Known
from eagletwin.harness.core.terminal import count
from eagletwin.harness.page.document import Document, DocumentSection, Table, TableCell, TableRow

from .results import Cell, Measured


def ledger_page(measured: Sequence[Measured], entries: Sequence[Known]) -> Document:
    """The page. A row's tags: live or fixed, its rule, and on which releases it is red, by its own rule or another."""
    rows, releases = [], [one.release for one in measured]
    for entry in entries:
        cells = [(one.release, one.cells.get(entry.id)) for one in measured]
        tags = ["live" if not entry.fixed else "fixed", entry.rule, *_tags(cells)]
        shown = (
            TableCell(entry.id),
            TableCell(entry.state),
            TableCell(entry.rule),
            TableCell(entry.title),
            TableCell(entry.trigger),
        )
        rows.append(TableRow((*shown, *(_shown(entry, release, cell) for release, cell in cells)), tags=tuple(tags)))
    table = Table(
        caption="The ledger on every release",
        header=("entry", "releases", "breaks", "title", "matters with", *releases),
        rows=tuple(rows),
        note="red: the case breaks the entry's rule. other: it breaks another rule first, or its own on a release that the "
        "entry clears. ?: cannot tell. Blank: not measured.",
        filters=(
            ("State", ("live", "fixed")),
            ("Rule", tuple(sorted({entry.rule for entry in entries}))),
            ("Red on", tuple(f"red on {release}" for release in releases)),
            ("Green on", tuple(f"green on {release}" for release in releases)),
        ),
        searched=True,
    )
    reasons = _reasons(measured)
    counts = {status: sum(cell.status == status for one in measured for cell in one.cells.values()) for status in _STATUSES}
    said = ", ".join(f"{number} {status}" for status, number in counts.items())
    return Document(
        title="The ledger on every release",
        status="ledger",
        headline=f"{count(len(entries), 'known bug')} on {count(len(measured), 'release')}: {said}",
        sections=(DocumentSection(heading="Entries by release", tables=(table,)), *reasons),
        again=("python -m tests.lab releases",),
    )


_STATUSES = ("green", "red", "cannot tell")


def _tags(cells: Sequence[tuple[str, Cell | None]]) -> list[str]:
    return [f"{cell.status} on {release}" for release, cell in cells if cell is not None and cell.status != "cannot tell"]


def _shown(entry: Known, release: str, cell: Cell | None) -> TableCell:
    if cell is None or not cell.asked:
        return TableCell("")
    if cell.status == "green":
        return TableCell("green", "right")
    if cell.status == "red":
        own = cell.own and entry.is_in(release)
        return TableCell("red", "wrong") if own else TableCell(f"other: {cell.rule}", "doubt")
    return TableCell("", "doubt")


def _reasons(measured: Sequence[Measured]) -> list[DocumentSection]:
    """Why a cell cannot tell."""
    found: dict[str, list[str]] = {}
    for one in measured:
        for name, cell in one.cells.items():
            if cell.status == "cannot tell" and cell.why:
                found.setdefault(cell.why, []).append(f"{name} on {one.release}")
    rows = tuple(TableRow((TableCell(why), TableCell(", ".join(where)))) for why, where in found.items())
    if not rows:
        return []
    return [
        DocumentSection(
            heading="What cannot be told",
            tables=(Table(caption="Reasons", header=("why", "where"), rows=rows, searched=True),),
        )
    ]
