"""A search: how its findings read, what it leaves (summary.json), and its document."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from eagletwin.cases.ledger import ENTRIES
from eagletwin.cases.reach import why_unreachable
from eagletwin.harness.core.case import pretty_case
from eagletwin.harness.core.differs import join_names, unknown_changes
from eagletwin.harness.core.errors import EXIT_DIVERGED, EXIT_EQUAL, EXIT_INTERRUPTED, EXIT_UNKNOWN
from eagletwin.harness.core.run_spec import DEFAULT_RUN
from eagletwin.harness.core.terminal import count, fold, others_in_plain_decode
from eagletwin.harness.families.dimensions import FEATURES
from eagletwin.harness.page.document import Document, DocumentSection, Item, Table, table
from eagletwin.harness.page.render import write_page

from ..page_facts import KINDS, left_out, page_beside, unexercised_features
from .coverage import TOPICS
from .journal import JOURNAL
from .search import Fuzz
from .shrinking import Finding, sizes, smaller
from .tally import (
    LEAST,
    MOST_UNDECIDED,
    SUMMARY,
    EffectFacts,
    FindingFacts,
    KnownBug,
    KnownFacts,
    Summary,
    Tally,
    UnconfirmedFacts,
    read_summary,
)

# What the exit code of a search means.
MEANING = {
    EXIT_EQUAL: "nothing new was found",
    EXIT_DIVERGED: "a divergence was found that no known bug explains",
    EXIT_UNKNOWN: "cannot tell: a crash, a hang or another unknown was found, or too little was looked at",
    EXIT_INTERRUPTED: "the search was interrupted",
}
_SHOWN = 12  # names of a line


def exit_code(search: Fuzz, findings: Sequence[str]) -> int:
    """The exit code of a finished search. findings: the status of each."""
    if "diverged" in findings:
        return EXIT_DIVERGED
    unseen = search.trials.run.strict and not_seen(search)
    return EXIT_EQUAL if search.looked_enough and not findings and not unseen else EXIT_UNKNOWN


def not_seen(search: Fuzz) -> str:
    """Which part of the change no case ran, or that the change is not known; "" if all of it ran, or nothing is changed."""
    source, changes = search.trials.host.source, search.tally.changes
    unknown = source.base is None and (changes.differs is None or changes.differs.patch) and not search.found
    return "; ".join(filter(None, (changes.headline, unknown_changes(source.called) if unknown else "")))


def finding_text(finding: Finding, columns: int) -> str:
    """The argument of the smallest case, and what it took to get there."""
    case = finding.outcome.case
    text = (
        f"Found after {count(finding.cases, 'case')}, {finding.seconds:.1f} s. "
        f"Smallest after {count(finding.shrink_looks, 'more run')}, {finding.shrink_seconds:.1f} s: {sizes(case)}."
    )
    lines = [finding.outcome.text(columns), f"  folder: {finding.outcome.folder}", "", *fold(text, columns, "")]
    changes = smaller(finding.found, case)
    lines += fold(f"Shrunk: {changes}.", columns, "") if changes else []
    lines += [f"Model: {finding.model}."] if finding.model else []
    lines += fold(finding.apart, columns, "") if finding.apart else []
    if finding.partial:
        lines += fold("Not minimal: time was up. This goes on:", columns, "")
        lines.append(f"  {finding.run.command('fuzz', '--shrink', finding.outcome.folder / 'case.json')}")
    return "\n".join(lines)


def write_summary(folder: Path, search: Fuzz, findings: Sequence[FindingFacts], code: int | None = None) -> Summary:
    """Write what a search came to into a folder: summary.json, an example of each known bug, and the page.

    code: the exit code; None: an error ends the command, whose code is the error's. A finding that was still being shrunk
    counts as found.
    """
    summary = _summary(folder, search, findings, code)
    for bug in search.tally.known.values():
        if bug.example is not None:
            file = _example_of(folder, bug)
            file.parent.mkdir(exist_ok=True)
            file.write_text(pretty_case(bug.example), encoding="utf-8")
    (folder / SUMMARY).write_bytes(msgspec.json.format(msgspec.json.encode(summary_facts(summary))))
    write_page(folder, lambda: document_of(summary, folder))
    return summary


def summary_facts(summary: Summary) -> dict[str, object]:
    """The summary as --json has it: known bugs, and what did not start, are beside the tally."""
    facts: dict[str, dict[str, object]] = msgspec.to_builtins(summary)
    del facts["tally"]["known"], facts["tally"]["refused"], facts["tally"]["models"]
    return {**facts}


def _summary(folder: Path, search: Fuzz, findings: Sequence[FindingFacts], code: int | None) -> Summary:
    tally = search.tally
    goes_on = code in (None, EXIT_INTERRUPTED) and (search.folder / JOURNAL).is_file()
    return Summary(
        headline=_headline(search, code),
        remarks=list(_remarks(search, findings)),
        not_seen=not_seen(search),
        command=search.plan.command,
        resume=DEFAULT_RUN.command("fuzz", "--resume", search.folder) if goes_on else "",
        exit_code=code,
        meaning=_meaning(search, code) if code is not None else "",
        seconds=round(search.seconds, 3),
        tally=dataclasses.replace(tally, known={}, refused={}, models=set()),
        not_looked_at=tally.left_out(search.trials.host.mode) if tally.cases else [],
        refused={name: one.why for name, one in tally.refused.items()},
        known=[
            KnownFacts(
                id=bug.id,
                cases=bug.cases,
                mended=bug.mended,
                shows=dict(bug.shows),
                example=str(_example_of(folder, bug)) if bug.example is not None else "",
            )
            for bug in tally.known.values()
        ],
        known_note=_of_overlap(search),
        findings=list(findings),
        unconfirmed=[
            UnconfirmedFacts(
                signature=one.signature,
                status=one.seen.verdict.status,
                folder=str(one.folder / "minimal"),
                cases=tally.cases,
                shrink_looks=one.looks,
            )
            for one in [search.shrinking]
            if one is not None
        ],
        effect=search.effect,
        set_aside=list(search.asides.values()),
    )


def _remarks(search: Fuzz, findings: Sequence[FindingFacts]) -> Iterator[str]:
    """Sentences on the cases that ran, and on those that did not."""
    tally, base = search.tally, search.matcher.base
    if not tally.cases:
        yield f"No case finished in {search.seconds:.1f} s: this says nothing about the release."
    else:
        yield _counts(search)
        yield from _left_open(tally)
        yield from tally.changes.lines
        if tally.changes.doubt:
            yield "No case ran any of that, so this search says nothing about it."
    for name, number in sorted(tally.fallbacks.items()):
        yield f"Unchecked in {count(number, 'case')}, since Triton's interpreter ran it: {name}."
    if base is not None and base.refused:
        yield f"{base.called} was not run beside it, so known bugs count as known: {base.refused}"
    if search.matcher.unfit:
        there = f"; such a bug is known where {base.called} records the same" if base is not None else ""
        yield f"Remedies that do not fit here: {join_names(sorted(search.matcher.unfit), _SHOWN)}{there}."
    if search.unstarted:
        yield "An engine that would not start may be the fault that is searched for; --not leaves its cases out."
    if tally.deaths:
        yield f"{count(tally.deaths, 'worker')} ended over a block."
    for lost in tally.lost:
        yield f"Not searched: {lost}."
    if unfinished := search.found[len(findings) :]:
        yield f"Stopped while shrinking: the smallest case so far is in {unfinished[-1] / 'minimal'}."


def _counts(search: Fuzz) -> str:
    """How many cases there were, and how they ended."""
    tally = search.tally
    changed = search.trials.run.patches or tally.changes.differs is not None
    names = {
        "unknown": "unknown (or ran nothing of the change)" if changed else "unknown",
        "known": "wrong by known bugs alone",
    }
    statuses = ", ".join(f"{number} {names.get(status, status)}" for status, number in sorted(tally.statuses.items()))
    cases = f"{count(tally.cases, 'case')} in {search.seconds:.1f} s: {statuses}."
    text = f"{cases} {tally.ties} of {tally.choices} choices were ties."
    if tally.relaxed:
        text += f" {others_in_plain_decode(tally.relaxed)}"
    if tally.impossible:
        text += f" {count(tally.impossible, 'case')} had a request that asks for what cannot be, and is judged up to there."
    excused = ", ".join(f"{name} {number}" for name, number in sorted(tally.excused.items()))
    return f"{text} Excused: {excused}." if excused else text


def _meaning(search: Fuzz, code: int) -> str:
    strict = code == EXIT_UNKNOWN and search.looked_enough and search.trials.run.strict and not_seen(search)
    if not strict or search.found:
        return MEANING[code]
    missed = "a changed statement did not run" if search.tally.changes.headline else "the change is not known"
    return f"{missed}, which --strict does not let pass"


def _left_open(tally: Tally) -> Iterator[str]:
    """In how many cases it is open whether they are right, and whether those are more than may be."""
    kinds = (
        (tally.undecided, "The reference could not decide {}"),
        (tally.gaps, "A stage of a request, or a family of rules, was never compared in {}"),
    )
    for number, text in kinds:
        most = "" if number <= MOST_UNDECIDED * tally.cases else f", more than the {MOST_UNDECIDED:.0%} that may be"
        if number:
            yield f"{text.format(number)} of them ({number / tally.cases:.0%}){most}."


def _headline(search: Fuzz, code: int | None) -> str:
    tally = search.tally
    seed, cut = f"seed {search.plan.seed}", "INTERRUPTED, " if code == EXIT_INTERRUPTED else ""
    if search.found:
        return f"{cut}{len(search.found)} FOUND  {_of_known(tally)}{seed}"
    if not tally.cases:
        return f"{cut}NOTHING LOOKED AT  {seed}"
    equal = tally.statuses["equal"]
    word = "NOTHING NEW" if search.looked_enough else "CANNOT TELL"
    of = f"{equal} of {count(tally.cases, 'case')} equal"
    if tally.changes.differs is not None and (tally.reached < LEAST or not equal):
        of = f"{tally.reached} of {count(tally.cases, 'case')} ran the change"
    return f"{cut}{word}  {of}, {_of_known(tally)}{count(len(tally.configurations), 'configuration')}, {seed}"


def _of_known(tally: Tally) -> str:
    wrong = tally.statuses["known"]
    return f"{wrong} wrong by known bugs alone, " if wrong else ""


def _of_overlap(search: Fuzz) -> str:
    """Why a search without overlap has entries that need it; empty if it has none."""
    ids = [name for bug in search.tally.known.values() for name in bug.id.split(" and ")]
    names = dict.fromkeys(name for name in ids if why_unreachable(ENTRIES[name], search.trials.run.mode))
    return (
        f"{', '.join(names)}: of cases whose draft reads the target's rows, which run with overlap in every search."
        if names
        else ""
    )


def _example_of(folder: Path, bug: KnownBug) -> Path:
    """The file of the first case that showed a known bug."""
    return folder / "known" / f"{bug.id.replace(' ', '-')}.json"


def search_page(folder: Path) -> Document:
    """The document of a search's run folder. Raises InputError for a summary that cannot be read."""
    return document_of(read_summary(folder), folder)


