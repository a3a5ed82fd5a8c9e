"""The page mutants.md: written from the outcomes, and from what was found out about the survivors."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from eagletwin.harness.core.errors import InputError

from .draw import Mutant
from .hunt import COUNTED, KILLED, Hunted

# What a person found out about the mutants that survived, as JSON files of this folder.
#
# A rate counts only mutants that can be seen, so it rests on these reasons.

Kind = Literal["equivalent", "not reachable here", "missed"]


class Examined(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A reason, and the mutants that have it, by their names.

    is_  `equivalent`: no number that anyone uses differs; `not reachable here`: it takes what this engine does not run
    now  what a missed one became
    """

    is_: Kind = msgspec.field(name="is")
    why: str
    mutants: tuple[str, ...]
    now: str = ""


def examined(outcomes: str) -> list[Examined]:
    """The reasons of the survivors in a file of outcomes of this name. A wheel has none."""
    return read_examined(Path(__file__).with_name(outcomes).with_suffix(".examined.json"))


def read_examined(path: Path) -> list[Examined]:
    """Raises InputError for a file that is not what it should be, and for a mutant that is named twice."""
    if not path.exists():
        return []
    try:
        found = msgspec.json.decode(path.read_bytes(), type=list[Examined])
    except msgspec.DecodeError as error:
        raise InputError(f"{path}: {error}", consequence="no page was written", remedy="mend the file") from error
    names = [name for one in found for name in one.mutants]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(
            f"{path}: {twice[0]} is named twice", consequence="no page was written", remedy="leave one of its reasons"
        )
    return found


def reason_of(mutant: Mutant, examined: Sequence[Examined]) -> Examined | None:
    return next((one for one in examined if mutant.name in one.mutants), None)


PAGE = "mutants.md"


def rate(outcomes: Sequence[Hunted], examined: Sequence[Examined]) -> tuple[int, int]:
    """How many were killed, and of how many that are neither equivalent nor out of reach."""
    killed = sum(one.outcome in KILLED for one in outcomes)
    left = [
        one for one in outcomes if one.outcome == "survived" and _is(one, examined) not in ("equivalent", "not reachable here")
    ]
    return killed, killed + len(left)


def counts(outcomes: Sequence[Hunted], examined: Sequence[Examined]) -> list[str]:
    """The figures as tables: by file, by what was changed, and by what killed."""
    counted = [one for one in outcomes if one.outcome in COUNTED]
    return [
        *_table("file", counted, examined, lambda one: f"`{one.mutant.file.rpartition('/')[2]}`"),
        "",
        *_table("change", counted, examined, lambda one: one.mutant.kind),
        "",
        "| killed by | mutants |",
        "|---|---|",
        *(f"| {by} | {number} |" for by, number in Counter(_by(one) for one in counted if one.outcome in KILLED).most_common()),
    ]


def survivors(outcomes: Sequence[Hunted], examined: Sequence[Examined]) -> list[str]:
    """Every survivor, under its reason."""
    left = [one.mutant for one in outcomes if one.outcome == "survived"]
    lines: list[str] = []
    for kind in ("missed", "equivalent", "not reachable here"):
        reasons = [one for one in examined if one.is_ == kind and any(mutant.name in one.mutants for mutant in left)]
        number = sum(_kind(mutant, examined) == kind for mutant in left)
        lines += [f"### {kind[0].upper()}{kind[1:]}: {number}", ""]
        for reason in reasons:
            lines += [f"* {reason.why}{f' {reason.now}' if reason.now else ''}"]
            lines += [f"  * {_shown(mutant)}" for mutant in left if mutant.name in reason.mutants]
        lines += [""] if reasons else []
    open_ = [mutant for mutant in left if reason_of(mutant, examined) is None]
    if open_:
        lines += [f"### Not examined yet: {len(open_)}", "", *(f"* {_shown(mutant)}" for mutant in open_), ""]
    return lines


