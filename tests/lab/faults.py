"""`faults`: how soon `eagletwin fuzz --sglang TREE`, or `--vllm TREE`, without a hint, finds a one-place fault of the engine.

Faults are drawn, of the mutants of all blocks that some case ran, the files in turn: of SGLang a measurement has these blocks
(commands/fuzz/coverage.py), of vLLM a few cases are run for it, and the Triton kernels that such a block launches count as
well. Each fault is planted in a tree of its own. A fault that is not found may be none: two programs may do the same.
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
from msgspec import Struct, convert

from eagletwin.cases.entry import Entry
from eagletwin.cases.ledger import ENTRIES
from eagletwin.harness.core.errors import EXIT_EQUAL
from eagletwin.harness.core.files import cache_folder
from eagletwin.harness.core.patch import Patch
from eagletwin.harness.core.run_spec import Engine
from eagletwin.harness.engines.blocks import blocks_of
from eagletwin.harness.engines.source import INSTALLED, Source, resolve

from ..engine.planted_trees import plant
from .common import ROOT
from .coverage import blocks_at, coverage_of
from .mutants.corpus import gather
from .mutants.draw import WRAPPED, Mutant, mutants_of

_FOLDERS: dict[Engine, tuple[str, ...]] = {
    "sglang": tuple(f"srt/{name}" for name in ("speculative", "managers", "mem_cache", "model_executor", "layers", "models")),
    "vllm": ("v1/core", "v1/sample", "v1/spec_decode", "v1/worker", "v1/attention", "model_executor/models"),
}
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
    "*block_table*",
    "*input_batch*",
    "*proposer*",
    "*mimo*",
)
# What is noted of vLLM, in one case each of so many blocks of a default search.
_NOTED, _BLOCKS = ("vllm.v1", "vllm.model_executor.models"), 20
_MEASURED = ROOT / "build/coverage-vllm.json"


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
    engine: Annotated[str, typer.Option(help="Whose faults: `sglang` or `vllm`.")] = "sglang",
    seed: Annotated[int, typer.Option(min=0, help="Which faults are drawn.")] = 0,
    minutes: Annotated[float, typer.Option(min=0.1, help="Of each search.")] = 2.0,
    at_once: Annotated[int, typer.Option(min=1, help="Searches at the same time, each on two cores of its own.")] = 1,
    checkout: Annotated[Path, typer.Option(help="Whose eagletwin searches.")] = Path(),
    write: Annotated[Path, typer.Option(help="File that gets a line of JSON for each fault; it goes on there.")] = Path(
        "build/faults.jsonl"
    ),
) -> int:
    """How soon a search without a hint finds one-place faults of an engine."""
    source = INSTALLED if engine == "sglang" else resolve("", convert(engine, Engine))
    write.parent.mkdir(parents=True, exist_ok=True)
    done = [msgspec.json.decode(line, type=Fault) for line in write.read_bytes().splitlines()] if write.exists() else []
    names = {fault.name for fault in done}
    cores, pairs = sorted(os.sched_getaffinity(0)), SimpleQueue[list[int]]()
    for first in range(0, 2 * at_once, 2):
        pairs.put(cores[first : first + 2])

    def take_cores() -> None:
        os.sched_setaffinity(0, pairs.get())  # of this thread, and so of the processes that it starts

    with ThreadPoolExecutor(at_once, initializer=take_cores) as searches:
        subjects = {one: ENTRIES[one] for one in entry} if entry else {one.name: one for one in drawn(number, seed, source)}
        left = [subject for name, subject in subjects.items() if name not in names]
        for ended in as_completed([searches.submit(search, subject, minutes, checkout, source) for subject in left]):
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


def drawn(number: int, seed: int, source: Source = INSTALLED) -> list[Mutant]:
    """The faults: one after the other of each file, in an order that is drawn."""
    random, by_file, keys = Random(seed), dict[str, list[Mutant]](), _executed_keys(source)
    searched = searched_files(source)
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as readers:
        each_file = readers.map(_reached, [source] * len(searched), searched, [keys] * len(searched))
        for file, found in zip(searched, each_file, strict=True):
            if found:
                by_file[file] = random.sample(found, len(found))
    files, each = random.sample(sorted(by_file), len(by_file)), list[Mutant]()
    for turn in range(number):
        each += [by_file[file][turn] for file in files if turn < len(by_file[file])]
    return each[:number]


def _executed_keys(source: Source) -> frozenset[str]:
    """The keys of the blocks that some case ran. vLLM's are measured once."""
    from eagletwin.harness.commands.fuzz.coverage import Coverage, read_coverage

    if source.engine == "sglang":
        return frozenset(read_coverage().by_key())
    if not _MEASURED.exists():
        ran = ((one.case, blocks_at(source.root, one.ran)) for one in gather(source, 0, _BLOCKS, 0, 1, _NOTED))
        _MEASURED.parent.mkdir(exist_ok=True)
        _MEASURED.write_bytes(msgspec.json.encode(coverage_of(source.called, ran)))
    return frozenset(msgspec.json.decode(_MEASURED.read_bytes(), type=Coverage).by_key())