def document_of(summary: Summary, folder: Path) -> Document:
    """The report: where the text has one line of a section, --verbose and the page have all of it."""
    word, _, title = summary.headline.partition("  ")
    first, *remarks = summary.remarks or [f"{count(summary.tally.cases, 'case')}, {count(len(summary.findings), 'finding')}"]
    meaning = f"Exit code {summary.exit_code}: {summary.meaning}." if summary.meaning else ""
    remarks += _effect(summary.effect) if summary.effect is not None else []
    rate = summary.tally.cases / summary.seconds if summary.seconds else 0.0
    return Document(
        title=title or f"Search {folder.name}",
        status=word.lower() or "search",
        kind=KINDS.get(summary.exit_code, "doubt"),
        headline=first,
        lines=tuple(remarks),
        facts=(("rate", f"{rate:.2f} cases/s"), ("headroom", f"{summary.tally.headroom:.2g} of a bound at most")),
        reason=summary.not_seen,
        sections=(
            _findings_section(folder, summary),
            _known_bugs(summary),
            _aside(summary),
            _refused_section(summary),
            _looked_at(summary.tally),
            *left_out(summary.not_looked_at, brief=_SHOWN),
        ),
        again=tuple(filter(None, (summary.command, summary.resume))),
        files=(SUMMARY,),
        folder=str(folder),
        end=meaning,
    )


