"""`coverage`: measures which code of SGLang the cases of a default search run, for searches that begin where a change runs."""

import ast
from collections.abc import Iterable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
import typer

from eagletwin.cases.blocks import SearchConstraints
from eagletwin.harness.commands.fuzz.coverage import FILE, PACKAGES, RARE, Coverage, Setting, key_of, mode_for, settings_of
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.errors import EXIT_EQUAL
from eagletwin.harness.engines.blocks import Block, blocks_of
from eagletwin.harness.engines.source import INSTALLED
from eagletwin.harness.families.valid import runs_in

from .mutants.corpus import FIELDS, gather_blocks

_PART = 12  # blocks of a search that one process runs


def coverage(
    blocks: Annotated[int, typer.Option(min=2, help="Blocks of a default search.")] = 240,
    asking: Annotated[int, typer.Option(min=0, help="Blocks of a search for each thing that requests may ask for.")] = 1,
    rare: Annotated[int, typer.Option(min=0, help="Blocks of each recipe that no other search draws.")] = 12,
    seed: Annotated[int, typer.Option(min=0, help="Of the search.")] = 0,
    at_once: Annotated[int, typer.Option(min=1, help="Processes.")] = 1,
    write: Annotated[Path, typer.Option(help="The file.")] = FILE,
) -> int:
    """Measure which code of the installed SGLang cases run, into the file that a search of a change reads."""
    parts = [Part("", seed, range(first, min(first + _PART, blocks))) for first in range(0, blocks, _PART)]
    parts += [Part(name, seed, range(asking)) for name in FIELDS]
    parts += [Part(name, seed, range(first, min(first + 4, rare))) for name in RARE.values() for first in range(0, rare, 4)]
    with ProcessPoolExecutor(at_once) as processes:
        found = coverage_of(INSTALLED.called, chain.from_iterable(processes.map(measure, parts)))
    write.write_bytes(msgspec.json.encode(found) + b"\n")
    print(f"{found.cases} cases ran {len(found.by_key())} blocks: {write}")
    return EXIT_EQUAL


class Part(NamedTuple):
    """Blocks of one search. told: a thing that requests may ask for, or one of RARE; "": of a default search."""

    told: str
    seed: int
    numbers: range

    @property
    def asked(self) -> SearchConstraints:
        name, mode = self.told, mode_for(self.told)
        if name not in RARE.values():
            return SearchConstraints(asks=(name,) if name else (), production=True)
        return SearchConstraints(
            held={"model": name}, wanted=lambda probe: runs_in(probe, mode), production=True, beside=(name,)
        )


def measure(part: Part) -> list[tuple[Case, dict[str, list[Block]]]]:
    """An equal case of each block, with the blocks of SGLang that it ran, by file."""
    searches = {"": (part.asked, part.numbers)}
    found = gather_blocks(INSTALLED, mode_for(part.told), part.seed, searches, 1, PACKAGES)
    return [(one.case, blocks_at(INSTALLED.root, one.ran)) for one in found]


def coverage_of(sglang: str, ran: Iterable[tuple[Case, Mapping[str, Iterable[Block]]]]) -> Coverage:
    """ran: cases, each with the blocks that it ran, by file."""
    cases, keys = list[list[Setting]](), dict[str, int]()
    for number, (case, files) in enumerate(ran):
        cases.append(settings_of(case))
        for key in {key_of(file, block.function, block.branch) for file, blocks in files.items() for block in blocks}:
            keys[key] = keys.get(key, 0) | 1 << number
    settings, blocks = dict[str, dict[str, str]](), dict[str, str]()
    for one in sorted({one for each in cases for one in each} - set(cases[0]).intersection(*cases[1:])):
        having = sum(1 << number for number, each in enumerate(cases) if one in each)
        settings.setdefault(one[0], {})[one[1]] = f"{having:x}"
    for key in sorted(keys):
        blocks[f"{keys[key]:x}"] = blocks.get(f"{keys[key]:x}", "") + key
    return Coverage(sglang, len(cases), settings, dict(sorted(blocks.items())))


def blocks_at(root: Path, ran: Mapping[str, Iterable[int]]) -> dict[str, list[Block]]:
    """By file, the blocks that begin at these lines."""
    return {file: [block for line in lines for block in _at(root / file).get(line, ())] for file, lines in ran.items()}


@cache
def _at(file: Path) -> dict[int, list[Block]]:
    found: dict[int, list[Block]] = {}
    for block, _, _ in blocks_of(ast.parse(file.read_bytes())):
        found.setdefault(block.line, []).append(block)
    return found
