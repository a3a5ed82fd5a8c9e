"""The options of `eagletwin compare`, as Typer reads them."""

from typing import Annotated

import typer

from ..options import OUTPUT

SHRINK_MINUTES = 0.5

Base = Annotated[str, typer.Argument(metavar="BASE", help="What the change was made from: a release, or a source tree.")]
Head = Annotated[str, typer.Argument(metavar="HEAD", help="The change: a release, or a source tree.")]
Cases = Annotated[int, typer.Option(metavar="N", min=0, help="Limits the generated cases. 0: none.")]
Seed = Annotated[int, typer.Option(metavar="N", min=0, help="The same seed draws the same cases.")]
Ledger = Annotated[
    list[str] | None,
    typer.Option(
        metavar="none|all|ID",
        help="Entries of the ledger that run on both sides: `all` that the mode reaches, `none`, or these. Repeatable. "
        "Default: all.",
        show_default=False,
    ),
]
Minutes = Annotated[
    float,
    typer.Option(
        metavar="MINUTES",
        min=0.01,
        help="Limits the generated cases, which come after the ledger.",
    ),
]
ShrinkMinutes = Annotated[
    float,
    typer.Option(
        metavar="MINUTES",
        min=0.0,
        help="Limits the shrinking of one example of each way in which HEAD is newly broken.",
    ),
]
AsMarkdown = Annotated[
    bool, typer.Option("--markdown", rich_help_panel=OUTPUT, help="Print a comment for the pull request, in Markdown.")
]
AsJson = Annotated[bool, typer.Option("--json", rich_help_panel=OUTPUT, help="Print JSON, for programs.")]
