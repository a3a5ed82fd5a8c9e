"""What a command leaves in its run folder for its page, and cells of tables that several pages have."""

import os
from collections.abc import Collection
from pathlib import Path
from typing import TypeVar

import msgspec

from eagletwin.harness.core.errors import InputError
from eagletwin.harness.families.dimensions import FEATURES
from eagletwin.harness.page.render import NAME, PageSection, Table, TableCell, TableRow

Facts = TypeVar("Facts")


def read_facts(file: Path, shape: type[Facts], of: str) -> Facts:
    """The facts in a file. of: the folder to name in their place. Raises InputError for facts that cannot be read."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=shape)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read: {error}", consequence="no page was made", remedy=f"name {of}") from error


def page_beside(folder: Path, kept: str, there: str) -> str:
    """A link from a run folder's page to the page of a run below or beside it; "" if there is none.

    kept, there: the two folders as they were recorded. Both may have been moved since, together.
    """
    if not kept or not there:
        return ""
    link = Path(os.path.relpath(there, kept)) / NAME
    return link.as_posix() if (folder / link).is_file() else ""


def row(*cells: str | TableCell, tags: tuple[str, ...] = ()) -> TableRow:
    """A row of a table; a text is a plain cell."""
    return TableRow(tuple(TableCell(one) if isinstance(one, str) else one for one in cells), tags=tags)


def never_happened(exercised: Collection[str]) -> Table:
    """The features that no case exercised, and what each of them is."""
    rows = tuple(row(name, what) for name, what in FEATURES.items() if name not in exercised)
    return Table(caption="Never happened", header=("feature", "what it is"), rows=rows, searched=True)


def left_out(not_looked_at: Collection[str], refused: Collection[str] = ()) -> list[PageSection]:
    """What no case of a search had, and engines that would not start. No section, if there is nothing of these."""
    kinds = {
        ("Not looked at, and the option for it", "what"): not_looked_at,
        ("Configurations of which nothing was looked at", "model, and why"): refused,
    }
    tables = [
        Table(caption=caption, header=(header,), rows=tuple(row(one) for one in names))
        for (caption, header), names in kinds.items()
        if names
    ]
    return [PageSection(heading="What was left out", tables=tuple(tables))] if tables else []
