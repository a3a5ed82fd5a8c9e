"""A comparison as a person reads it on a terminal, as a program reads it (JSON), and as a page, which is made of the JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from eagletwin.harness.core.differs import Changes, shortened
from eagletwin.harness.core.errors import EXIT_UNKNOWN
from eagletwin.harness.core.run_spec import DEFAULT_RUN, RunSpec
from eagletwin.harness.core.signature import Signature
from eagletwin.harness.core.terminal import count, fold
from eagletwin.harness.engines.provision import releases
from eagletwin.harness.page.render import NAME as PAGE
from eagletwin.harness.page.render import Page, PageSection, Table, TableCell

from ..fuzz.smaller import sizes, smaller
from ..page_facts import left_out, page_beside, read_facts, row
from ..result import (
    AcceptedFacts,
    AnswerFacts,
    BrokenFacts,
    ComparisonFacts,
    ExampleFacts,
    FunctionsFacts,
    NamedFacts,
    RoundsFacts,
    SideFacts,
)
from .groups import GROUPS, Answered, Breakage, Example, Group, Result, RoundsOfBoth, breakages, example_of

SIDES = ("BASE", "HEAD")
SHOWN: tuple[Group, ...] = ("newly fixed", "still diverged", "diverged otherwise", "unknown")  # one by one; the rest is counted
NOT_LOOKED_AT = "Not looked at, and the option of `fuzz` for it"
NAMES = 8  # cases of a breakage that are named


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparing:
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
    examples: Mapping[Signature, Example] = field(default_factory=dict)
    accepted: Sequence[RoundsOfBoth] = ()
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
    def broken(self) -> list[tuple[Breakage, Example]]:
        """What is newly broken, each with the case to read."""
        return [(one, self.examples.get(one.signature) or example_of(one)) for one in breakages(self.result.answers)]

    @property
    def asked(self) -> str:
        """How much was run, in words."""
        entries = sum(answer.question.entry is not None for answer in self.result.answers)
        cases = len(self.result.answers) - entries
        bugs = f"{entries} {'entry' if entries == 1 else 'entries'} of the ledger"
        text = f"{count(cases, 'generated case')} and {bugs} were compared in {self.seconds:.0f} s."
        if self.left:
            text += f" {self.left} more of the ledger did not run, since the command was ended."
        if self.believed:
            bugs = count(len(self.believed), "live bug")
            text += f" {bugs} of SGLang did not run: both sides have the code of {releases()[-1]}, where each is proven."
        if alone := sum(answer.believed for answer in self.result.answers):
            text += f" Of the entries {alone} ran on HEAD alone: BASE has the fixes of {releases()[-1]}, where each is proven."
        if self.unreached:
            text += f" Not reached in this mode: {shortened(self.unreached)}."
        return text

    @property
    def known_text(self) -> str:
        """SGLang's own live bugs, in a sentence; "" if none was met."""
        alike = len(self.result.of("still diverged")) - len(self.listed("still diverged"))
        parts = [f"{count(alike, 'case')} diverged by them on both sides"] * bool(alike)
        parts += [f"generated cases ran with the fixes of {', '.join(self.known)}"] * bool(self.known)
        return f"SGLang's known live bugs: {'; '.join(parts)}." if parts else ""

    def functions(self, shown: int) -> list[str]:
        """What differs, run and not run, `shown` names of a kind: once, if each side was compared with the other."""
        found = []
        base, head = (changes.differs for changes in self.changes)
        for side, changes in zip(SIDES, self.changes, strict=True):
            differs = changes.differs
            if differs is None or (self.mutual and side == "BASE" and head is not None):
                continue
            often = [f"{name} in {changes.ran[name]} of {count(changes.of, 'case')}" for name in differs.ran]
            lines = differs.listed(often, shown=shown, gone="Only in BASE" if self.mutual else "Removed")
            lines = lines or ["Nothing but comments, documentation, and what the other has alone."]
            lines += [changes.effect] if changes.effect else []
            found += lines if self.mutual else [f"{side}: {line}" for line in lines]
        alone = [name for name in base.ran if name not in head.functions] if base and head and self.mutual else []
        return [*found, *[f"Run in BASE, which alone has them: {shortened(alone, shown)}."] * bool(alone)]

    def listed(self, group: Group) -> list[Answered]:
        """The answers of a group that are listed one by one. SGLang's own bugs, which are as they were, are none of them."""
        own = group == "still diverged"
        return [answer for answer in self.result.of(group) if not (own and answer.known)]

    @property
    def no_functions(self) -> str:
        """What to say where no side was watched."""
        if not self.result.told:
            return "No changed function is known to have run, since no case ran to a verdict on both sides."
        return "Which changed functions ran is not known: the two are releases, or differ in too many files to list."


