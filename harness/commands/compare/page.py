"""The page of a comparison, made of its comparison.json alone: the comment for a pull request, and all that it counts."""

from pathlib import Path

from eagletwin.harness.core.differs import shortened
from eagletwin.harness.core.words import count
from eagletwin.harness.page.model import Page, PageSection, Table, TableCell

from ..page_facts import left_out, page_beside, read_facts, row
from ..result import AcceptedFacts, AnswerFacts, ComparisonFacts, SideFacts
from .groups import GROUPS
from .report import NAMES, SHOWN, SIDES

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
