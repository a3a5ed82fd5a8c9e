"""In what two SGLangs differ from one another, whatever each was made from: every file below sglang/, by its content.

A branch whose changes are all committed differs from its own HEAD in nothing, and from the base that it is compared with in
just what its author asks about.
"""

from contextlib import suppress
from dataclasses import replace

from eagletwin.harness.core.differs import Watch

from .difference import File, content_of, difference, watch_of
from .provision import files_of_package
from .source import Source, resolve

MOST = 300  # Python files that differ: two neighbouring releases differ in some 2,000, whose functions take minutes to list


class TooMany(Exception):
    """More Python files differ than are looked at: the two are other releases, and not a change and its base."""


def between(left: Source, right: Source) -> tuple[Watch, Watch] | None:
    """What the engines of each are to watch: in what it differs from the other. None: no file differs. Raises TooMany."""
    files = _files(left, right)
    if not files:
        return None
    back = [File(file.path, file.new, file.old) for file in files]
    return watch_of(right.called, back), watch_of(left.called, files)


def as_change(source: Source, base: str) -> Source:
    """The source as a change of a release or folder: what its engines watch, and a run folder keeps, is in what it differs from
    that, unless it differs in too much. "": as it is. Raises InputError, NotFetched."""
    if not base:
        return source
    found = resolve(base)
    with suppress(TooMany):
        return replace(source, base=found, difference=difference(found.called, _files(found, source)))
    return replace(source, base=found)


def _files(left: Source, right: Source) -> list[File]:
    """The files that differ: of the left as old, of the right as new. Raises TooMany."""
    roots = left.root, right.root
    names = sorted(files_of_package(roots[0]) | files_of_package(roots[1]))
    contents = ((name, content_of(roots[0] / name), content_of(roots[1] / name)) for name in names)
    differ = [File(name, one, other) for name, one, other in contents if one != other]
    if sum(file.path.endswith(".py") for file in differ) > MOST:
        raise TooMany(f"they differ in {len(differ)} files")
    return differ
