"""`faults`: how soon `eagletwin fuzz --sglang TREE`, without a hint, finds a one-place fault of SGLang.

Faults are drawn, of the mutants of all functions that some measured case ran and not all did (commands/fuzz/coverage.py), the
files in turn. Each is planted in a tree of its own. A fault that is not found may be none: two programs may do the same.
"""

import ast
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Container, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from pathlib import Path
from queue import SimpleQueue
from random import Random
from typing import Annotated

import msgspec
import typer
from msgspec import Struct

from eagletwin.cases.entry import Entry
from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.errors import EXIT_EQUAL
from eagletwin.harness.core.files import cache_folder
from eagletwin.harness.core.patch import Patch
from eagletwin.harness.engines.source import INSTALLED

from ..engine.planted_trees import plant
from .mutants.draw import Mutant, mutants_of

_FOLDERS = ("speculative", "managers", "mem_cache", "model_executor", "layers", "models")
_FILES = (
    "*eagle*",
    "*spec*",
    "schedule*",
    "*cache*",
    "*pool*",
    "*allocat*",
    "*attention*",
    "*backend*",
    "*sampl*",
    "*logit*",
    "llama*",
    "*mamba*",
)


class Fault(Struct, frozen=True):
    """What came of one fault.

    code     the exit code of `fuzz`; found: what it found first, after which it was interrupted; "": nothing
    seconds  from the shell to the finding, or to the end; cases: until then; reached: how many of them ran the fault
    """

    name: str
    code: int
    found: str
    seconds: float
    cases: int
    reached: int


def faults(
    number: Annotated[int, typer.Option(min=1, help="How many faults.")] = 60,
    entry: Annotated[
        list[str] | None, typer.Option(help="An entry of the ledger, in place of drawn faults. Repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Which faults are drawn.")] = 0,
    minutes: Annotated[float, typer.Option(min=0.1, help="Of each search.")] = 2.0,
    at_once: Annotated[int, typer.Option(min=1, help="Searches at the same time, each on two cores of its own.")] = 1,
    checkout: Annotated[Path, typer.Option(help="Whose eagletwin searches.")] = Path(),
    write: Annotated[Path, typer.Option(help="File that gets a line of JSON for each fault; it goes on there.")] = Path(
        "build/faults.jsonl"
    ),
) -> int:
    """How soon a search without a hint finds one-place faults of SGLang."""
    write.parent.mkdir(parents=True, exist_ok=True)
    done = [msgspec.json.decode(line, type=Fault) for line in write.read_bytes().splitlines()] if write.exists() else []
    names = {fault.name for fault in done}
    cores, pairs = sorted(os.sched_getaffinity(0)), SimpleQueue[list[int]]()
    for first in range(0, 2 * at_once, 2):
        pairs.put(cores[first : first + 2])

    def take_cores() -> None:
        os.sched_setaffinity(0, pairs.get())  # of this thread, and so of the processes that it starts

    with ThreadPoolExecutor(at_once, initializer=take_cores) as searches:
        subjects = {one: LEDGER[one] for one in entry} if entry else {mutant.name: mutant for mutant in drawn(number, seed)}
        left = [subject for name, subject in subjects.items() if name not in names]
        for ended in as_completed([searches.submit(search, subject, minutes, checkout) for subject in left]):
            fault = ended.result()
            print(f"{fault.code:4} {fault.seconds:6.1f} s {fault.cases:4} cases  {fault.name}  {fault.found}", flush=True)
            with write.open("ab") as end:
                end.write(msgspec.json.encode(fault) + b"\n")
            done.append(fault)
    seconds = sorted(fault.seconds for fault in done if fault.found)
    ran, of = sum(fault.reached for fault in done), sum(fault.cases for fault in done)
    idle = sum(not fault.reached and not fault.found for fault in done)
    print(f"{len(seconds)} of {len(done)} found; {idle} ran in no case; {ran} of {of} cases ran the rest")
    if seconds:
        print(f"median {seconds[len(seconds) // 2]:.1f} s, 90 % within {seconds[len(seconds) * 9 // 10]:.1f} s")
    return EXIT_EQUAL


def drawn(number: int, seed: int) -> list[Mutant]:
    """The faults: one after the other of each file, in an order that is drawn."""
    from eagletwin.harness.commands.fuzz.coverage import read_coverage

    random, by_file, keys = Random(seed), dict[str, list[Mutant]](), frozenset(read_coverage().by_key())
    searched = searched_files()
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as readers:
        for file, found in zip(searched, readers.map(_reached, searched, [keys] * len(searched)), strict=True):
            if found:
                by_file[file] = random.sample(found, len(found))
    files, each = random.sample(sorted(by_file), len(by_file)), list[Mutant]()
    for turn in range(number):
        each += [by_file[file][turn] for file in files if turn < len(by_file[file])]
    return each[:number]


def searched_files() -> list[str]:
    root, found = INSTALLED.root, set[str]()
    for folder in _FOLDERS:
        for pattern in _FILES:
            found |= {str(file.relative_to(root)) for file in (root / "sglang/srt" / folder).rglob(f"{pattern}.py")}
    return sorted(found)


