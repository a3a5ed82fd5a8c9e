"""What a person found out about the mutants that survived, as JSON files of this folder.

A rate counts only mutants that can be seen, so it rests on these reasons.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from eagletwin.harness.core.errors import InputError

from .draw import Mutant

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
