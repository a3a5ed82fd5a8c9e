"""The outcome and the report of a bisection: which version made the change or which features it takes, on what evidence, at
what cost."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from eagletwin.harness.core.case import Case
from eagletwin.harness.core.terminal import count, fold, times
from eagletwin.harness.page.document import Document, DocumentSection, Table, TableCell, table
from eagletwin.harness.page.render import NAME

from .measure import Reduction
from .state import (
    STATE,
    BisectionFolder,
    Fault,
    Found,
    Looked,
    Mark,
    Unclear,
    brief,
    conclude,
    doubt,
    end_mark,
    fault_of,
    mark,
    next_between,
    next_end,
    read_state,
)

# The outcome: over published releases one at a time, and of either kind. How the marks of versions follow from what was seen.


@dataclass(frozen=True, slots=True)
class VersionsOutcome:
    """versions, oldest first, to which the indices of `found` refer; looked: all that were looked at, in order.

    fault    what was looked for; None: nothing, for no end shows it
    unclear  why it has no answer, unless too few versions can be decided
    names    what a person calls a version, where that is not its own name
    """

    versions: tuple[str, ...]
    looked: Mapping[str, Looked]
    found: Found
    fault: Fault | None
    rule: str = ""
    unclear: str = ""
    names: Mapping[str, str] = field(default_factory=dict)

    def name(self, version: str) -> str:
        return self.names.get(version, version)

    def why_not(self, version: str) -> str:
        """Why a version cannot be decided; "" if it can, or was not looked at."""
        looked = self.looked.get(version)
        if looked is None:
            return ""
        if self.fault is None:
            return doubt(looked) if end_mark(looked, self.rule) == "skip" else ""
        return mark(looked, self.fault)[1]

    @property
    def answered(self) -> bool:
        """Whether a first version is named."""
        return self.found.exact and not self.unclear


def marks(versions: Sequence[str], looked: Mapping[str, Looked], fault: Fault | None, rule: str) -> dict[int, Mark]:
    """The marks of the versions that were looked at, by index. fault: None as long as it is not known where it shows."""
    seen = ((index, looked[version]) for index, version in enumerate(versions) if version in looked)
    return {index: end_mark(one, rule) if fault is None else mark(one, fault)[0] for index, one in seen}


def fault_between(versions: Sequence[str], looked: Mapping[str, Looked], rule: str, *, anywhere: bool) -> Fault | None:
    """The fault by which the outermost versions that can be decided differ. Raises Unclear."""
    decided = sorted(index for index, mark in marks(versions, looked, None, rule).items() if mark != "skip")
    if len(decided) < 2:
        return None
    return fault_of(looked[versions[decided[0]]], looked[versions[decided[-1]]], anywhere=anywhere)


def outcome_of(
    versions: Sequence[str],
    looked: Mapping[str, Looked],
    fault: Fault | None,
    rule: str,
    *,
    unclear: str = "",
    names: Mapping[str, str] = MappingProxyType({}),
) -> VersionsOutcome:
    """What follows from all that was seen."""
    found = conclude(len(versions), marks(versions, looked, fault, rule))
    seen = {version: looked[version] for version in versions if version in looked}
    return VersionsOutcome(tuple(versions), seen, found, fault, rule, unclear, names)


def bisect_releases(run: BisectionFolder, look: Callable[[str], Looked]) -> VersionsOutcome:
    """Search the plan's versions; `look` looks at one of them. What is known already is not looked at again."""
    plan, looked = run.state.plan, run.state.looked
    versions, rule = plan.versions, plan.rule or plan.expected

    def look_at(index: int) -> None:
        version = versions[index]
        run.tell(f"{version}: looking …")
        run.add(look(version))
        run.tell(progress_line(looked[version]))

    while (index := next_end(len(versions), marks(versions, looked, None, rule))) is not None:
        look_at(index)
    try:
        fault = fault_between(versions, looked, rule, anywhere=bool(plan.rule))
    except Unclear as error:
        return outcome_of(versions, looked, None, rule, unclear=str(error))
    if fault is not None:
        for choose in (next_end, next_between):
            while (index := choose(len(versions), marks(versions, looked, fault, rule))) is not None:
                look_at(index)
    run.state.finished = True
    return outcome_of(versions, looked, fault, rule)


def progress_line(looked: Looked) -> str:
    """A line of progress."""
    usual = looked.usual
    why = f" ({usual.why})" if usual.status == "unknown" and usual.why else ""
    return f"{looked.version}: {brief(usual)}{why}, {count(len(looked.sightings), 'look')}, {looked.seconds:.1f} s"


