"""The options of `eagletwin campaign` that a search on one machine does not have, as Typer reads them."""

from pathlib import Path
from typing import Annotated

import typer

from ..options import ENGINE

MINUTES = 60.0

_WHERE = "Where it runs"

Address = Annotated[
    str,
    typer.Option(
        metavar="ADDRESS",
        rich_help_panel=_WHERE,
        help="A Ray cluster: HOST:PORT, or `auto` for the one that this machine is of. Default: one of this machine alone, "
        "which ends with the campaign.",
        show_default=False,
    ),
]
Workers = Annotated[
    int,
    typer.Option(
        "--workers",
        "-n",
        metavar="N",
        min=0,
        rich_help_panel=_WHERE,
        help="Workers, each with a core and SGLang to itself. 0: as many as the cluster has room for, also when it grows.",
        show_default=False,
    ),
]
PerGpu = Annotated[
    int,
    typer.Option(metavar="N", min=1, rich_help_panel=_WHERE, help="With --device cuda: workers that share one GPU."),
]
Resume = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        rich_help_panel=_WHERE,
        help="Go on with the campaign of this run folder, whose driver ended. It has its options from there; of others, "
        "--minutes and --cases set its limits anew, what ran before included.",
    ),
]
CorpusFolder = Annotated[
    Path | None,
    typer.Option(
        "--corpus",
        metavar="FOLDER",
        rich_help_panel="Cases: what all of them have",
        help="Run the cases of the files in this folder, each once, in place of generated ones.",
    ),
]
Releases = Annotated[
    list[str] | None,
    typer.Option(
        "--sglang",
        metavar="RELEASE|PATH",
        rich_help_panel=ENGINE,
        help="Run this SGLang: a published release, or a source tree. Repeatable: each has its share of the workers. Default: "
        "the installed one.",
    ),
]
