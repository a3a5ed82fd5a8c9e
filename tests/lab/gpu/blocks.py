"""Which blocks of SGLang's speculative code a campaign reached, on which device: what `gpu run --blocks` writes."""

import ast
from collections import defaultdict
from pathlib import Path

import msgspec
from msgspec import Struct

from eagletwin.harness.engines.blocks import blocks_of


class Reached(Struct, frozen=True, kw_only=True):
    """A block, and the devices on which it ran. branch: what leads into it; empty: a call of the function."""

    file: str
    line: int
    function: str
    branch: str
    ran: tuple[str, ...]


def reached(folder: Path) -> list[Reached]:
    """All blocks of the modules that were imported, by what the processes of the run wrote into `folder`."""
    ran: dict[tuple[str, int], set[str]] = defaultdict(set)
    files: set[str] = set()
    for said in sorted(folder.glob("*.json")):
        device = said.name.partition("-")[0]
        for file, lines in msgspec.json.decode(said.read_bytes(), type=dict[str, list[int]]).items():
            files.add(file)
            for line in lines:
                ran[file, line].add(device)
    return [
        Reached(
            file=Path(file).name,
            line=block.line,
            function=block.function,
            branch=block.branch,
            ran=tuple(sorted(ran[file, block.line])),
        )
        for file in sorted(files)
        for block, _, _ in blocks_of(ast.parse(Path(file).read_bytes(), file))
    ]


def written(blocks: list[Reached], file: Path) -> str:
    """Write a line for each block; what to print of them: how many ran, and in which called functions some did not."""
    called = {(one.file, one.function) for one in blocks if one.ran or not one.function}
    lines = [
        "\t".join(
            (
                f"{one.file}:{one.line}",
                ", ".join(one.ran) or ("not run" if (one.file, one.function) in called else "function not called"),
                one.function,
                one.branch,
            )
        )
        for one in blocks
    ]
    file.write_text("\n".join([*lines, ""]), encoding="utf-8")
    inside = [one for one in blocks if (one.file, one.function) in called]
    counts = ", ".join(
        f"{sum(device in one.ran for one in blocks):,} on {device}"
        for device in sorted({name for one in blocks for name in one.ran})
    )
    return (
        f"blocks of SGLang's speculative code: {len(blocks):,}, of which ran {counts or 'none'}; "
        f"{sum(not one.ran for one in inside):,} of {len(inside):,} in functions that were called did not run: {file}"
    )
