"""The options of `eagletwin ci`, as Typer reads them."""

from pathlib import Path
from typing import Annotated

import typer

from ..options import OUTPUT

MINUTES = 10.0

Minutes = Annotated[
    float,
    typer.Option(
        metavar="MINUTES",
        min=0.0,
        help="Time of all searches together, in equal parts, after the ledger; a finding is made small for up to 3 minutes "
        "more. 0: no search.",
    ),
]
Families = Annotated[
    list[str] | None,
    typer.Option(
        "--family",
        metavar="MODEL",
        help="Search cases of this model recipe (docs/reference/case.md). Repeatable. Default: one search of everything.",
        show_default=False,
    ),
]
Ledger = Annotated[
    list[str] | None,
    typer.Option(
        metavar="none|all|ID",
        help="Entries of the ledger that are asked: `all` that the mode reaches, `none`, or these. Repeatable. Default: all.",
        show_default=False,
    ),
]
BaseOption = Annotated[
    str,
    typer.Option(
        "--base",
        metavar="BASE",
        help="What --sglang is a change of: a revision of the same checkout, a release or a folder. The report says which of "
        "the functions that differ ran; if none did, the code is 125. Default: its commit or release.",
        show_default=False,
    ),
]
Seed = Annotated[int, typer.Option(metavar="N", min=0, help="Of the searches. The same seed draws the same cases.")]
Summary = Annotated[
    Path | None,
    typer.Option(metavar="FILE", rich_help_panel=OUTPUT, help="Append the summary, in Markdown, to this file."),
]
History = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", rich_help_panel=OUTPUT, help="Append a line of JSON to this file: what came out, and of what."
    ),
]
