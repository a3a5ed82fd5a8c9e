"""The page of a bisection: its report, and each version or variant with its looks."""

from collections.abc import Mapping
from pathlib import Path

from eagletwin.harness.core.terminal import count
from eagletwin.harness.page.render import NAME, Page, PageSection, Table, TableCell, TableRow

from .marks import Looked, brief
from .report import REPORT
from .state import STATE, read_state


def bisection_page(folder: Path) -> Page:
    """The page of a bisection's run folder, made of what lies in it."""
    report = (folder / REPORT).read_text(encoding="utf-8")
    headline, _, rest = report.partition("\n")
    word, _, said = headline.partition("  ")
    looked = read_state(folder).looked if (folder / STATE).is_file() else {}
    tables = (_versions(folder, looked),) if looked else _variants(folder)
    return Page(
        title=f"Bisection: {said.strip() or folder.name}",
        status="unknown" if word.startswith(("CANNOT", "NO ANSWER")) else "bisected",
        headline=word,
        sections=(PageSection(heading="Answer", text=rest.strip("\n"), tables=tuple(table for table in tables if table.rows)),),
        files=tuple(name for name in (REPORT, STATE) if (folder / name).is_file()),
    )


_KINDS = {"equal": "right", "diverged": "wrong"}


def _versions(folder: Path, looked: Mapping[str, Looked]) -> Table:
    rows = []
    for version, one in looked.items():
        usual = one.usual
        page = next((file for file in sorted(folder.glob(f"*/look-1/{NAME}")) if file.parts[-3].startswith(version)), None)
        cells = (
            TableCell(version, href=page.relative_to(folder).as_posix() if page is not None else ""),
            TableCell(brief(usual), _KINDS.get(usual.status, "doubt")),
            TableCell(usual.place),
            TableCell(usual.why),
            TableCell(f"{count(len(one.sightings), 'look')}, {one.seconds:.1f} s"),
        )
        rows.append(TableRow(cells))
    return Table(caption="What was looked at", header=("version", "result", "place", "why", "cost"), rows=tuple(rows))


def _variants(folder: Path) -> tuple[Table, ...]:
    """The variants of a bisection over features: pages of their own."""
    pages = sorted(folder.glob(f"variant-*/look-1/{NAME}"), key=lambda file: int(file.parts[-3].rpartition("-")[2]))
    rows = tuple(TableRow((TableCell(file.parts[-3], href=file.relative_to(folder).as_posix()),)) for file in pages)
    return (Table(caption="Variants, in the order in which they were run", header=("variant",), rows=rows),)