def breakage_text(broken: Breakage, example: Example) -> list[str]:
    """What HEAD breaks in one way, in sentences."""
    lines = [f"HEAD: {example.line}.{f' Known: {example.known}.' if example.known else ''}"]
    changes = smaller(example.found, example.case) if example.found is not None else ""
    lines.append(f"Smallest: {sizes(example.case)}.{f' Shrunk: {changes}.' if changes else ''}")
    if example.partial:
        lines.append("Not minimal: time was up. A larger --shrink-minutes shrinks further.")
    if broken.ran:
        lines.append(f"Changed functions that each of the cases runs: {shortened(broken.ran)}.")
    return lines


def answer_text(answer: Answered) -> list[str]:
    """What each side made of a case, in sentences."""
    known = f" Known: {answer.known}." if answer.known else ""
    if answer.group == "newly fixed":
        return [f"BASE: {answer.base.text}."]
    if answer.group == "still diverged":
        return [f"{answer.head.text}.{known}"]
    return [f"BASE: {answer.base.text}.", f"HEAD: {answer.head.text}.{known}"]


def text_of(one: Comparing, columns: int) -> str:
    """The report for a terminal."""
    lines = [f"{one.headline}  HEAD {one.names[1]} against BASE {one.names[0]}"]
    lines += [*fold(f"NOT SEEN  {one.not_seen}", columns, "", " " * 10), ""] if one.not_seen else [""]
    lines += [*fold(one.sentence, columns), *fold(one.asked, columns), *fold(one.known_text, columns)]
    lines += ["", "  Newly broken:"] if one.broken else []
    for broken, example in one.broken:
        title = f"{broken.signature}, {count(len(broken.answers), 'case')}: {shortened(broken.names, NAMES)}"
        lines += fold(title, columns, "    ", "      ")
        lines += [line for text in breakage_text(broken, example) for line in fold(text, columns, "      ", "        ")]
        lines += [f"      again:  {example.again}"] if example.again else []
        lines += [f"      folder: {example.folder}"] if example.folder is not None else []
    for group in SHOWN:
        answers = one.listed(group)
        if answers:
            lines += ["", f"  {group.capitalize()}:"]
        for answer in answers:
            said = " ".join(answer_text(answer))
            lines += fold(f"{answer.question.name}: {said}", columns, "    ", "      ")
            lines += [f"      again:  {answer.again}"] if answer.again else []
    lines += ["", "  What differs between the two:"]
    for text in one.functions(20) or [one.no_functions]:
        lines += fold(text, columns, "    ", "      ")
    lines += ["", "  Tokens a round commits, over the generated cases that ran on both sides:"]
    for accepted in one.accepted:
        base, head, change = accepted.text
        lines.append(
            f"    {accepted.model}, {accepted.shape}, {count(accepted.cases, 'case')}: {base} -> {head}  {change}".rstrip()
        )
    lines += [] if one.accepted else ["    none was run"]
    lines += ["", f"  {NOT_LOOKED_AT}:"] if one.not_looked_at else []
    lines += [line for text in one.not_looked_at for line in fold(text, columns, "    ", "      ")]
    return "\n".join([*lines, "", f"  again:  {one.command}", f"  folder: {one.folder}", f"  page:   {one.folder / PAGE}"])


def facts_of(one: Comparing) -> ComparisonFacts:
    """The object that --json prints, and comparison.json holds (docs/guide/compare.md)."""
    result = one.result
    return ComparisonFacts(
        result="cannot tell" if one.interrupted and not one.broken else result.word.lower().lstrip("0123456789 "),
        sentence=one.sentence,
        exit_code=one.exit_code,
        not_seen=one.not_seen,
        interrupted=one.interrupted,
        base=NamedFacts(name=one.names[0], version=one.versions[0]),
        head=NamedFacts(name=one.names[1], version=one.versions[1]),
        command=one.command,
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
        answers=[_answer_facts(answer) for answer in result.answers],
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
        acceptance=[_accepted_facts(accepted) for accepted in one.accepted],
    )


