"""Edits that no case runs, drawn from branches of SGLang's speculative code: no run of one is a pass. `make quality`.

Half of them stand under a condition on the device, on either side of it.
"""

import ast
import dataclasses
import shutil
import textwrap
from collections.abc import Iterator
from pathlib import Path
from random import Random

import msgspec
import pytest
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.commands.options import spec_of
from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.core.patch import Patch
from eagletwin.harness.engines.blocks import FOLDER
from eagletwin.harness.engines.changed_code import compare_sources
from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.source import INSTALLED, resolve
from eagletwin.harness.judge.judge import judge

from ..engine.planted_trees import plant
from ..lab.mutants.draw import Mutant, mutants_of

pytestmark = pytest.mark.long
EDITS = 40
FILES = ("eagle_worker_v2", "eagle_worker_common", "eagle_utils", "spec_utils", "eagle_info", "multi_layer_eagle_worker_v2")
CASES = (
    LEDGER["25015"].case,
    LEDGER["26997-hidden"].case,
    Case(name="layers", model="llama-mtp", num_steps=2, requests=(Request(id="a", prompt=(1, 2, 3), max_new_tokens=8),)),
    Case(name="states", model="qwen3-next-nextn", num_steps=2, requests=(Request(id="a", prompt=(1, 2, 3), max_new_tokens=8),)),
)


def source_of(file: str) -> Path:
    return INSTALLED.root / "sglang" / "srt" / "speculative" / f"{file}.py"


@pytest.fixture(scope="module")
def reached(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[int]]:
    """The first lines of the blocks that the cases run, by file."""
    folder, found = tmp_path_factory.mktemp("blocks"), dict[str, set[int]]()
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(FOLDER, str(folder))
        with Host() as host:
            for number, case in enumerate(CASES):
                place = tmp_path_factory.mktemp(str(number))
                host.engine(case).run(replace(case, exercises=()), place)
    for one in folder.glob("*.json"):
        for file, lines in msgspec.json.decode(one.read_bytes()).items():
            found.setdefault(Path(file).stem, set()).update(lines)
    return found


@pytest.fixture(scope="module")
def idle(reached: dict[str, set[int]]) -> list[Mutant]:
    """EDITS mutants of blocks that no case runs, in functions that some case calls: half of them gated by the device."""
    gated, plain = list[Mutant](), list[Mutant]()
    for file in FILES:
        text = source_of(file).read_text()
        for mutant in mutants_of(text, f"sglang.srt.speculative.{file}", file):
            if mutant.block not in reached.get(file, ()) and called(text, mutant, reached.get(file, set())):
                points = compare_sources(text, edited(text, mutant), "m").places
                (gated if any(point.gate for place in points for point in place.points) else plain).append(mutant)
    draw = Random(52)
    return [*draw.sample(gated, min(len(gated), EDITS // 2)), *draw.sample(plain, EDITS - min(len(gated), EDITS // 2))]


def function_of(text: str, mutant: Mutant) -> ast.FunctionDef | None:
    """The function that holds a mutant."""
    around = [
        node
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef) and node.lineno <= mutant.line <= (node.end_lineno or 0)
    ]
    return min(around, key=lambda node: (node.end_lineno or 0) - node.lineno) if around else None


def called(text: str, mutant: Mutant, lines: set[int]) -> bool:
    """Whether a block of the mutant's function ran: then the function was called."""
    function = function_of(text, mutant)
    return function is not None and any(function.lineno <= line <= (function.end_lineno or 0) for line in lines)


def edited(text: str, mutant: Mutant) -> str:
    """The file with the mutant, as a patch in memory would have it (engines/inside/patches.py)."""
    function = function_of(text, mutant)
    assert function is not None
    lines = text.splitlines(keepends=True)
    own = "".join(lines[function.lineno - 1 : function.end_lineno])
    source = textwrap.dedent(own)
    assert source.count(mutant.match) == 1
    before = source[: source.index(mutant.match)].rpartition("\n")[2]
    new = source.replace(mutant.match, mutant.replacement.replace("\n", "\n" + before[: len(before) - len(before.lstrip())]))
    new = textwrap.indent(new, " " * function.col_offset)
    return "".join([*lines[: function.lineno - 1], new, *lines[function.end_lineno :]])


def named(mutant: Mutant, way: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> tuple[Patch, ...]:
    """The patches that `--patch FILE` or `--revert ID` makes of a mutant."""
    if way == "patch":
        file = folder / "mutant.json"
        file.write_bytes(msgspec.json.encode(mutant.patch))
        return spec_of({way: [str(file)]}).patches
    monkeypatch.setitem(LEDGER, "idle", dataclasses.replace(LEDGER["25015"], id="idle", revert=mutant.patch))
    return spec_of({way: ["idle"]}).patches


def verdicts(host: Host, patches: tuple[Patch, ...], folder: Path) -> Iterator[tuple[str, str, bool]]:
    """Status, reason, and whether it is a doubt about the change alone. No patches: the tree of the host is the change."""
    for number, case in enumerate(CASES):
        place = folder / str(number)
        place.mkdir(parents=True)
        verdict = judge(host.engine(case, patches).run(replace(case, exercises=()), place))
        yield verdict.status, verdict.reason, verdict.vacuous


@pytest.mark.parametrize("way", ["patch", "revert"])
def test_a_patch_or_a_revert_that_no_case_runs_is_never_a_pass(
    idle: list[Mutant], way: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert len(idle) == EDITS
    with Host() as host:
        for number, mutant in enumerate(idle):
            place = tmp_path / str(number)
            for status, reason, vacuous in verdicts(host, named(mutant, way, monkeypatch, tmp_path), place):
                assert (status, vacuous) == ("unknown", True), (mutant.name, status, reason)
                assert f"{mutant.file}.py:" in reason, (mutant.name, reason)


def test_a_tree_that_no_case_runs_is_never_a_pass(idle: list[Mutant], tmp_path: Path) -> None:
    for number, mutant in enumerate(idle):
        root = plant(tmp_path / "tree")
        file = root / source_of(mutant.file).relative_to(INSTALLED.root)
        text = file.read_text()
        file.unlink()
        file.write_text(edited(text, mutant))
        with Host(source=resolve(str(root))) as host:
            for status, reason, vacuous in verdicts(host, (), tmp_path / str(number)):
                assert (status, vacuous) == ("unknown", True), (mutant.name, status, reason)
                assert f"{mutant.file}.py:" in reason, (mutant.name, reason)
        shutil.rmtree(root)
