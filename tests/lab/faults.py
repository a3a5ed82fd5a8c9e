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
from pathlib import Path
from random import Random
from typing import Annotated

import msgspec
import typer
from msgspec import Struct

from eagletwin.harness.core.errors import EXIT_EQUAL
from eagletwin.harness.core.files import cache_folder
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
    seed: Annotated[int, typer.Option(min=0, help="Which faults are drawn.")] = 0,
    minutes: Annotated[float, typer.Option(min=0.1, help="Of each search.")] = 2.0,
    write: Annotated[Path, typer.Option(help="File that gets a line of JSON for each fault; it goes on there.")] = Path(
        "build/faults.jsonl"
    ),
) -> int:
    """How soon a search without a hint finds one-place faults of SGLang."""
    write.parent.mkdir(parents=True, exist_ok=True)
    done = [msgspec.json.decode(line, type=Fault) for line in write.read_bytes().splitlines()] if write.exists() else []
    for mutant in drawn(number, seed)[len(done) :]:
        fault = search(mutant, minutes)
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

    random, by_file, keys = Random(seed), dict[str, list[Mutant]](), read_coverage().by_key()
    for file in searched_files():
        try:
            found = list(_reached(file, keys))
        except SyntaxError:
            continue
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


def _reached(file: str, keys: Container[str]) -> Iterator[Mutant]:
    """The mutants of a file in blocks with these keys."""
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


def search(mutant: Mutant, minutes: float) -> Fault:
    """Plant the fault and search, as somebody types it."""
    with tempfile.TemporaryDirectory(prefix="eagletwin-fault-", ignore_cleanup_errors=True) as scratch:
        root = Path(scratch, "tree")
        plant_fault(plant(root) / mutant.file, mutant)
        options = ["--minutes", str(minutes), "--shrink-minutes", "0", "--out", scratch]
        begun = time.monotonic()
        command = [str(Path(sys.executable).with_name("eagletwin")), "fuzz", "--sglang", str(root), *options]
        environment = {**os.environ, "EAGLETWIN_CACHE": str(_cache_without_corpus(Path(scratch, "cache")))}
        searching = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        found, seconds = "", 0.0
        assert searching.stderr is not None
        for line in searching.stderr:
            if not found and line.rstrip().endswith("; shrinking"):
                found, seconds = line.partition(": ")[2].strip(), time.monotonic() - begun
                searching.terminate()
        code = searching.wait()
        facts = json.loads(next(Path(scratch).rglob("summary.json")).read_text())["tally"]
        seconds = round(seconds or time.monotonic() - begun, 1)
        return Fault(mutant.name, code, found, seconds, facts["cases"], facts["reached"])


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