def _breakage_facts(broken: Breakage, example: Example) -> BrokenFacts:
    signature = broken.signature
    return BrokenFacts(
        what=str(signature),
        rule=signature.rule,
        stage=signature.stage,
        layer=signature.layer,
        function=signature.kernel or signature.cause,
        cases=broken.names,
        changed_functions=broken.ran,
        example=ExampleFacts(
            line=example.line,
            case=msgspec.to_builtins(example.case),
            changes=list(example.changes),
            size=sizes(example.case),
            looks=example.looks,
            partial=example.partial,
            known=example.known,
            again=example.again,
            folder=str(example.folder or ""),
        ),
    )


def _answer_facts(answer: Answered) -> AnswerFacts:
    base, head = (SideFacts(status=side.status, rule=side.rule, line=side.line) for side in (answer.base, answer.head))
    return AnswerFacts(
        name=answer.question.name,
        kind="case" if answer.question.entry is None else "entry",
        model=answer.question.case.model,
        shape=answer.question.shape,
        group=answer.group,
        ran_change=answer.reached,
        ran_on_base=not answer.believed,
        base=base,
        head=head,
        known=answer.known,
        again=answer.again,
        folder=str(answer.folder or ""),
    )


def _accepted_facts(one: RoundsOfBoth) -> AcceptedFacts:
    means = one.means or (None, None)
    base, head = (RoundsFacts(rounds=one.rounds[n], tokens=one.tokens[n], mean=means[n]) for n in (0, 1))
    return AcceptedFacts(model=one.model, shape=one.shape, cases=one.cases, base=base, head=head)


RECORD = "comparison.json"  # in the run folder: what --json prints
_KINDS = {"equal": "right", "broken": "wrong", "unknown": "doubt"}
_MEANS = {
    "newly fixed": "BASE has them wrong and HEAD right.",
    "still diverged": "BASE and HEAD have them wrong in the same way.",
    "diverged otherwise": "BASE and HEAD have them wrong, each in another way.",
    "unknown": "Nothing can be said of them on one side, or on both.",
}


def comparison_page(folder: Path) -> Page:
    """The page of a comparison's run folder. Raises InputError for a record that cannot be read."""
    one = read_facts(folder / RECORD, ComparisonFacts, "the run folder of `eagletwin compare`")
    groups = [group for group in GROUPS if one.counts.get(group)]
    facts = [
        ("BASE", f"{one.base.name} ({one.base.version})"),
        ("HEAD", f"{one.head.name} ({one.head.version})"),
        ("compared", f"{count(len(one.answers), 'case')} in {one.seconds:.1f} s"),
        *((group, count(one.counts[group], "case")) for group in groups),
    ]
    facts += [("not run before it was ended", count(one.not_run, "case"))] if one.not_run else []
    facts += [("live bugs on both sides by their code, not run", ", ".join(one.believed))] if one.believed else []
    facts += [("not reached in this mode", ", ".join(one.not_reached))] if one.not_reached else []
    shown = [(group, [answer for answer in one.answers if answer.group == group]) for group in SHOWN]
    return Page(
        title=f"HEAD {one.head.name} against BASE {one.base.name}",
        status=one.result,
        headline=one.sentence,
        facts=tuple(facts),
        reason=one.not_seen,
        sections=(
            _broken(folder, one),
            *(_group(group, answers) for group, answers in shown if answers),
            _functions(one),
            _acceptance(one.acceptance),
            *left_out(one.not_looked_at),
            *_all(one.answers),
        ),
        again=(one.command,),
        files=(RECORD,),
    )