def searched_files(source: Source = INSTALLED) -> list[str]:
    root, found = source.root, set[str]()
    for folder in _FOLDERS[source.engine]:
        for pattern in _FILES:
            found |= {str(file.relative_to(root)) for file in (root / source.engine / folder).rglob(f"{pattern}.py")}
    return sorted(found)


def _reached(source: Source, file: str, keys: Container[str]) -> list[Mutant]:
    """The mutants of a file in blocks with these keys."""
    try:
        return list(_mutants(source, file, keys))
    except SyntaxError:
        return []


def _mutants(source: Source, file: str, keys: Container[str]) -> Iterator[Mutant]:
    from eagletwin.harness.commands.fuzz.coverage import key_of

    text = (source.root / file).read_text()
    found = [
        (block, body) for block, body, _ in blocks_of(ast.parse(text)) if key_of(file, block.function, block.branch) in keys
    ]
    ran = {(block.function, block.line) for block, _ in found}
    launched = set[str]()
    if source.engine == "vllm":  # a kernel has no blocks of its own: `kernel[grid](...)` is in one
        nodes = (node for _, body in found for statement in body for node in ast.walk(statement))
        launched = {node.value.id for node in nodes if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name)}
    module = file.removesuffix(".py").replace("/", ".")
    unfit = [word for word in WRAPPED if word != "jit" or not launched]
    for mutant in mutants_of(text, module, file, unfit, {*launched, *(function for function, _ in ran)}):
        function = mutant.target.removeprefix(f"{module}.")
        if function in launched or (function, mutant.block) in ran:
            yield mutant


def search(subject: Mutant | Entry, minutes: float, checkout: Path, source: Source = INSTALLED) -> Fault:
    """Plant the fault and search, as somebody types it. A live bug is planted the other way round: the tree has its fix, and
    `--explain` is to show a case that is wrong without it."""
    live = isinstance(subject, Entry) and subject.remedy is not None
    with tempfile.TemporaryDirectory(prefix="eagletwin-fault-", ignore_cleanup_errors=True) as scratch:
        root = plant(Path(scratch, "tree"), source=source)
        if isinstance(subject, Mutant):
            plant_fault(root / subject.file, subject)
        else:
            plant_edits(root, subject.remedy or subject.revert)
        shrinking = ["--explain", "--shrink-minutes", "1"] if live else ["--shrink-minutes", "0"]
        options = ["--minutes", str(minutes), *shrinking, "--out", scratch]
        begun = time.monotonic()
        command = [sys.executable, "-m", "eagletwin", "fuzz", f"--{source.engine}", str(root), *options]
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
    full = next(number for number, line in enumerate(old) if line.strip())  # a blank line does not show how far it is in
    for first in range(max(0, mutant.line - len(old) - 40), len(lines) - len(old) + 1):
        own = lines[first : first + len(old)]
        margin = own[full][: max(0, len(own[full]) - len(old[full]))]
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
