"""What was measured on a release, as a JSON file of its own: kept next to the page that is made of it, and read again."""

from pathlib import Path
from typing import Literal

from msgspec import Struct

from ..kept import read_kept, write_kept

FOLDER = "data"


class Cell(Struct, frozen=True, kw_only=True):
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
    seconds: float = 0.0


class Output(Struct, frozen=True, kw_only=True):
    """The results of the common cases.

    tokens    a digest of each case's emitted tokens; "" of one that did not finish: `why`, of the first of them
    packages  what it ran with
    """

    asked: str
    tokens: tuple[str, ...] = ()
    why: str = ""
    packages: str = ""
    seconds: float = 0.0


class Measured(Struct, kw_only=True):
    """A release: its cells by entry, and its output. It is filled while it is measured."""

    release: str
    cells: dict[str, Cell] = {}
    output: Output | None = None

    @property
    def seconds(self) -> float:
        """Wall time of all that the release was asked. The first answer waits for its start."""
        return sum(answer.seconds for answer in (*self.cells.values(), self.output) if answer is not None)


def read(folder: Path, release: str) -> Measured:
    """What is known of a release; nothing, if it has no file. Raises InputError for a file of another kind."""
    return read_kept(folder / FOLDER / f"{release}.json", Measured(release=release), "nothing was measured")


def write(folder: Path, measured: Measured) -> None:
    """Keep it, in place of what was there."""
    write_kept(folder / FOLDER / f"{measured.release}.json", measured)
