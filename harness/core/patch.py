"""Changes to an engine's code in memory, as data: how a fix is undone, or a candidate fix applied. Never to files on disk.

A patch is either the engine's own reversal of a pull request (`sglang_toggle`), or edits of named functions that quote no more
of the engine than the expression they change. The engine adapter applies it; a patch that does not apply is an error.
"""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from .errors import InputError
from .files import read_input, refuse_duplicates


class Edit(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Replace `match` by `replacement` in the source of the function `target` (dotted name).

    `match` must occur exactly once in the function's source as it stands without the indentation of its `def`. A
    replacement of several lines keeps the indentation of the line it stands in.
    """

    target: Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)+\Z")]
    match: Annotated[str, Meta(min_length=1)]
    replacement: str


_MOST_BYTES = 1 << 20

Switch = Literal["trees-on-v2", "record-nothing", "without-overlap"]


class Patch(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`name` is what traces and reports call it. otherwise: edits for a release to whose code the first edits do not apply.

    switches  what the engine adapter itself does otherwise, by name: `trees-on-v2` builds the newer worker for trees on
              releases that would choose the older one, `record-nothing` leaves traces almost empty, `without-overlap` runs
              a draft that reads the target's rows without the overlap scheduler, where the release cannot
    """

    name: Annotated[str, Meta(pattern=r"^[^\x00-\x1f\x7f]{1,200}\Z")]
    sglang_toggle: int | None = None
    edits: tuple[Edit, ...] = ()
    otherwise: tuple[Edit, ...] = ()
    switches: tuple[Switch, ...] = ()

    def __post_init__(self) -> None:
        if self.sglang_toggle is None and not self.edits and not self.switches:
            raise ValueError("a patch without edits changes nothing")

    @property
    def targets(self) -> frozenset[str]:
        """The functions that it changes, of one release or another."""
        return frozenset(edit.target for edit in (*self.edits, *self.otherwise))


def read_patch(path: Path) -> Patch:
    """A patch from a JSON file: {"name": …, "edits": [{"target": …, "match": …, "replacement": …}]}. Raises InputError."""
    try:
        data = read_input(path, _MOST_BYTES)
        if len(data) > _MOST_BYTES:
            raise ValueError(f"larger than {_MOST_BYTES} bytes")
        patch = msgspec.json.decode(data, type=Patch)
        refuse_duplicates(data)
        return patch
    except (OSError, ValueError) as error:  # msgspec's errors are ValueErrors
        cause = error.strerror if isinstance(error, OSError) else str(error)
        raise InputError(
            f"{path}: {cause}", consequence="nothing was run", remedy="give a patch file; docs/reference/patch.md shows one"
        ) from error
