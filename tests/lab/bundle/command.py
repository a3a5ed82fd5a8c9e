"""`bundle`: pack a release of SGLang, and what it needs of one GPU architecture, for a host without network.

`contents.py` says what a release's bundle holds, `archives.py` downloads it, empties what other GPUs need, and compresses, and
`pack.py` does all of it in order, compiles ahead, and cuts the result into parts. `unpack.py` travels with them: it is what the
host runs.
"""

from pathlib import Path
from typing import Annotated

import typer

from eagletwin.harness.core.errors import EXIT_EQUAL
from eagletwin.harness.core.terminal import progress

from ..common import ROOT


def bundle(
    folder: Annotated[Path, typer.Argument(help="Where to write it. 400 MB of 0.5.23, 70 MB of 0.5.17, in parts of 50 MB.")],
    sglang: Annotated[str, typer.Option(metavar="RELEASE", help="The release to pack: 0.5.23 or 0.5.17.")] = "0.5.23",
) -> int:
    """Pack eagletwin, a release of SGLang, and what both need on a Hopper GPU. `. FOLDER/setup.sh` unpacks it on the host."""
    from .pack import bundle as pack

    with progress("bundle") as line:
        line.look(f"packing SGLang {sglang}")
        files = list(pack(folder, ROOT, sglang))
    for file in files:
        print(f"{file.stat().st_size / 1e6:8.1f} MB  {file}")
    return EXIT_EQUAL
