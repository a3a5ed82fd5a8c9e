"""What was measured on the releases, next to the page that is made of it."""

from collections.abc import Collection
from pathlib import Path
from typing import Literal

from msgspec import Struct

from eagletwin.harness.engines.provision import releases

from ..common import read_answers, write_answers

FILE = "releases.jsonl"
_OUTPUT = "greedy output"  # in the place of an entry


class Cell(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="cell"):
    """An entry of the ledger on a release.

    asked   digest of what was run and how it was judged: another case or view must be measured anew
    status  `green`: equal. `red`: diverged, or ended as the entry says, by `rule`. `cannot tell`: `why`
    own     the rule is the entry's: what shows is this bug and not another that comes before it
    """

    asked: str
    status: Literal["green", "red", "cannot tell"]
    rule: str = ""
    own: bool = False
    why: str = ""


class Output(Struct, frozen=True, kw_only=True, omit_defaults=True, tag="output"):
    """The results of the common cases.

    tokens    a digest of each case's emitted tokens; "" of one that did not finish: `why`, of the first of them
    packages  what it ran with
    """

    asked: str
    tokens: tuple[str, ...] = ()
    why: str = ""
    packages: str = ""


class Measured(Struct, kw_only=True):
    """A release: its cells by entry, and its output. It is filled while it is measured."""

    release: str
    cells: dict[str, Cell] = {}
    output: Output | None = None


def read(folder: Path) -> dict[str, Measured]:
    """Each known release, oldest first, with what is known of it. Raises InputError for a file of another kind."""
    answers = read_answers(folder / FILE, Cell | Output, "nothing was measured")
    found = {name: Measured(release=name) for name in releases()}
    for name, by_entry in answers.items():
        measured = found.setdefault(name, Measured(release=name))
        measured.output = by_entry.pop(_OUTPUT, None)
        measured.cells = by_entry
    return found


def write(folder: Path, found: Collection[Measured]) -> None:
    """Write what is known of all releases, in place of what was there."""
    answers: dict[str, dict[str, Struct]] = {one.release: {**one.cells} for one in found}
    for one in found:
        if one.output is not None:
            answers[one.release][_OUTPUT] = one.output
    write_answers(folder / FILE, answers)
