"""A search reported to a person, and written down for a program."""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from eagletwin.cases.ledger import LEDGER
from eagletwin.cases.reach import unreached
from eagletwin.harness.core.case import pretty_case
from eagletwin.harness.core.differs import shortened, unknown_changes
from eagletwin.harness.core.errors import EXIT_DIVERGED, EXIT_EQUAL, EXIT_INTERRUPTED, EXIT_UNKNOWN
from eagletwin.harness.core.terminal import count, fold, others_in_plain_decode
from eagletwin.harness.families.dimensions import FEATURES
from eagletwin.harness.page.render import write_page

from .journal import JOURNAL, PastFinding
from .page import MEANING, SUMMARY, excused_text, search_page
from .search import Fuzz
from .shrinking import Finding, Shrinking
from .smaller import sizes, smaller
from .tally import MOST_UNDECIDED, KnownBug, Tally
from .unsearched import TOPICS


def exit_code(search: Fuzz, findings: Sequence[str]) -> int:
    """Of a search that came to its end. findings: the status of each."""
    if "diverged" in findings:
        return EXIT_DIVERGED
    unseen = search.trials.run.strict and search.tally.changes.headline
    return EXIT_EQUAL if search.looked_enough and not findings and not unseen else EXIT_UNKNOWN


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


def tally_text(
    search: Fuzz, findings: Sequence[Finding | PastFinding], columns: int, code: int | None = None, *, verbose: bool = False
) -> str:
    """What was run, and what it says. A finding that was still being shrunk counts as found.

    code: the exit code; None: an error ends the command, whose code is the error's. verbose: with what the cases had, which
    bugs they showed, what was set aside, and the options for what was not looked at: the page has all of that.
    """
    tally, seconds = search.tally, search.seconds
    unseen = tally.changes.headline
    lines = [_headline(search, code), *(fold(f"NOT SEEN  {unseen}", columns, "", " " * 10) if unseen else []), ""]
    ends = fold(f"Exit code {code}: {_meaning(search, code)}.", columns, "") if code is not None else []
    if not tally.cases:
        lines += fold(f"No case finished in {seconds:.1f} s: this says nothing about the release.", columns, "")
        lines += _refused(search, columns)
        return "\n".join([*lines, *ends, f"Folder: {search.folder}"])
    for text in (_counts(search), *_left_open(tally)):
        lines += fold(text, columns, "")
    lines += _reached(tally, columns) if verbose else []
    for text in _of_the_change(search, findings):
        lines += fold(text, columns, "")
    for name, number in sorted(tally.fallbacks.items()):
        lines += fold(f"Unchecked in {count(number, 'case')}, since Triton's interpreter ran it: {name}.", columns, "")
    lines += _known(search, columns) if verbose else _known_in_short(search, columns)
    lines += _asides(search, findings, columns) if verbose else []
    lines += _refused(search, columns) if verbose else _refused_in_short(search, columns)
    if tally.deaths:
        lines.append(f"{count(tally.deaths, 'worker')} ended over a block.")
    for lost in tally.lost:
        lines += fold(f"Not searched: {lost}.", columns, "")
    unfinished = search.found[len(findings) :]
    if unfinished:
        lines.append(f"Stopped while shrinking: the smallest case so far is in {unfinished[-1] / 'minimal'}.")
    left_out = tally.left_out(search.trials.host.mode)
    if left_out and verbose:
        lines += ["", "Not looked at, and the option for it:"]
        lines += [line for one in left_out for line in fold(one, columns, "  ", "    ")]
    elif left_out:
        names = [one.partition(" (--")[0].partition(": ")[0] for one in left_out]
        lines += fold(f"Not looked at: {shortened(names, _SHOWN)}.", columns, "")
    if code in (None, EXIT_INTERRUPTED) and (search.folder / JOURNAL).is_file():
        lines.append(f"Continue with: eagletwin fuzz --resume {search.folder}")
    return "\n".join([*lines, "", *ends, f"Folder: {search.folder}" + ("" if verbose else " (report.html; --verbose: here)")])


_SHOWN = 12


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
    return f"{text} Excused: {excused_text(tally.excused)}." if tally.excused else text


def _reached(tally: Tally, columns: int) -> list[str]:
    """What the cases had, and what happened in them."""
    lines = [f"{count(len(tally.configurations), 'configuration')} searched:", *_configurations(tally, columns)]
    drawn = ", ".join(f"{topic.words} {tally.topics[topic.words]}" for topic in TOPICS if tally.topics[topic.words])
    lines += fold(f"Cases with {drawn}.", columns, "") if drawn else []
    reached = ", ".join(f"{name} {tally.exercised[name]}" for name in FEATURES if tally.exercised[name])
    lines += fold(f"Exercised: {reached or 'nothing named'}.", columns, "")
    never = [name for name in FEATURES if not tally.exercised[name]]
    said = "docs/reference/case.md says what each is"
    return lines + (fold(f"Never happened ({said}): {', '.join(never)}.", columns, "") if never else [])


