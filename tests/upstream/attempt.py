"""Run the file that SGLang gets, with SGLang as it is and with one fix undone."""

import ast
import difflib
import importlib.util
import os
import re
import resource
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import requires
from pathlib import Path

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.errors import HarnessError
from eagletwin.harness.core.files import installed_version
from eagletwin.harness.core.patch import Edit

# Trees of SGLang in which a fix is undone in the files, as a pull request would undo it.
#
# A tree has a checkout's shape: `python/sglang/` and `test/registered/`. Its files are links to those of an unpacked release,
# and a file that changes becomes one of its own, so a tree costs a second and a few megabytes.

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
# The fixes that are undone, of chains, chunks, trees, output and several layers: the test of each must fail.
UNDONE = ("25015", "26329", "26997-kv", "33758", "chain-hidden")
Changed = dict[str, tuple[str, str]]  # file below python/ -> its text before and after
_LEFT_OUT = {"__pycache__", "multimodal_gen"}  # of no use to a scheduler, and half of a release


def name_of_test(bug: str) -> str:
    """The name of a bug's test in the file for SGLang's own CI."""
    return f"test_{bug.replace('-', '_')}"


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
    changed = changed_files(tree / "python", edits_of(bug))
    for file, (_, after) in changed.items():
        (tree / "python" / file).unlink()  # the release keeps its own
        (tree / "python" / file).write_text(after, encoding="utf-8")
    return diff_of(changed)


def changed_files(python: Path, edits: Iterable[Edit]) -> Changed:
    """The files below this folder that edits change. Raises ValueError where a text does not occur once in its function."""
    changed: Changed = {}
    for edit in edits:
        file, names = _place(python, edit.target)
        before, after = changed.get(file, (text := (python / file).read_text(encoding="utf-8"), text))
        changed[file] = before, _edited(after, names, edit)
    return changed


def diff_of(changed: Changed, below: str = "python/") -> str:
    """What was changed, as git applies it to a checkout that has the package below this folder."""
    return "".join(
        line
        for file, (before, after) in changed.items()
        for line in difflib.unified_diff(
            before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{below}{file}", f"b/{below}{file}"
        )
    )


def _place(python: Path, target: str) -> tuple[str, list[str]]:
    """The file of a dotted name, below this folder, and the names in it."""
    parts = target.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        file = f"{'/'.join(parts[:cut])}.py"
        if (python / file).is_file():
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
    function = re.sub(r"(\n[ \t]+)+(?=\n)", "", function)  # a line of which an edit left the indentation alone
    outside = text[: len(text) - len(text.lstrip())]
    return "".join([*lines[:first], textwrap.indent(function, outside), *lines[last:]])


# Whether docs/guide/upstream/test_eagle_draft_chain.py does what it is for: green on a release, red where a fix is undone.
#
# The file lies in a tree of SGLang as SGLang's own tests do, and is run as SGLang's runner runs one: `python3 FILE`. `make
# upstream-test` does so in an environment of its own, in which SGLang was installed with all that it pins, and eagletwin's
# wheel beside it; test_upstream.py asks the cheap half of it in the test suite.

ROOT = Path(__file__).parents[2]
TEST = ROOT / "docs" / "guide" / "upstream" / "test_eagle_draft_chain.py"
# What the guide promises for the whole file, of processor time: it hardly works on two things at once, so an idle machine takes
# about as long, and a busy one changes nothing.
SECONDS = 60
_LONGEST = 1800  # a hanging run must end


@dataclass(frozen=True, slots=True)
class Attempt:
    """One run of the file in a tree.

    seconds  on the clock; cpu: of processor time
    failed   names of its tests; errors: those that failed otherwise than by an assertion
    """

    code: int
    seconds: float
    cpu: float
    ran: int
    failed: tuple[str, ...]
    errors: tuple[str, ...]
    output: str

    @property
    def green(self) -> bool:
        return self.code == 0 and self.ran > 0 and not self.failed and not self.errors

    def red_by(self, test: str) -> bool:
        return self.code == 1 and test in self.failed and not self.errors


def attempt(tree: Path, file: Path, *tests: str) -> Attempt:
    """Run the file, or some of its tests, with the SGLang of the tree."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("EAGLETWIN_", "SGLANG_", "PYTEST_"))}
    paths = [str(tree / "python"), *filter(None, [kept.get("PYTHONPATH", "")])]
    # SGLang's CI installs the tree as an editable package; a path before all others makes the same files the imported ones.
    environment = kept | {"PYTHONPATH": os.pathsep.join(paths), "SGLANG_IS_IN_CI": "true"}
    begun, used = time.monotonic(), _cpu()
    done = subprocess.run(
        [sys.executable, str(file), *(f"TestEagleDraftChain.{test}" for test in tests)],
        cwd=tree / "test",
        env=environment,
        capture_output=True,
        text=True,
        timeout=_LONGEST,
        check=False,
    )
    seconds = time.monotonic() - begun
    ran = re.search(r"^Ran (\d+) test", done.stderr, re.MULTILINE)
    failed, errors = (tuple(re.findall(rf"^{word}: (\w+)", done.stderr, re.MULTILINE)) for word in ("FAIL", "ERROR"))
    return Attempt(
        done.returncode, seconds, _cpu() - used, int(ran[1]) if ran else 0, failed, errors, done.stdout + done.stderr
    )


def _cpu() -> float:
    """Processor time of the children that have ended, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def package() -> Path:
    """The installed `sglang/`."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        raise HarnessError("sglang is not installed", consequence="no tree was made", remedy="make upstream-test")
    return Path(spec.origin).parent


def main() -> int:
    """The release, and a tree without each of the fixes; 0 if all came out as they must."""
    versions = ", ".join(f"{name} {installed_version(name)}" for name in ("sglang", "torch", "triton", "transformers"))
    print(f"Python {sys.version.split()[0]}, {versions}", flush=True)
    wrong = 0
    for bug in ("", *UNDONE):
        with tempfile.TemporaryDirectory(prefix="eagletwin-") as place:
            tree = Path(place)
            file = make_tree(package(), tree, TEST)
            diff = undo(tree, bug) if bug else ""
            done = attempt(tree, file)
        right = done.red_by(name_of_test(bug)) if bug else done.green and done.cpu <= SECONDS
        wrong += not right
        print(_line(bug, done, right), flush=True)
        if not right:
            print(f"{diff}\n{done.output[-6000:]}", flush=True)
    return 1 if wrong else 0


def _line(bug: str, done: Attempt, right: bool) -> str:
    what = f"{bug} undone" if bug else "as released"
    colour = "green" if done.green else "red"
    failed = f"  {', '.join((*done.failed, *done.errors))}" if done.failed or done.errors else ""
    took = f"{done.seconds:5.1f} s, {done.cpu:.1f} s of CPU"
    return f"{'' if right else 'WRONG  '}{what:22} {colour:5} {took}, {done.ran} tests{failed}"


if __name__ == "__main__":
    sys.exit(main())
