"""`coverage`: measures which code of SGLang the cases of a default search run, for searches that begin where a change runs."""

import ast
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from eagletwin.harness.commands.fuzz.coverage import FILE, PACKAGES, Coverage, Setting, key_of, settings_of
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.errors import EXIT_EQUAL
from eagletwin.harness.engines.blocks import Block, blocks_of


def coverage(
    blocks: Annotated[int, typer.Option(min=2, help="Blocks of a default search.")] = 240,
    asking: Annotated[int, typer.Option(min=0, help="Blocks of a search for each thing that requests may ask for.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of the search.")] = 0,
) -> int:
    """Measure which code of the installed SGLang cases run, into the file that a search of a change reads."""
    from eagletwin.harness.engines.source import INSTALLED

    from .mutants.corpus import gather

    known = gather(INSTALLED, seed, blocks, asking, 1, PACKAGES)
    found = coverage_of(INSTALLED.called, ((one.case, blocks_at(INSTALLED.root, one.ran)) for one in known))
    FILE.write_bytes(msgspec.json.encode(found) + b"\n")
    print(f"{len(found.cases)} cases ran {len(found.by_key())} blocks: {FILE}")
    return EXIT_EQUAL


def coverage_of(sglang: str, ran: Iterable[tuple[Case, Mapping[str, Iterable[Block]]]]) -> Coverage:
    """ran: cases, each with the blocks that it ran, by file."""
    cases, keys = list[list[Setting]](), dict[str, int]()
    for number, (case, files) in enumerate(ran):
        cases.append(settings_of(case))
        for key in {key_of(file, block.function, block.branch) for file, blocks in files.items() for block in blocks}:
            keys[key] = keys.get(key, 0) | 1 << number
    listed = sorted({one for each in cases for one in each} - set(cases[0]).intersection(*cases[1:]), key=str)
    number_of, blocks = {one: number for number, one in enumerate(listed)}, dict[str, str]()
    for key in sorted(keys):
        blocks[f"{keys[key]:x}"] = blocks.get(f"{keys[key]:x}", "") + key
    rows = [sorted(number_of[one] for one in each if one in number_of) for each in cases]
    return Coverage(sglang, listed, rows, dict(sorted(blocks.items())))


def blocks_at(root: Path, ran: Mapping[str, Iterable[int]]) -> dict[str, list[Block]]:
    """By file, the blocks that begin at these lines."""
    return {file: [block for line in lines for block in _at(root / file).get(line, ())] for file, lines in ran.items()}


@cache
def _at(file: Path) -> dict[int, list[Block]]:
    found: dict[int, list[Block]] = {}
    for block, _, _ in blocks_of(ast.parse(file.read_bytes())):
        found.setdefault(block.line, []).append(block)
    return found