def _effect(effect: EffectFacts) -> list[str]:
    partial = "; not minimal: time was up" * effect.partial
    return [
        f"The smallest case that shows what the change does ({count(effect.runs, 'run')}{partial}): {effect.sizes}.",
        f"It alters {effect.place}: {effect.base} on the base, {effect.tree} with the change.",
        f"The base's verdict: {effect.on_base}.",
        f"The case is {effect.case}; beside it are {join_names([*effect.paste, 'both traces'])}.",
    ]


def _findings_section(folder: Path, summary: Summary) -> DocumentSection:
    items = []
    for finding in summary.findings:
        place = Path(*Path(finding.folder).parts[-2:])
        known = f"it may be {finding.known}" if finding.known else "new"
        shrunk = f"made small in {count(finding.shrink_looks, 'run')}, {finding.shrink_seconds:.1f} s"
        partial = "; not minimal: time was up" * finding.partial
        items.append(
            Item(
                title=f"{place.parts[0]}: {finding.status}, {finding.signature}, {known}",
                lines=(f"Found in case {finding.cases}, after {finding.seconds:.1f} s; {shrunk}{partial}.",),
                href=page_beside(folder, str(folder), str(folder / place)),
            )
        )
    return DocumentSection(heading="What was found", lines=_unconfirmed_lines(summary), items=tuple(items), brief="")