def _of_the_change(search: Fuzz, findings: Sequence[Finding | PastFinding]) -> Iterator[str]:
    """Which changed code ran, and whether that altered anything."""
    changes, source = search.tally.changes, search.trials.host.source
    yield from changes.lines
    if not findings and source.base is None and (unknown := unknown_changes(source.called)):
        yield unknown
    if changes.doubt:
        yield "No case ran any of that, so this search says nothing about it."


def _known_in_short(search: Fuzz, columns: int) -> list[str]:
    """The known bugs in a line, and what keeps the search from telling them from new ones."""
    bugs = sorted(search.tally.known.values(), key=lambda bug: -bug.cases)
    names = [f"{bug.id} ({bug.cases})" if bug.cases else bug.id for bug in bugs]
    lines = fold(f"Known bugs, mended in memory: {shortened(names, _SHOWN)}.", columns, "") if names else []
    base = search.mends.base
    if base is not None and base.refused:
        lines += fold(f"{base.called} was not run beside it, so known bugs count as known: {base.refused}", columns, "")
    if search.mends.unfit:
        lines += fold(f"Remedies that do not fit this SGLang: {shortened(sorted(search.mends.unfit), _SHOWN)}.", columns, "")
    return lines


def _refused_in_short(search: Fuzz, columns: int) -> list[str]:
    names = [name.partition(": ")[0] for name in search.tally.refused]
    return fold(f"Not looked at, as no engine started: {shortened(names, _SHOWN)}.", columns, "") if names else []


def _meaning(search: Fuzz, code: int) -> str:
    strict = code == EXIT_UNKNOWN and search.looked_enough and search.trials.run.strict and search.tally.changes.headline
    return "a changed statement did not run, which --strict does not let pass" if strict and not search.found else MEANING[code]


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
    return f"{cut}{word}  {of}, {_of_known(tally)}{count(len(tally.configurations), 'configuration')}, {seed}"


def _of_known(tally: Tally) -> str:
    wrong = tally.statuses["known"]
    return f"{wrong} wrong by known bugs alone, " if wrong else ""


def _known(search: Fuzz, columns: int) -> list[str]:
    """By known bug: how many cases showed it, and in how many it was mended."""
    bugs = search.tally.known.values()
    if not bugs:
        return []
    lines = fold(
        "Known bugs: what a case shows, and is equal with their fixes. Mended, in memory, they hide nothing:", columns, ""
    )
    for bug in sorted(bugs, key=lambda bug: -bug.cases):
        shown = f"{count(bug.cases, 'case')} ({', '.join(bug.shows)})" if bug.cases else "no case"
        # of two bugs in one case each one's own line says where it was mended
        text = f"{bug.id}: {shown}" + (f"; mended in {count(bug.mended, 'case')}" if bug.mended else "")
        text += f"; eagletwin check {example_of(search.folder, bug)}" if bug.example is not None else ""
        lines += fold(text, columns, "  ", "    ")
    if note := _of_overlap(search):
        lines += fold(note, columns, "  ", "    ")
    tally = search.tally
    if tally.tries:
        text = f"To tell which it is took {count(tally.tries, 'more run')} of {count(tally.tried, 'case')}."
        lines += fold(text, columns, "  ", "    ")
    base = search.mends.base
    if base is not None and base.refused:
        text = (
            f"{base.called} could not be asked whether it is right in such a case, which counts as known then: {base.refused}"
        )
        lines += fold(text, columns, "  ", "    ")
    for name in sorted(search.mends.unfit):
        lines += fold(
            f"{name}: its remedy does not fit this SGLang, so that what it shows counts as new", columns, "  ", "    "
        )
    return lines


def _of_overlap(search: Fuzz) -> str:
    """Why a search without overlap has entries that need it; empty if it has none."""
    ids = [name for bug in search.tally.known.values() for name in bug.id.split(" and ")]
    names = dict.fromkeys(name for name in ids if unreached(LEDGER[name], search.trials.run.mode))
    return (
        f"{', '.join(names)}: of cases whose draft reads the target's rows, which run with overlap in every search."
        if names
        else ""
    )


def example_of(folder: Path, bug: KnownBug) -> Path:
    """The file of the first case that showed a known bug."""
    return folder / "known" / f"{bug.id.replace(' ', '-')}.json"


