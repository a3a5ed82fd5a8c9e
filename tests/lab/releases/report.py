"""releases.md and its page for a browser, made of recorded answers alone."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from eagletwin.cases.entry import Entry, Known, Probe
from eagletwin.harness.core.terminal import count
from eagletwin.harness.page.document import Document, DocumentSection, Table, TableCell, TableRow

from ..common import shared_rows, shorter
from .survey import FILE, Cell, Measured

# releases.md: the ledger on each release, and greedy output, as a page made of recorded measurements alone.

PAGE = "releases.md"


_WORDS = (
    "* **red**: the entry's case breaks the entry's rule on that release, in the same way in three fresh forks. "
    "A crash is its own verdict.",
    "* red with a letter: the case breaks another rule first (listed below), or the entry's own on a release that the entry "
    "clears. Another bug of that release shows, and the cell does not say whether this one is there too.",
    "* green: all numbers are right.",
    "* ? with a number: cannot tell, for the reason with that number below.",
    "",
    "Where another bug shows first, the releases that an entry names come from its finding and not from this table. "
    "An entry without any bold cell is hidden by other bugs on every release.",
    "",
)


def page(measured: Sequence[Measured], entries: Sequence[Known], right: Sequence[str], model: str = "") -> str:
    """The page, in Markdown. right: digests of what the target alone says to the common cases. model: the one in which all
    cases are; empty: each entry's own. Entries that no release was asked about are named and have no row."""
    unasked = [entry.id for entry in entries if not any(entry.id in one.cells for one in measured)]
    entries = [entry for entry in entries if entry.id not in unasked]
    legend = _Legend(measured, {entry.id: entry for entry in entries})
    asked = f"python -m tests.lab releases{f' --model {model}' if model else ''}"
    title = f"The ledger on every release, in {model}" if model else "The ledger on every release"
    probes = [entry.id for entry in entries if isinstance(entry, Probe)]
    table = [
        "| entry | breaks | on releases |",
        "|---|---|---|",
        *shared_rows([(entry, _by_release(measured, legend.words(entry))) for entry in entries]),
        f"| greedy output, {len(right)} cases | | {_by_release(measured, [_outputs(one, right) for one in measured])} |",
    ]
    counts = Counter(cell.status for one in measured for cell in one.cells.values())
    silent = [one.release for one in measured if {cell.status for cell in one.cells.values()} == {"cannot tell"}]
    lines = [
        f"# {title}",
        "",
        f"Written by `{asked}` from {FILE}: "
        f"{_asked(len(entries), probes)} on {len(measured)} published wheels, unchanged{_but(entries, model)}, on a CPU. "
        f"{counts['green']} cells are green, {counts['red']} are red, and {counts['cannot tell']} cannot tell. "
        + (f"Releases without a single verdict: {', '.join(silent)}." if silent else "Every release has at least one verdict."),
        "",
        "Releases are named without the leading 0.5.",
        "Entries with the same answers share a row; rules that differ come in the order of the entries.",
        "",
        *_WORDS,
        *table,
        "",
        *([f"Not asked of any release yet: {', '.join(unasked)}.", ""] if unasked else []),
        *(_mended(entries) if model else ()),
        *legend.lines(),
        "",
        "## Greedy output",
        "",
        *_output_lines(measured, right, model),
        "",
        "## Again",
        "",
        "```",
        f"{asked}                    # measures what is missing, and writes this page",
        f"{asked} 0.5.12 --again     # measures one release again",
        *([] if model else ["eagletwin check 25015 --sglang 0.5.11      # one cell, with the whole argument"]),
        "```",
    ]
    return "\n".join(lines) + "\n"


def _but(entries: Sequence[Known], model: str) -> str:
    named = model and any(isinstance(entry, Entry) and entry.beside for entry in entries)
    return " but for what is mended below" if named else ""


def _mended(entries: Sequence[Known]) -> Iterator[str]:
    """Which entries were asked about with another live bug mended, that breaks a rule first in this model."""
    by_patch: dict[str, list[str]] = {}
    for entry in entries:
        if isinstance(entry, Entry) and entry.beside:
            by_patch.setdefault(next(iter(entry.beside.values())).name, []).append(entry.id)
    if by_patch:
        yield "Mended in memory for an entry, since it would show first in this model:"
        yield ""
        yield from (f"* {patch}: {', '.join(ids)}" for patch, ids in by_patch.items())
        yield ""


def empty(measured: Sequence[Measured], entries: Sequence[Known]) -> list[str]:
    """Cells that were not measured: nothing is known of them, or the release could not be asked. Greedy output is one."""
    holes = []
    for one in measured:
        cells = [(entry.id, one.cells.get(entry.id)) for entry in entries]
        holes += [f"{name} on {one.release}" for name, cell in cells if cell is None or not cell.asked]
        if one.output is None or not one.output.asked:
            holes.append(f"greedy output on {one.release}")
    return holes