def _unconfirmed_lines(summary: Summary) -> tuple[str, ...]:
    lines = tuple(
        f"{one.status.capitalize()}: {one.signature}, in case {one.cases}. The search was ended after "
        f"{count(one.shrink_looks, 'run')} of making it smaller, and nothing was confirmed: {one.folder} has the smallest."
        for one in summary.unconfirmed
    )
    return lines or (() if summary.findings else ("Nothing new was found.",))


def _known_bugs(summary: Summary) -> DocumentSection:
    """Known bugs: cases that they explain, and cases in which they were mended, in memory, so that they hide nothing."""
    bugs, tally = sorted(summary.known, key=lambda bug: -bug.cases), summary.tally
    took = f"To tell which it is took {count(tally.tries, 'more run')} of {count(tally.tried, 'case')}." if tally.tries else ""
    rows = ((bug.id, str(bug.cases), ", ".join(bug.shows), str(bug.mended), bug.example) for bug in bugs)
    bugs_table = table(
        "Known bugs: what is equal with their fixes",
        ("bug", "cases", "shown as", "mended in", "example"),
        rows,
        note=" ".join(filter(None, (summary.known_note, took))),
    )
    names = [f"{bug.id} ({bug.cases})" if bug.cases else bug.id for bug in bugs]
    brief = f"Known bugs, mended in memory: {join_names(names, _SHOWN)}." if names else ""
    return DocumentSection(heading="Known bugs", tables=(bugs_table,), brief=brief)


def _aside(summary: Summary) -> DocumentSection:
    names = {str(finding.signature): Path(finding.folder).parts[-2] for finding in summary.findings}
    rows = []
    for one in summary.set_aside:
        why = "undecided" if one.undecided else "on the way to a finding"
        why = f"as {names[str(one.signature)]}" if str(one.signature) in names else why
        rows.append((str(one.signature), str(one.cases), why, str(Path(*Path(one.example).parts[-2:]))))
    caption, header = "Set aside: run once and not confirmed", ("what", "cases", "why", "example")
    return DocumentSection(heading="Set aside", tables=(table(caption, header, rows),), brief="")


def _refused_section(summary: Summary) -> DocumentSection:
    """Engines that would not start, as this engine lacks that or is broken there; and blocks of which no case was drawn."""
    names = [name.partition(": ")[0] for name in summary.refused]
    brief = f"Not looked at, as no engine started: {join_names(names, _SHOWN)}." if names else ""
    heading = "Configurations of which nothing was looked at, and why"
    return DocumentSection(heading=heading, lines=tuple(summary.refused), brief=brief if summary.tally.cases else None)


def _looked_at(tally: Tally) -> DocumentSection:
    def count_table(caption: str, what: str, numbers: Mapping[str, int]) -> Table:
        rows = ((name, str(number), f"{number / max(1, tally.cases):.0%}") for name, number in numbers.items() if number)
        return table(caption, (what, "cases", "of all"), rows, searched=True)

    reached = {name: tally.exercised[name] for name in FEATURES if tally.exercised[name]}
    tables = (
        count_table("What was drawn: configurations", "configuration", tally.configurations),
        count_table("What was drawn: kinds of cases", "kind", {topic.words: tally.topics[topic.words] for topic in TOPICS}),
        count_table("What the cases exercised", "feature", reached),
        unexercised_features(reached),
        count_table("Accept lengths", "accept length", dict(sorted(tally.accept_lens.items()))),
    )
    return DocumentSection(heading="What was looked at", tables=tables, brief="")
