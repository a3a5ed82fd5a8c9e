"""In what two SGLangs differ from one another, whatever each was made from: every file below sglang/, by its content.

A branch whose changes are all committed differs from its own HEAD in nothing, and from the base that it is compared with in
just what its author asks about.
"""

from eagletwin.harness.core.differs import Watch

from .difference import File, content_of, watch_of
from .provision import files_of_package
from .source import Source

MOST = 300  # Python files that differ: two neighbouring releases differ in some 2,000, whose functions take minutes to list


class TooMany(Exception):
    """More Python files differ than are looked at: the two are other releases, and not a change and its base."""


def between(left: Source, right: Source) -> tuple[Watch, Watch] | None:
    """What the engines of each are to watch: in what it differs from the other. None: no file differs. Raises TooMany."""
    roots = left.root, right.root
    names = sorted(files_of_package(roots[0]) | files_of_package(roots[1]))
    contents = ((name, content_of(roots[0] / name), content_of(roots[1] / name)) for name in names)
    differ = [(name, one, other) for name, one, other in contents if one != other]
    if not differ:
        return None
    if sum(name.endswith(".py") for name, *_ in differ) > MOST:
        raise TooMany(f"they differ in {len(differ)} files")
    return (
        watch_of(right.called, [File(name, other, one) for name, one, other in differ]),
        watch_of(left.called, [File(name, one, other) for name, one, other in differ]),
    )
