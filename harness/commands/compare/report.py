"""A comparison of two trees: what came of it (`CompareReport`), as comparison.json and --json have it, and as a document."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from msgspec.structs import replace

from eagletwin.harness.core.case import Case, pretty_case
from eagletwin.harness.core.differs import Changes, join_names
from eagletwin.harness.core.errors import EXIT_UNKNOWN
from eagletwin.harness.core.run_spec import DEFAULT_RUN, TITLES, RunSpec
from eagletwin.harness.core.signature import Signature
from eagletwin.harness.core.terminal import count
from eagletwin.harness.engines.provision import releases
from eagletwin.harness.page.document import Document, DocumentSection, Item, TableCell, row, table

from ..page_facts import KINDS, left_out, page_beside, read_facts
from ..result import (
    AcceptedFacts,
    AnswerFacts,
    BrokenFacts,
    ComparisonFacts,
    ExampleFacts,
    FunctionsFacts,
    NamedFacts,
    SideFacts,
)
from .groups import GROUPS, Breakage, ComparedCase, Result, breakages, example_of

SIDES = ("BASE", "HEAD")
RECORD = "comparison.json"  # in the run folder: what --json prints
NAMES = 20  # functions that a sentence names
_CASES = 8  # cases of a breakage that are named
# Groups whose cases are named one by one, and what each is.
_MEANS = {
    "newly fixed": "BASE has them wrong and HEAD right.",
    "still diverged": "BASE and HEAD have them wrong in the same way.",
    "diverged otherwise": "BASE and HEAD have them wrong, each in another way.",
    "unknown": "Nothing can be said of them on one side, or on both.",
}
_STATUSES = {"equal": "right", "broken": "wrong", "unknown": "doubt"}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareReport:
    """All that a report says.

    names     what was typed for BASE and HEAD; versions: what traces call them
    changes   what ran of the difference, on each side; mutual: whether each side was compared with the other, file by file
    examples  of each breakage: the case to read; none if the command was ended before it was made small
    left      entries that were not asked before the command was ended; unreached: those that the mode does not reach
    believed  live bugs that did not run: on both sides the code of their candidate fix is that of the newest release
    known     bugs of the ledger that generated cases showed on both sides, and that were mended there
    not_looked_at  what no generated case had, each with the option for it, as `fuzz` has it
    run, words  how both sides are run; the options that a person typed besides
    ended     the exit code of a command that was ended before it was done: by a signal, or an error
    """

    result: Result
    names: tuple[str, str]
    versions: tuple[str, str]
    command: str
    folder: Path
    seconds: float
    changes: tuple[Changes, Changes]
    mutual: bool
    examples: Mapping[Signature, ExampleFacts] = field(default_factory=dict)
    accepted: Sequence[AcceptedFacts] = ()
    left: int = 0
    believed: Sequence[str] = ()
    unreached: Sequence[str] = ()
    known: Sequence[str] = ()
    not_looked_at: Sequence[str] = ()
    run: RunSpec = DEFAULT_RUN
    words: Sequence[str] = ()
    ended: int | None = None

    @property
    def interrupted(self) -> bool:
        return self.ended is not None

    @property
    def exit_code(self) -> int:
        if self.ended is not None:
            return self.ended
        return EXIT_UNKNOWN if self.run.strict and self.not_seen and not self.broken else self.result.exit_code

    @property
    def not_seen(self) -> str:
        """Which part of the change did not run in any case, where another part did; "" if all of it ran."""
        return self.changes[1].headline

    @property
    def headline(self) -> str:
        if self.interrupted:
            return f"INTERRUPTED, {self.result.word}" if self.broken else "INTERRUPTED"
        return self.result.word

    @property
    def sentence(self) -> str:
        """The result in one sentence. What ended early says nothing of what it did not ask."""
        if self.interrupted and not self.broken:
            return f"Ended before it was done: {self.result.compared}, and nothing is said of the rest."
        return self.result.sentence

    @property
    def broken(self) -> list[tuple[Breakage, ExampleFacts]]:
        """What is newly broken, each with the case to read."""
        return [(one, self.examples.get(one.signature) or example_of(one, self.run)) for one in breakages(self.result.answers)]

    @property
    def remarks(self) -> list[str]:
        """How much was run, and which live bugs of the engine's own were met, in sentences."""
        return [self._amount, *filter(None, [self._live])]

    @property
    def _amount(self) -> str:
        entries = sum(answer.question.entry is not None for answer in self.result.answers)
        cases = len(self.result.answers) - entries
        bugs = f"{entries} {'entry' if entries == 1 else 'entries'} of the ledger"
        text = f"{count(cases, 'generated case')} and {bugs} were compared in {self.seconds:.0f} s."
        if self.left:
            text += f" {self.left} more of the ledger did not run, since the command was ended."
        newest = releases(self.run.mode.engine)[-1]
        if self.believed:
            bugs = count(len(self.believed), "live bug")
            text += f" {bugs} of {self.run.mode.title} did not run: both sides have the code of {newest}, where each is proven."
        if alone := sum(answer.believed for answer in self.result.answers):
            text += f" Of the entries {alone} ran on HEAD alone: BASE has the fixes of {newest}, where each is proven."
        if self.unreached:
            text += f" Not reached in this mode: {join_names(self.unreached)}."
        return text

    @property
    def _live(self) -> str:
        alike = sum(bool(answer.known) for answer in self.result.of("still diverged"))
        parts = [f"{count(alike, 'case')} diverged by them on both sides"] * bool(alike)
        parts += [f"generated cases ran with the fixes of {', '.join(self.known)}"] * bool(self.known)
        return f"{self.run.mode.title}'s known live bugs: {'; '.join(parts)}." if parts else ""

    @property
    def differing(self) -> list[str]:
        """What differs, run and not run: once, if each side was compared with the other."""
        found = []
        base, head = (changes.differs for changes in self.changes)
        for side, changes in zip(SIDES, self.changes, strict=True):
            differs = changes.differs
            if differs is None or (self.mutual and side == "BASE" and head is not None):
                continue
            often = [f"{name} in {changes.ran[name]} of {count(changes.of, 'case')}" for name in differs.ran]
            lines = differs.list_functions(often, shown=NAMES, gone="Only in BASE" if self.mutual else "Removed")
            lines = lines or ["Nothing but comments, documentation, and what the other has alone."]
            lines += [changes.effect] if changes.effect else []
            found += lines if self.mutual else [f"{side}: {line}" for line in lines]
        alone = [name for name in base.ran if name not in head.functions] if base and head and self.mutual else []
        found += [f"Run in BASE, which alone has them: {join_names(alone, NAMES)}."] * bool(alone)
        return found or [self._no_functions]

    @property
    def _no_functions(self) -> str:
        """What to say where no side was watched."""
        if not self.result.told:
            return "No changed function is known to have run, since no case ran to a verdict on both sides."
        return "Which changed functions ran is not known: the two are releases, or differ in too many files to list."