REPORT = "report.txt"
WIDTH = 112  # columns of a report in a file
_MOST = 12  # versions of a range that are listed by name


def version_report(
    outcome: VersionsOutcome, case: Case, run: BisectionFolder, command: Callable[[str], str], columns: int = WIDTH
) -> str:
    """The answer of a bisection over releases or commits. command: what to type to see one version. columns: of a line."""
    plan, found, versions = run.state.plan, outcome.found, outcome.versions
    kind = "commit" if plan.checkout else "release"
    fault = outcome.fault
    sought = "" if fault is None else f": {fault.rule}{f' at {fault.place}' if fault.place else ', wherever it shows'}"
    lines = [f"{_headline(outcome)}  {case.name}{sought}", ""]
    width = max((len(outcome.name(version)) for version in outcome.looked), default=0)
    lines += [_row(outcome, version, width) for version in outcome.looked]
    lines += ["", *fold(_conclusion(outcome, kind), columns)]
    runs, seconds = sum(looked.runs for looked in outcome.looked.values()), run.seconds
    of = f" of {len(plan.versions)}" if not plan.checkout else ""
    lines += fold(f"{len(outcome.looked)}{of} {kind}s looked at, the case run {times(runs)}, {seconds:.1f} s.", columns)
    if found.came is not None and found.old is not None and found.new is not None:
        lines += [""]
        for index, bad in ((found.old, not found.came), (found.new, found.came)):
            lines += [f"  {'bad: ' if bad else 'good:'} {command(versions[index])}"]
    return "\n".join([*lines, f"  folder: {run.folder}"])


def _headline(outcome: VersionsOutcome) -> str:
    found = outcome.found
    if outcome.unclear or found.old is None or found.new is None:
        return "CANNOT TELL"
    if found.came is None:
        return "NO CHANGE"
    word = "CAME" if found.came else "FIXED"
    new = outcome.name(outcome.versions[found.new])
    return f"{word} WITH {new}" if found.exact else f"{word} AFTER {outcome.name(outcome.versions[found.old])}, UP TO {new}"


def _row(outcome: VersionsOutcome, version: str, width: int) -> str:
    looked = outcome.looked[version]
    why = outcome.why_not(version)
    text = f"skipped: {why}" if why else brief(looked.usual)
    return f"  {outcome.name(version):{width}}  {text}  ({count(len(looked.sightings), 'look')}, {looked.seconds:.1f} s)"


def _conclusion(outcome: VersionsOutcome, kind: str) -> str:
    found, versions = outcome.found, outcome.versions
    if outcome.unclear:
        choose = any(looked.usual.status == "diverged" for looked in outcome.looked.values())
        remedy = " --rule names the one that counts, --without switches one off." if choose else ""
        return f"No answer: {outcome.unclear}.{remedy}"
    if found.old is None or found.new is None:
        return f"No answer: fewer than two {kind}s can be decided."
    old, new = outcome.name(versions[found.old]), outcome.name(versions[found.new])
    beyond = f" What lies beyond them cannot be decided: {_list_versions(outcome, found.outside)}." if found.outside else ""
    if found.came is None:
        alike = "is equal" if outcome.fault is None else "shows it"
        more = "" if outcome.fault is None else f" It came with {old} or before it."
        too = "so is" if outcome.fault is None else "so does"
        between = "; what is between was not looked at" if found.new - found.old > 1 else ""
        return f"{old} {alike}, and {too} {new}{between}.{more}{beyond}"
    word = "bad" if found.came else "good"
    shows = f"{new} shows it, and {old} does not" if found.came else f"{old} shows it, and {new} no longer does"
    if found.exact:
        return f"{shows}: the first {word} {kind} is {new}.{beyond}"
    between = _list_versions(outcome, found.between)
    return f"{shows}. Between them {between} cannot be decided, so the first {word} {kind} is one of these, or {new}.{beyond}"


def _list_versions(outcome: VersionsOutcome, indices: tuple[int, ...]) -> str:
    names = [outcome.name(outcome.versions[index]) for index in indices]
    return ", ".join(names[:_MOST]) + (f" and {len(names) - _MOST} more" if len(names) > _MOST else "")


