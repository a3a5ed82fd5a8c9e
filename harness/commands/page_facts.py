"""Results in a run folder, read again for their page, and sections that several reports have."""

import os
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from eagletwin.harness.core.differs import join_names
from eagletwin.harness.core.errors import EXIT_DIVERGED, EXIT_EQUAL, InputError
from eagletwin.harness.families.dimensions import FEATURES
from eagletwin.harness.page.document import DocumentSection, Table, table
from eagletwin.harness.page.render import NAME

Facts = TypeVar("Facts")
# How the result of an exit code looks.
KINDS: dict[int | None, str] = {EXIT_EQUAL: "right", EXIT_DIVERGED: "wrong"}


def read_facts(file: Path, shape: type[Facts], of: str) -> Facts:
    """The facts in a file. of: the folder to name in their place. Raises InputError for facts that cannot be read."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=shape, dec_hook=lambda kind, found: Counter(found))
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


def unexercised_features(exercised: Collection[str]) -> Table:
    """The features that no case exercised, and what each of them is."""
    rows = ((name, what) for name, what in FEATURES.items() if name not in exercised)
    return table("Never happened", ("feature", "what it is"), rows, searched=True)


def left_out(not_looked_at: Sequence[str], search: str = "", brief: int = 0) -> list[DocumentSection]:
    """Features that no case of a search had, each with the option of `fuzz` for it. No section, if there is nothing of these.

    brief: how many names the text has of them, in one line; 0: all of it"""
    heading = f"Not looked at{f' by the search of {search}' * bool(search)}, and the option of `fuzz` for it"
    names = [*dict.fromkeys(one.partition(" (--")[0].partition(": ")[0] for one in not_looked_at)]
    short = f"Not looked at: {join_names(names, brief)}." if brief else None
    lines = tuple(not_looked_at)
    return [DocumentSection(heading=heading, lines=lines, folded=heading, brief=short)] if lines else []