def _broken(folder: Path, one: ComparisonFacts) -> PageSection:
    """Each way in which HEAD is newly broken, with the page of its smallest case."""
    rows = []
    for broken in one.broken:
        example = broken.example
        partial = ", not minimal: time was up" if example.partial else ""
        rows.append(
            row(
                TableCell(broken.what, href=page_beside(folder, one.folder, example.folder)),
                TableCell(example.line, "wrong"),
                f"{len(broken.cases)}: {shortened(broken.cases, NAMES)}",
                f"{example.size}{partial}",
                shortened(broken.changed_functions, NAMES) or "none that all of them run",
                example.known or "new",
                example.again,
            )
        )
    header = ("way", "HEAD", "cases", "smallest", "changed functions that each runs", "known as", "again")
    table = Table(caption="What BASE has right and HEAD wrong, each way once", header=header, rows=tuple(rows), searched=True)
    return PageSection(
        heading="Newly broken", lines=() if rows else ("Nothing is newly broken.",), tables=(table,) if rows else ()
    )


def _group(group: str, answers: list[AnswerFacts]) -> PageSection:
    rows = tuple(row(one.name, _said(one.base), _said(one.head), one.known, one.again) for one in answers)
    header = ("case", "BASE", "HEAD", "known as", "again")
    table = Table(caption=f"Cases: {group}", header=header, rows=rows, searched=True)
    return PageSection(heading=group.capitalize(), lines=(_MEANS[group],), tables=(table,))


def _said(side: SideFacts) -> TableCell:
    return TableCell(side.line or side.status, _KINDS.get(side.status, ""))


def _functions(one: ComparisonFacts) -> PageSection:
    """What differs between the two, and how much of it ran."""
    lines, rows = list[str](), []
    for side, differs in one.functions.items():
        others = {
            "changed outside of functions": differs.outside_of_functions,
            "gone": differs.gone,
            "not run here": differs.not_run_here,
        }
        lines += [f"{side.upper()}: {what}: {', '.join(names)}." for what, names in others.items() if names]
        for name, often in differs.run.items():
            rows.append(row(name, side.upper(), f"{often} of {differs.runs}", tags=("run", side.upper())))
        idle = TableCell("not run", "doubt")
        rows += [row(name, side.upper(), idle, tags=("not run", side.upper())) for name in differs.not_run]
    if not one.functions:
        lines.append("Which functions changed is not known: the two are releases, differ in too many files, or did not run.")
    elif not rows:
        lines.append("No function changed.")
    table = Table(
        caption="Changed functions",
        header=("function", "side", "in runs"),
        rows=tuple(rows),
        filters=(("Function", ("run", "not run")), ("Side", SIDES)),
        searched=True,
        note="A function counts as run when it is called; whether its changed lines ran is not known.",
    )
    return PageSection(heading="Changed functions", lines=tuple(lines), tables=(table,) if rows else ())


def _acceptance(accepted: list[AcceptedFacts]) -> PageSection:
    rows = []
    for one in accepted:
        base, head = one.base.mean, one.head.mean
        same = (one.base.rounds, one.base.tokens) == (one.head.rounds, one.head.tokens)
        change = "" if base is None or head is None else "same" if same else f"{(head - base) / base:+.1%}"
        fell = base is not None and head is not None and head < base
        means = ["no round" if mean is None else f"{mean:.3f}" for mean in (base, head)]
        changed = TableCell(change, "wrong" if fell else "right" if same and change else "")
        rows.append(row(one.model, one.shape, str(one.cases), *means, changed))
    header = ("model", "shape", "cases", "BASE", "HEAD", "change")
    table = Table(caption="Tokens a round commits, by configuration", header=header, rows=tuple(rows))
    line = "Over the generated cases that ran on both sides; the bonus token counts." if rows else "No such case was run."
    return PageSection(heading="Acceptance", lines=(line,), tables=(table,) if rows else ())


def _all(answers: list[AnswerFacts]) -> list[PageSection]:
    rows = tuple(
        row(
            one.name,
            one.group,
            one.model,
            one.shape,
            _said(one.base),
            _said(one.head),
            tags=(one.group, one.model, "entry of the ledger" if one.kind == "entry" else "generated"),
        )
        for one in answers
    )
    table = Table(
        caption="Cases on both sides",
        header=("case", "group", "model", "shape", "BASE", "HEAD"),
        rows=rows,
        filters=(
            ("Group", tuple(group for group in GROUPS if any(one.group == group for one in answers))),
            ("Model", tuple(sorted({one.model for one in answers}))),
            ("Kind", ("generated", "entry of the ledger")),
        ),
        searched=True,
    )
    return [PageSection(heading="All cases", tables=(table,))] if rows else []
