"""Which blocks of SGLang's speculative code run, in every process of a run (`gpu run --blocks` and `mutants` of tests/lab).

The modules are compiled from their source with a note at the start of each block. Triton kernels, and functions that a patch
takes the place of, have none.

Called by zygote.py and worker.py before SGLang is imported, and by runner.py when a case is done.
"""

import ast
import os
import sys
from pathlib import Path

import msgspec

from eagletwin.harness.engines.blocks import FOLDER, OF, SPECULATIVE, blocks_of

from .own_loader import LoaderOf, NotedSource, SourceFinder, note

_ran: dict[str, set[int]] = {}  # file -> first lines of blocks that ran, here or before the fork


def install() -> None:
    """Note what runs from now on, if a folder is named. Before SGLang is imported."""
    if os.environ.get(FOLDER):
        sys.meta_path.insert(0, SourceFinder(_loader_of))


def begin() -> None:
    """A case begins: where each is told apart, forget what ran so far."""
    if OF in os.environ:
        for lines in _ran.values():
            lines.clear()


def write(device: str) -> None:
    """What ran so far in this process, into a file of its own."""
    folder = os.environ.get(FOLDER)
    if folder:
        ran = {file: sorted(lines) for file, lines in _ran.items()}
        Path(folder, f"{device}-{os.getpid()}.json").write_bytes(msgspec.json.encode(ran))


class _Loader(NotedSource):
    def __init__(self, name: str, path: str) -> None:
        super().__init__(name, path)
        self.ran = _ran.setdefault(path, set()).add

    def add_notes(self, tree: ast.Module) -> None:
        for block, body, documented in list(blocks_of(tree)):
            note(body, block.line, documented=documented)


def _loader_of(module: str) -> LoaderOf | None:
    noted = os.environ.get(OF, SPECULATIVE).split(",")
    return _Loader if any(module == name or module.startswith(f"{name}.") for name in noted) else None