def _table(head: str, outcomes: Sequence[Hunted], examined: Sequence[Examined], by: Callable[[Hunted], str]) -> list[str]:
    kinds = ("missed", "equivalent", "not reachable here", "not examined")
    rows = [
        f"| {head} | mutants | by a rule | by a crash | unjudged | by a refusal | {' | '.join(kinds)} |",
        "|---" * (6 + len(kinds)) + "|",
    ]
    names = [name for name, _ in Counter(map(by, outcomes)).most_common()]
    for name in (*names, "all"):
        own = [one for one in outcomes if name in ("all", by(one))]
        ended = Counter(one.outcome if one.outcome in KILLED else _is(one, examined) for one in own)
        cells = [len(own), *(ended[outcome] for outcome in (*KILLED, *kinds))]
        rows.append(f"| {name} | {' | '.join(map(str, cells))} |")
    return rows


def _by(one: Hunted) -> str:
    if one.outcome == "rule":
        return f"`{one.by}`"
    return {
        "crash": "a crash or a hang",
        "unknown": "a trace that cannot be judged",
        "refused": "an engine that would not start",
    }[one.outcome]


def _is(one: Hunted, examined: Sequence[Examined]) -> str:
    return _kind(one.mutant, examined)


def _kind(mutant: Mutant, examined: Sequence[Examined]) -> str:
    reason = reason_of(mutant, examined)
    return "not examined" if reason is None else reason.is_


def _shown(mutant: Mutant) -> str:
    was, became = mutant.change
    return f"`{mutant.file.rpartition('/')[2]}:{mutant.line}`, `{mutant.function}`: `{was}` → `{became}`"


Part = tuple[Sequence[Hunted], Sequence[Examined]]


def page(worker: Part, oracle: Part) -> str:
    """The whole page, in Markdown."""
    lines = [
        "# Mutants",
        "",
        "Written by `python -m tests.lab mutants` and `python -m tests.lab oracle`, from mutants/*.jsonl.",
        "A mutant is a program with one expression changed: a comparison, an operator, a constant, a bound of a slice, two "
        "arguments of a call, or a condition.",
        "It is *killed* if a search says something: a rule names a wrong number, the worker crashes or hangs, its trace cannot "
        "be judged, or it does not start.",
        "A survivor is examined: it is *equivalent*, *not reachable here*, or *missed*.",
        "The reasons are written by hand, into `tests/lab/mutants/*.examined.json`.",
        "",
        "## SGLang's worker",
        "",
        "Mutants of SGLang's speculative code, and of where the scheduler takes what it returns, at places that a default "
        "search runs; drawn with seed 0.",
        "Each is searched for without a hint in cases of `eagletwin fuzz --seed 0`, of which those that do not run its place "
        "are left out.",
        "",
        *_part(*worker, 0.97),
        "## The judge and the reference",
        "",
        "Mutants of `harness/judge/` and `reference/`, at lines that run; drawn with seed 0.",
        "A mutant is killed if it says another status, rule, place or wrong number of a recorded trace: healthy, with a mutant "
        "of the worker, or with one recorded number changed.",
        "",
        *_part(*oracle, 0.95),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _part(outcomes: Sequence[Hunted], examined: Sequence[Examined], aim: float) -> list[str]:
    if not outcomes:
        return ["Not measured yet.", ""]
    killed, seen = rate(outcomes, examined)
    told = Counter(one.told for one in outcomes if one.outcome in KILLED and one.told)
    lines = [
        f"**{killed} of {seen} mutants that are neither equivalent nor out of reach are killed: {killed / max(1, seen):.1%}** "
        f"(the aim is {aim:.0%}).",
    ]
    if told:
        options = ", ".join(f"{number} by `{option}`" for option, number in told.most_common())
        lines.append(f"Of these, cases of the search without options kill {killed - told.total()}; further ones are {options}.")
    return [*lines, "", *counts(outcomes, examined), "", *survivors(outcomes, examined)]
