"""`coverage`: measures which code of SGLang the cases of a default search run, for searches that begin where a change runs."""

import ast
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from eagletwin.harness.core.errors import EXIT_EQUAL
from eagletwin.harness.engines.blocks import Block, blocks_of


def coverage(
    blocks: Annotated[int, typer.Option(min=2, help="Blocks of a default search.")] = 240,
    asking: Annotated[int, typer.Option(min=0, help="Blocks of a search for each thing that requests may ask for.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="Of the search.")] = 0,
) -> int:
    """Measure which code of the installed SGLang cases run, into the file that a search of a change reads."""
    from eagletwin.harness.commands.fuzz.coverage import FILE, PACKAGES, coverage_of
    from eagletwin.harness.engines.source import INSTALLED

    from .mutants.corpus import gather

    known = gather(INSTALLED, seed, blocks, asking, 1, PACKAGES)
    found = coverage_of(INSTALLED.called, ((one.case, blocks_at(INSTALLED.root, one.ran)) for one in known))
    FILE.write_bytes(msgspec.json.encode(found) + b"\n")
    print(f"{len(found.cases)} cases ran {len(found.by_key())} blocks: {FILE}")
    return EXIT_EQUAL


def blocks_at(root: Path, ran: Mapping[str, Iterable[int]]) -> dict[str, list[Block]]:
    """By file, the blocks that begin at these lines."""
    return {file: [block for line in lines for block in _at(root / file).get(line, ())] for file, lines in ran.items()}


@cache
def _at(file: Path) -> dict[int, list[Block]]:
    found: dict[int, list[Block]] = {}
    for block, _, _ in blocks_of(ast.parse(file.read_bytes())):
        found.setdefault(block.line, []).append(block)
    return found