def facts_of(one: CompareReport) -> ComparisonFacts:
    """The object that --json prints, and comparison.json holds (docs/guide/compare.md)."""
    result = one.result
    return ComparisonFacts(
        engine=one.run.mode.engine,
        result="cannot tell" if one.interrupted and not one.broken else result.word.lower().lstrip("0123456789 "),
        headline=one.headline,
        sentence=one.sentence,
        remarks=one.remarks,
        exit_code=one.exit_code,
        not_seen=one.not_seen,
        interrupted=one.interrupted,
        base=NamedFacts(name=one.names[0], version=one.versions[0]),
        head=NamedFacts(name=one.names[1], version=one.versions[1]),
        command=one.command,
        portable=one.run.command("compare", *SIDES, *one.words),
        folder=str(one.folder),
        seconds=round(one.seconds, 3),
        counts={group: len(result.of(group)) for group in GROUPS},
        broken=[_breakage_facts(broken, example) for broken, example in one.broken],
        ran_change=result.reached,
        known=list(one.known),
        not_looked_at=list(one.not_looked_at),
        believed=list(one.believed),
        not_run=one.left,
        not_reached=list(one.unreached),
        answers=[_answer_facts(answer, one.run) for answer in result.answers],
        changes=one.differing,
        functions={
            side.lower(): FunctionsFacts(
                against=differs.base,
                run=changes.ran,
                not_run=list(differs.idle),
                outside_of_functions=list(differs.modules),
                gone=list(differs.removed),
                not_run_here=list(differs.files),
                runs=changes.of,
            )
            for side, changes in zip(SIDES, one.changes, strict=True)
            if (differs := changes.differs) is not None
        },
        acceptance=list(one.accepted),
    )


