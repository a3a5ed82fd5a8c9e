"""Whether the code that a remedy edits is, in another SGLang, as in the newest release."""

from functools import cache
from pathlib import Path

from eagletwin.harness.core.errors import EagletwinError
from eagletwin.harness.core.patch import Patch
from eagletwin.harness.engines.changed_code import changed
from eagletwin.harness.engines.provision import releases
from eagletwin.harness.engines.source import Source, at_hand


def as_newest(source: Source, remedy: Patch) -> bool:
    """By the functions that the remedy edits. False where that cannot be seen: the release is not at hand, say."""
    if source.called == releases()[-1]:
        return True
    newest = _newest()
    if newest is None or remedy.switches or remedy.sglang_toggle is not None:
        return False
    return all(_same(edit.target, source.root, newest.root) for edit in remedy.edits)


@cache
def _newest() -> Source | None:
    try:
        return at_hand(releases()[-1])
    except EagletwinError:
        return None


@cache
def _same(target: str, root: Path, newest: Path) -> bool:
    parts = target.split(".")
    files = [(Path(*parts[:length]).with_suffix(".py"), ".".join(parts[:length])) for length in range(1, len(parts))]
    for file, module in files:
        if (newest / file).is_file():
            return _changed(root / file, newest / file, module).isdisjoint((target, module))
    return False


@cache
def _changed(file: Path, newest: Path, module: str) -> frozenset[str]:
    """Functions that differ, by their names; the module's too where they cannot be told."""
    try:
        new, old = file.read_bytes(), newest.read_bytes()
        if new == old:
            return frozenset()
        found = changed(old, new, module)
    except (OSError, SyntaxError, ValueError):
        return frozenset((module,))
    return frozenset((*(place.name for place in found.places), *found.removed))
