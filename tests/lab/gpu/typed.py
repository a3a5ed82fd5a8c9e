"""The options of `gpu plan`, as Typer reads them."""

from pathlib import Path
from typing import Annotated, Literal

import typer

File = Annotated[Path, typer.Argument(help="Where to write the plan (JSON).")]
Groups = Annotated[int, typer.Option(min=0, help="Groups of generated cases that share a configuration.")]
Cases = Annotated[int, typer.Option(min=1, help="Cases of each group or block.")]
Blocks = Annotated[
    int,
    typer.Option(
        min=0,
        help="Also this many blocks of what a search draws (`eagletwin fuzz`): every recipe and option that a GPU runs. Each "
        "job draws its cases itself, where it runs; of large cases a quarter as many.",
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="The same seed draws the same cases.")]
Sizes = Annotated[
    bool, typer.Option("--sizes", help="Also batches of 1 to 8: in a graph of their size, padded, and without a graph.")
]
Samples = Annotated[
    int,
    typer.Option(
        "--sampling", min=0, help="Also this many groups of cases that sample: by the target alone, and by rejection."
    ),
]
Entries = Annotated[list[str] | None, typer.Option("--prove", metavar="PR|all", help="Ledger entries to prove. Repeatable.")]
Planted = Annotated[bool, typer.Option("--faults", help="Also planted faults that only a graph can have: each must be found.")]
Races = Annotated[
    int,
    typer.Option(
        min=0,
        help="Also this many groups of cases with overlap that run again with pauses between the GPU's streams: they must be "
        "answered alike.",
    ),
]
Waits = Annotated[
    bool, typer.Option("--missing-waits", help="Also missing waits, planted: pauses must find each in 200 cases.")
]
Rate = Annotated[
    int,
    typer.Option(
        "--rate", metavar="COPIES", min=0, help="For measuring a rate: only cases, no reruns, each group this many times."
    ),
]
OfModel = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="RECIPE",
        help="Generate all cases of this model, and prove entries in it. Default: llama-tiny, and drafts of layers; of an "
        "entry, its own.",
    ),
]
OfMode = Annotated[
    Literal["", "graphs", "overlap", "prefill", "eager"],
    typer.Option(
        "--mode",
        metavar="MODE",
        help="Run all generated cases in this mode: `graphs`, `overlap` (graphs too), `prefill` (graphs of prefill too, with "
        "overlap) or `eager`. Default: one after the other.",
    ),
]
Records = Annotated[
    Path,
    typer.Option(
        metavar="FOLDER",
        help="With --model and --prove: where `python -m tests.lab models` keeps the cases by which entries show in it.",
    ),
]
OnRelease = Annotated[
    str,
    typer.Option(
        "--sglang",
        metavar="RELEASE",
        help="The release that the plan will run on: its live bugs are known. Default: the one that is installed here.",
    ),
]