def _reached(file: str, keys: Container[str]) -> list[Mutant]:
    """The mutants of a file in blocks with these keys."""
    try:
        return list(_mutants(file, keys))
    except SyntaxError:
        return []


def _mutants(file: str, keys: Container[str]) -> Iterator[Mutant]:
    from eagletwin.harness.commands.fuzz.coverage import key_of
    from eagletwin.harness.engines.blocks import blocks_of

    text = (INSTALLED.root / file).read_text()
    ran = {
        (block.function, block.line)
        for block, _, _ in blocks_of(ast.parse(text))
        if key_of(file, block.function, block.branch) in keys
    }
    module = file.removesuffix(".py").replace("/", ".")
    for mutant in mutants_of(text, module, file):
        if (mutant.target.removeprefix(f"{module}."), mutant.block) in ran:
            yield mutant


def search(subject: Mutant | Entry, minutes: float, checkout: Path) -> Fault:
    """Plant the fault and search, as somebody types it. A live bug is planted the other way round: the tree has its fix, and
    `--explain` is to show a case that is wrong without it."""
    live = isinstance(subject, Entry) and subject.remedy is not None
    with tempfile.TemporaryDirectory(prefix="eagletwin-fault-", ignore_cleanup_errors=True) as scratch:
        root = plant(Path(scratch, "tree"))
        if isinstance(subject, Mutant):
            plant_fault(root / subject.file, subject)
        else:
            plant_edits(root, subject.remedy or subject.revert)
        shrinking = ["--explain", "--shrink-minutes", "1"] if live else ["--shrink-minutes", "0"]
        options = ["--minutes", str(minutes), *shrinking, "--out", scratch]
        begun = time.monotonic()
        command = [sys.executable, "-m", "eagletwin", "fuzz", "--sglang", str(root), *options]
        path = os.pathsep.join([str(checkout.absolute() / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
        cache = _cache_without_corpus(Path(scratch, "cache"))
        searching = subprocess.Popen(
            command,
            env={**os.environ, "EAGLETWIN_CACHE": str(cache), "PYTHONPATH": path},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        found, seconds = "", 0.0
        assert searching.stderr is not None
        for line in searching.stderr:
            if not found and line.rstrip().endswith("; shrinking"):
                found, seconds = line.partition(": ")[2].strip(), time.monotonic() - begun
                searching.terminate()
        code = searching.wait()
        written = next(Path(scratch).rglob("summary.json"), None)  # an error leaves none
        summary = json.loads(written.read_text()) if written else {"tally": {"cases": 0}}
        if live and (effect := summary.get("effect")):
            found = f"{effect['on_base']} ({effect['sizes']})"
        seconds, tally = round(seconds or time.monotonic() - begun, 1), summary["tally"]
        name = subject.name if isinstance(subject, Mutant) else subject.id
        return Fault(name, code, found, seconds, tally["cases"], tally.get("reached", 0))


def _cache_without_corpus(folder: Path) -> Path:
    """A cache in which nothing is known of an earlier search: with it a fault is found at once."""
    folder.mkdir()
    for part in cache_folder("bytecode").parent.iterdir():
        if part.name != "corpus":
            (folder / part.name).symlink_to(part)
    return folder


def plant_fault(file: Path, mutant: Mutant) -> None:
    """Edit a file of the tree, and none that it shares with another."""
    lines = file.read_text().splitlines(keepends=True)
    old, new = mutant.match.splitlines(keepends=True), mutant.replacement.splitlines(keepends=True)
    for first in range(max(0, mutant.line - len(old) - 40), len(lines)):
        own = lines[first : first + len(old)]
        margin = own[0][: len(own[0]) - len(own[0].lstrip())][: len(own[0]) - len(old[0])] if own else ""
        if [line if line.strip() else "\n" for line in own] == [f"{margin}{line}" if line.strip() else "\n" for line in old]:
            text = [f"{margin}{line}" if line.strip() else "\n" for line in new]
            file.unlink()
            file.write_text("".join([*lines[:first], *text, *lines[first + len(old) :]]))
            return
    raise AssertionError(f"{mutant.name} is not in {file}")


def plant_edits(root: Path, patch: Patch | None) -> None:
    """Write the edits of a patch into the files of a tree."""
    assert patch is not None
    for edit in patch.edits:
        module, names = edit.target, list[str]()
        while not (file := root / f"{module.replace('.', '/')}.py").is_file():
            module, _, name = module.rpartition(".")
            names.insert(0, name)
        text = file.read_text()
        node: ast.AST = ast.parse(text)
        for name in names:
            node = next(one for one in ast.walk(node) if getattr(one, "name", None) == name)
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        lines = text.splitlines(keepends=True)
        first, last = node.lineno - 1, node.end_lineno
        margin = lines[first][: node.col_offset]
        body = "".join(line.removeprefix(margin) for line in lines[first:last])
        assert body.count(edit.match) == 1, (edit.target, edit.match)
        before = body[: body.index(edit.match)].rpartition("\n")[2]
        indent = before[: len(before) - len(before.lstrip())]
        body = body.replace(edit.match, edit.replacement.replace("\n", f"\n{indent}"))
        file.unlink()
        file.write_text(
            "".join([*lines[:first], *(margin * bool(line.strip()) + line for line in body.splitlines(True)), *lines[last:]])
        )