def feature_report(reduction: Reduction, case: Case, folder: Path, again: str, hint: str = "", columns: int = WIDTH) -> str:
    """The answer of a feature bisection. again: the command for the smallest case; hint: what to try if nothing diverged."""
    reduced = reduction.reduced
    cost = f"{count(reduction.variants, 'variant')}, run {times(reduction.runs)}, {reduction.seconds:.1f} s."
    if reduced.fault is None:
        usual = reduced.whole.usual
        why = f" ({usual.why})" if usual.why else ""
        lines = [f"NOTHING TO REDUCE  {case.name}: {brief(usual)}{why}", ""]
        lines += fold(
            "A feature bisection begins with a case that diverges. --revert, --patch, --rule and a tree choose one."
            + (f" {hint}" if hint else ""),
            columns,
        )
        return "\n".join([*lines, *fold(cost, columns), "", f"  folder: {folder}"])
    names = ", ".join(feature.words for feature in reduced.needed) or "NO FEATURE"
    lines = [f"NEEDS {names}  {case.name}: {reduced.fault.rule}", ""]
    for feature in reduced.needed:
        doubt = reduced.doubts[feature.words]
        lines += fold(
            f"{feature.words}: {feature.says(reduced.least)}. Without it ({feature.plain}) "
            + (f"the result is unknown: {doubt}." if doubt else "the case is equal."),
            columns,
        )
    if reduced.gone:
        lines += ["", *fold(f"Does not need: {', '.join(feature.words for feature in reduced.gone)}.", columns)]
    lines += ["", *_circumstances(reduction, columns), *fold(cost, columns)]
    return "\n".join([*lines, "", f"  smallest: {again}", f"  folder: {folder}"])


def _circumstances(reduction: Reduction, columns: int) -> list[str]:
    """The smallest case without the patches, and on the other kernel runtime."""
    lines, fault = [], reduction.reduced.fault
    assert fault is not None
    if reduction.control is not None:
        usual = reduction.control.usual
        more = "" if usual.status == "equal" else ": so it is not, or not alone, what was changed"
        text = f"Without what was changed (--revert, --remedy, --patch) the smallest case is {brief(usual)}{more}."
        lines += fold(text, columns)
    if reduction.interpreted is not None:
        verdict, why = mark(reduction.interpreted, fault)
        says = {
            "bad": "shows it too: the fast kernel runtime has no part in it",
            "good": "is equal: what diverges is the fast kernel runtime, or what it makes of a kernel",
            "skip": f"is unknown: {why}",
        }
        text = f"With Triton's interpreter in place of the fast kernel runtime the smallest case {says[verdict]}."
        lines += fold(text, columns)
    return lines


def bisection_page(folder: Path) -> Document:
    """The page of a bisection's run folder, made of what lies in it."""
    report = (folder / REPORT).read_text(encoding="utf-8")
    headline, _, rest = report.partition("\n")
    word, _, said = headline.partition("  ")
    looked = read_state(folder).looked if (folder / STATE).is_file() else {}
    tables = (_versions(folder, looked),) if looked else _variants(folder)
    return Document(
        title=f"Bisection: {said.strip() or folder.name}",
        status="unknown" if word.startswith(("CANNOT", "NO ANSWER")) else "bisected",
        headline=word,
        sections=(DocumentSection(heading="Answer", text=rest.strip("\n"), tables=tables),),
        files=tuple(name for name in (REPORT, STATE) if (folder / name).is_file()),
    )


_KINDS = {"equal": "right", "diverged": "wrong"}


def _versions(folder: Path, looked: Mapping[str, Looked]) -> Table:
    rows = list[tuple[str | TableCell, ...]]()
    for version, one in looked.items():
        usual = one.usual
        page = next((file for file in sorted(folder.glob(f"*/look-1/{NAME}")) if file.parts[-3].startswith(version)), None)
        name = TableCell(version, href=page.relative_to(folder).as_posix() if page is not None else "")
        said = TableCell(brief(usual), _KINDS.get(usual.status, "doubt"))
        rows.append((name, said, usual.place, usual.why, f"{count(len(one.sightings), 'look')}, {one.seconds:.1f} s"))
    return table("What was looked at", ("version", "result", "place", "why", "cost"), rows)


def _variants(folder: Path) -> tuple[Table, ...]:
    """The variants of a bisection over features: pages of their own."""
    pages = sorted(folder.glob(f"variant-*/look-1/{NAME}"), key=lambda file: int(file.parts[-3].rpartition("-")[2]))
    rows = ((TableCell(file.parts[-3], href=file.relative_to(folder).as_posix()),) for file in pages)
    return (table("Variants, in the order in which they were run", ("variant",), rows),)