def _refused(search: Fuzz, columns: int) -> list[str]:
    """Engines that would not start, as this SGLang lacks that or is broken there; and blocks of which no case was drawn."""
    if not search.tally.refused:
        return []
    doubt = {id(one) for one in search.unstarted}
    lines = ["Configurations of which nothing was looked at, and why:"]
    for name, one in search.tally.refused.items():
        more = "; this may be the fault: --not leaves it out" if id(one) in doubt else ""
        lines += fold(f"{name}{more}", columns, "  ", "    ")
    return lines


def _configurations(tally: Tally, columns: int) -> list[str]:
    """One line a model: the values that the cases had. Each configuration by itself is in summary.json."""
    lines = []
    for model in sorted({one.model for one in tally.configurations}):
        of_model = {one: number for one, number in tally.configurations.items() if one.model == model}
        trees = sorted({one.nodes for one in of_model if one.topk > 1})
        nodes = f"; trees of {_values(trees)} nodes" if trees else ""
        parts = ", ".join(
            f"{name} {_values(sorted({getattr(one, name) for one in of_model}))}" for name in ("num_steps", "topk", "page_size")
        )
        lines += fold(f"{model}, {count(sum(of_model.values()), 'case')}: {parts}{nodes}", columns, "  ", "    ")
    return lines


def _values(values: list[int]) -> str:
    return " ".join(map(str, values))


def _asides(search: Fuzz, findings: Sequence[Finding | PastFinding], columns: int) -> list[str]:
    """What was seen and not looked into, each with a case that shows it."""
    if not search.asides:
        return []
    names = {finding.signature: finding.name for finding in findings}
    lines = fold("Set aside, run once and not confirmed, with an example of each:", columns, "")
    for aside in search.asides.values():
        why = "undecided" if aside.undecided else "on the way to a finding"
        why = f"as {names[aside.signature]}" if aside.signature in names else why
        text = f"{count(aside.cases, 'case')} of {aside.signature}, {why}:"
        lines += [*fold(text, columns, "  ", "    "), f"    {aside.example.relative_to(search.folder)}"]
    return lines


def _named(tally: Tally) -> Counter[str]:
    """Each configuration in words."""
    named = Counter[str]()
    for one, number in tally.configurations.items():
        size = f" with {one.nodes} nodes" if one.topk > 1 else ""
        named[f"{one.model}, num_steps {one.num_steps}, topk {one.topk}{size}, page_size {one.page_size}"] = number
    return named


def _figures(tally: Tally) -> dict[str, Any]:
    whole = msgspec.to_builtins(dataclasses.replace(tally, configurations=_named(tally), known={}, refused={}))
    return {name: value for name, value in whole.items() if name not in ("known", "refused")}


def _unconfirmed(search: Fuzz, one: Shrinking) -> dict[str, Any]:
    """What was still being made smaller when the search ended."""
    return {
        "signature": msgspec.to_builtins(one.signature),
        "status": one.seen.verdict.status,
        "folder": str(one.folder / "minimal"),
        "cases": search.tally.cases,
        "shrink_looks": one.looks,
    }


def write_summary(
    folder: Path, search: Fuzz, findings: Sequence[Finding | PastFinding], code: int | None = None
) -> dict[str, Any]:
    """summary.json: the figures of tally_text, and of each finding; and the page that is made of it. Returns the figures. code:
    as there."""
    tally = search.tally
    figures: dict[str, Any] = {
        "headline": _headline(search, code),
        "not_seen": tally.changes.headline,
        "command": search.plan.command,
        "exit_code": code,
        "seconds": round(search.seconds, 3),
        "tally": _figures(tally),
        "not_looked_at": tally.left_out(search.trials.host.mode) if tally.cases else [],
        "refused": {name: one.why for name, one in tally.refused.items()},
        "known": [
            {
                "id": bug.id,
                "cases": bug.cases,
                "mended": bug.mended,
                "shows": dict(bug.shows),
                "example": str(example_of(folder, bug)) if bug.example is not None else "",
            }
            for bug in tally.known.values()
        ],
        "known_note": _of_overlap(search),
        "findings": [finding.facts for finding in findings],
        "unconfirmed": [_unconfirmed(search, one) for one in [search.shrinking] if one is not None],
        "set_aside": [
            {
                "signature": msgspec.to_builtins(one.signature),
                "cases": one.cases,
                "example": str(one.example),
                "undecided": one.undecided,
            }
            for one in search.asides.values()
        ],
    }
    for bug in tally.known.values():
        if bug.example is not None:
            file = example_of(folder, bug)
            file.parent.mkdir(exist_ok=True)
            file.write_text(pretty_case(bug.example), encoding="utf-8")
    (folder / SUMMARY).write_bytes(msgspec.json.format(msgspec.json.encode(figures)))
    write_page(folder, lambda: search_page(folder))
    return figures
