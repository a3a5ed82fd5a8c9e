"""Trees of SGLang in which a fix is undone in the files, as a pull request would undo it.

A tree has a checkout's shape: `python/sglang/` and `test/registered/`. Its files are links to those of an unpacked release, and
a file that changes becomes one of its own, so a tree costs a second and a few megabytes.
"""

import ast
import difflib
import os
import textwrap
from importlib.metadata import requires
from pathlib import Path

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.patch import Edit

# SGLang's own switches undo these two in memory; here is the least that does so in the file.
_BY_HAND = {
    "25015": (
        Edit(
            target="sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft_forward",
            match="for i in range(self.speculative_num_steps):",
            replacement="forward_batch.positions.add_(1)\nfor i in range(self.speculative_num_steps):",
        ),
    ),
    "26329": (
        Edit(
            target="sglang.srt.speculative.eagle_utils._eagle_prefill_tail_tokens",
            match="tail_tokens = next_token_ids",
            replacement="return next_token_ids",
        ),
    ),
}
# The fixes that are undone, and the test that must fail without each: chains, chunks, trees, output, several layers.
UNDONE = {
    "25015": "test_draft_decode_positions",
    "26329": "test_next_token_at_the_end_of_a_prefill_chunk",
    "26997-kv": "test_accepted_path_moves_kv_rows",
    "33758": "test_stop_token_in_the_round_that_reaches_max_new_tokens",
    "chain-hidden": "test_decode_hands_on_the_state_of_the_layer_below",
}
_LEFT_OUT = {"__pycache__", "multimodal_gen"}  # of no use to a scheduler, and half of a release


def edits_of(bug: str) -> tuple[Edit, ...]:
    """What undoes a fix in the files of a tree."""
    if bug in _BY_HAND:
        return _BY_HAND[bug]
    revert = LEDGER[bug].revert
    assert revert is not None
    return revert.edits


def make_tree(package: Path, tree: Path, test: Path) -> Path:
    """A tree with the files of this `sglang/`, and with the test where SGLang keeps its own; where the test lies."""
    for place, folders, files in os.walk(package):
        folders[:] = [name for name in folders if name not in _LEFT_OUT]
        target = tree / "python" / "sglang" / Path(place).relative_to(package)
        target.mkdir(parents=True)
        for name in files:
            _link(Path(place, name), target / name)
    pins = [pin for pin in requires("sglang") or () if pin.startswith("transformers==")]
    project = f'[project]\nname = "sglang"\ndependencies = {pins}\n'.replace("'", '"')
    (tree / "python" / "pyproject.toml").write_text(project, encoding="utf-8")
    lies = tree / "test" / "registered" / "unit" / "spec" / test.name
    lies.parent.mkdir(parents=True)
    lies.write_bytes(test.read_bytes())
    return lies


def _link(source: Path, target: Path) -> None:
    try:
        target.hardlink_to(source)
    except OSError:  # on another file system
        target.write_bytes(source.read_bytes())


def undo(tree: Path, bug: str) -> str:
    """Undo a fix in the files of a tree; what was changed, as a diff."""
    changed: dict[Path, tuple[str, str]] = {}
    for edit in edits_of(bug):
        file, names = _place(tree / "python", edit.target)
        before = file.read_text(encoding="utf-8")
        after = _edited(before, names, edit)
        changed[file] = (changed.get(file, (before, ""))[0], after)
        file.unlink()  # the release keeps its own
        file.write_text(after, encoding="utf-8")
    return "".join(
        line
        for file, (before, after) in changed.items()
        for line in difflib.unified_diff(
            before.splitlines(keepends=True),
            after.splitlines(keepends=True),
            f"a/{file.relative_to(tree)}",
            f"b/{file.relative_to(tree)}",
        )
    )


def _place(python: Path, target: str) -> tuple[Path, list[str]]:
    """The file of a dotted name, and the names in it."""
    parts = target.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        file = python.joinpath(*parts[:cut]).with_suffix(".py")
        if file.is_file():
            return file, parts[cut:]
    raise FileNotFoundError(f"no file of {target} below {python}")


def _edited(source: str, names: list[str], edit: Edit) -> str:
    """The file with the edit in its function. A text that does not occur once is an error: the fix would not be undone."""
    scope: ast.AST = ast.parse(source)
    for name in names:
        scope = next(node for node in ast.iter_child_nodes(scope) if getattr(node, "name", None) == name)
    assert isinstance(scope, ast.FunctionDef)
    assert scope.end_lineno is not None
    lines = source.splitlines(keepends=True)
    first, last = scope.lineno - 1, scope.end_lineno
    text = "".join(lines[first:last])
    function = textwrap.dedent(text)
    if function.count(edit.match) != 1:
        raise ValueError(f"{edit.target}: {edit.match!r} occurs {function.count(edit.match)} times, not once")
    before = function[: function.index(edit.match)].rpartition("\n")[2]
    within = before[: len(before) - len(before.lstrip())]
    function = function.replace(edit.match, edit.replacement.replace("\n", "\n" + within))
    outside = text[: len(text) - len(text.lstrip())]
    return "".join([*lines[:first], textwrap.indent(function, outside), *lines[last:]])