def _asked(entries: int, probes: Sequence[str]) -> str:
    if not probes:
        return f"{entries} entries of the ledger"
    return (
        f"{entries - len(probes)} entries of the ledger and {len(probes)} probes ({', '.join(probes)}: one function of a "
        f"release, called alone by `eagletwin prove --releases {probes[0]}`)"
    )


def _by_release(measured: Sequence[Measured], words: Sequence[str]) -> str:
    """What holds of which releases, those next to each other that have the same word as a range."""
    runs = list[tuple[str, str, str]]()
    for one, word in zip(measured, words, strict=True):
        short = _short(one.release)
        runs = [*runs[:-1], (runs[-1][0], short, word)] if runs and runs[-1][2] == word else [*runs, (short, short, word)]
    return "; ".join(f"{first if first == last else f'{first} to {last}'} {word}" for first, last, word in runs)


def _short(release: str) -> str:
    return release.removeprefix("0.5.")


class _Legend:
    """Letters for rules and numbers for reasons, in the order in which they come up."""

    def __init__(self, measured: Sequence[Measured], entries: Mapping[str, Known]) -> None:
        self._measured = {one.release: one for one in measured}
        self._entries = entries
        self._rules: dict[str, str] = {}
        self._where: dict[str, set[str]] = {}  # rule -> releases in which it comes before another entry's
        self._reasons: dict[str, int] = {}

    def words(self, entry: Known) -> list[str]:
        """That of each release."""
        return [self._word(name, entry, one.cells.get(entry.id)) for name, one in self._measured.items()]

    def _word(self, release: str, entry: Known, cell: Cell | None) -> str:
        if cell is None:
            return "(not measured)"
        if cell.status == "green":
            return "green"
        if cell.status == "red" and cell.own and entry.is_in(release):
            return "**red**"
        if cell.status == "red":
            self._where.setdefault(cell.rule, set()).add(release)
            return f"red {self._rules.setdefault(cell.rule, chr(ord('a') + len(self._rules)))}"
        why = cell.why.removeprefix(f"{entry.id} is ")
        return f"? {self._reasons.setdefault(why, len(self._reasons) + 1)}"

    def lines(self) -> Iterator[str]:
        if self._rules:
            yield "Another bug first, by this rule, and the entries that are red by it in all of these releases:"
            yield ""
            for rule, letter in self._rules.items():
                known = ", ".join(self._red(rule, self._where[rule])) or "none in the ledger; docs/explanation/eras.md may say"
                yield f"* {letter}: {rule} ({known})"
            yield ""
        if self._reasons:
            yield "Cannot tell, because:"
            yield ""
        for why, number in self._reasons.items():
            yield f"{number}. {shorter(why)}"

    def _red(self, rule: str, releases: set[str]) -> list[str]:
        """Entries that are red by this rule, their own, in every one of these releases."""
        red = [
            {
                name
                for name, cell in self._measured[release].cells.items()
                if cell.own and cell.rule == rule and name in self._entries and self._entries[name].is_in(release)
            }
            for release in releases
        ]
        return sorted(set.intersection(*red))


def _outputs(one: Measured, right: Sequence[str]) -> str:
    if one.output is None:
        return "(not measured)"
    return str(sum(token == true for token, true in zip(one.output.tokens, right, strict=False)))


def _output_lines(measured: Sequence[Measured], right: Sequence[str], model: str) -> Iterator[str]:
    outputs: Mapping[str, Sequence[str]] = {one.release: one.output.tokens for one in measured if one.output is not None}
    if model:  # a release that does not serve it answers nothing
        outputs = {release: tokens for release, tokens in outputs.items() if any(tokens)}
    if not outputs:
        yield "No release answered a common case, so nothing is said of greedy output."
        return
    same = sum(all(len(tokens) > n and tokens[n] == true for tokens in outputs.values()) for n, true in enumerate(right))
    exact = all(token in (true, "") for tokens in outputs.values() for token, true in zip(tokens, right, strict=False))
    yield (
        f"{same} of {len(right)} generated common cases (`tests/lab/releases/survey.py`: "
        "chains, no pages, no cache, 1-3 requests, 1-4 "
        f"draft steps, chunks or none) are answered with the same tokens by all {len(outputs)} releases"
        f"{' that answer' if model else ''}, token for token, and these are what the target alone says, by the reference in "
        f"float64.{' So greedy output shows none of the bugs above.' if exact else ''}"
    )
    for one in measured:
        if one.output is not None:
            other = [n for n, true in enumerate(right) if one.output.tokens[n : n + 1] not in ((true,), ("",), ())]
            missing = sum(one.output.tokens[n : n + 1] in (("",), ()) for n in range(len(right)))
            if other:
                yield f"\n* {one.release}: other tokens in cases {', '.join(map(str, other))}."
            if missing:
                yield f"\n* {one.release}: {count(missing, 'case')} did not finish: {one.output.why}"


# The ledger on every release as a page that can be narrowed down: made of the same measurements as releases.md.


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