def _breakage_facts(broken: Breakage, example: ExampleFacts) -> BrokenFacts:
    signature = broken.signature
    return BrokenFacts(
        what=str(signature),
        rule=signature.rule,
        stage=signature.stage,
        layer=signature.layer,
        function=signature.kernel or signature.cause,
        cases=broken.names,
        changed_functions=broken.ran,
        example=example,
    )


def _answer_facts(answer: ComparedCase, run: RunSpec) -> AnswerFacts:
    base, head = (SideFacts(status=side.status, rule=side.rule, line=side.line) for side in (answer.base, answer.head))
    entry, side = answer.question.entry, "BASE" if answer.group == "newly fixed" else "HEAD"
    portable = "" if entry is None else replace(run, release=side, view=answer.question.view).command("check", entry.id)
    return AnswerFacts(
        name=answer.question.name,
        kind="case" if entry is None else "entry",
        model=answer.question.case.model,
        shape=answer.question.shape,
        group=answer.group,
        ran_change=answer.reached,
        ran_on_base=not answer.believed,
        base=base,
        head=head,
        known=answer.known,
        again=answer.again,
        portable=portable,
        folder=str(answer.folder or ""),
    )


def comparison_page(folder: Path) -> Document:
    """The document of a comparison's run folder. Raises InputError for a record that cannot be read."""
    return document_of(read_facts(folder / RECORD, ComparisonFacts, "the run folder of `eagletwin compare`"), folder)


def document_of(one: ComparisonFacts, folder: Path) -> Document:
    """The report. folder: where its run folder is now."""
    title = TITLES[one.engine]
    believed = (("live bugs on both sides by their code, not run", ", ".join(one.believed)),) if one.believed else ()
    return Document(
        title=f"HEAD {one.head.name} against BASE {one.base.name}",
        status=one.headline.lower(),
        kind=KINDS.get(one.exit_code, "doubt"),
        headline=one.sentence,
        lines=tuple(one.remarks),
        facts=(("BASE", f"{title} {one.base.version}"), ("HEAD", f"{title} {one.head.version}"), *believed),
        reason=one.not_seen,
        sections=(
            DocumentSection(heading="Newly broken", items=tuple(_broken(folder, one)), found=True),
            *(_group(one, group) for group in _MEANS),
            _functions(one),
            _acceptance(one.acceptance),
            *left_out(one.not_looked_at),
            _all(one.answers),
        ),
        again=(one.command,),
        portable=one.portable,
        files=(RECORD,),
        folder=one.folder,
    )


def _broken(folder: Path, one: ComparisonFacts) -> Iterator[Item]:
    """Each way in which HEAD is newly broken, with its smallest case."""
    for broken in one.broken:
        example = broken.example
        lines = [f"HEAD: {example.line}.{f' Known: {example.known}.' if example.known else ''}"]
        lines.append(f"Smallest: {example.size}.{f' Shrunk: {example.shrunk}.' if example.shrunk else ''}")
        lines += ["Not minimal: time was up. A larger --shrink-minutes shrinks further."] * example.partial
        if broken.changed_functions:
            lines.append(f"Changed functions that each of the cases runs: {join_names(broken.changed_functions)}.")
        yield Item(
            title=f"{broken.what}, {count(len(broken.cases), 'case')}: {join_names(broken.cases, _CASES)}",
            lines=tuple(lines),
            again=example.again,
            portable=example.portable,
            case=pretty_case(msgspec.convert(example.case, Case)),
            folder=example.folder,
            href=page_beside(folder, one.folder, example.folder),
        )


def _group(one: ComparisonFacts, group: str) -> DocumentSection:
    """The cases of a group one by one, but the engine's own bugs, which are as they were."""
    answers = [answer for answer in one.answers if answer.group == group]
    shown = [answer for answer in answers if not (group == "still diverged" and answer.known)]
    lines = (_MEANS[group],) if shown else ()
    return DocumentSection(heading=group.capitalize(), lines=lines, items=tuple(map(_item, shown)))


def _item(answer: AnswerFacts) -> Item:
    known = f" Known: {answer.known}." if answer.known else ""
    base, head = (side.line or side.status for side in (answer.base, answer.head))
    lines = {"newly fixed": (f"BASE: {base}.",), "still diverged": (f"{head}.{known}",)}
    said = lines.get(answer.group, (f"BASE: {base}.", f"HEAD: {head}.{known}"))
    return Item(title=answer.name, lines=said, again=answer.again, portable=answer.portable)


def _functions(one: ComparisonFacts) -> DocumentSection:
    """The functions that differ, and how many of them ran."""
    rows, run, idle = [], set[str](), set[str]()
    for side, differs in one.functions.items():
        run, idle, name_of = run | {*differs.run}, idle | {*differs.not_run}, side.upper()
        rows += [row(name, name_of, f"{often} of {differs.runs}", tags=("run", name_of)) for name, often in differs.run.items()]
        rows += [row(name, name_of, TableCell("not run", "doubt"), tags=("not run", name_of)) for name in differs.not_run]
    functions = table(
        "Changed functions",
        ("function", "side", "in runs"),
        rows,
        filters=(("Function", ("run", "not run")), ("Side", SIDES)),
        searched=True,
        detail=True,
        note="A function counts as run when a changed statement of it ran.",
    )
    title = f"Changed functions: {len(run)} run, {len(idle - run)} not run" if one.functions else "Changed functions: not known"
    lines = tuple(one.changes)
    return DocumentSection(heading="What differs between the two", lines=lines, tables=(functions,), folded=title)


def _acceptance(accepted: list[AcceptedFacts]) -> DocumentSection:
    rows = []
    for one in accepted:
        base, head = (side.mean for side in (one.base, one.head))
        fell = base is not None and head is not None and head < base
        change = TableCell(one.change, "wrong" if fell else "right" if one.change == "same" else "")
        said = ("no round" if mean is None else f"{mean:.3f}" for mean in (base, head))
        rows.append(row(one.model, one.shape, str(one.cases), *said, change))
    caption = "Tokens a round commits, by configuration"
    line = "Tokens a round commits, over generated cases that ran on both sides; the bonus token counts."
    line = line if rows else "Tokens a round commits: no generated case ran on both sides."
    tables = (table(caption, ("model", "shape", "cases", *SIDES, "change"), rows),)
    return DocumentSection(heading="Tokens a round commits", lines=(line,), tables=tables)


def _all(answers: list[AnswerFacts]) -> DocumentSection:
    def side_cell(side: SideFacts) -> TableCell:
        return TableCell(side.line or side.status, _STATUSES.get(side.status, ""))

    kinds = {"entry": "entry of the ledger", "case": "generated"}
    rows = [
        row(
            *(one.name, one.group, one.model, one.shape, side_cell(one.base), side_cell(one.head), one.known, one.again),
            tags=(one.group, one.model, kinds[one.kind]),
        )
        for one in answers
    ]
    cases = table(
        "Cases on both sides",
        ("case", "group", "model", "shape", *SIDES, "known as", "again"),
        rows,
        filters=(("Group", GROUPS), ("Model", sorted({one.model for one in answers})), ("Kind", tuple(kinds.values()))),
        searched=True,
        detail=True,
    )
    return DocumentSection(heading="All cases", tables=(cases,), brief="")
