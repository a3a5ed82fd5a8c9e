"""The options of `eagletwin acceptance`, as Typer reads them."""

from pathlib import Path
from typing import Annotated, Literal

import typer

_PAIR, _DRAFTING, _SERVER = "The pair", "What is drafted, and in which type: without --server", "A running server"

Target = Annotated[
    str,
    typer.Option(
        "--target",
        metavar="CHECKPOINT",
        rich_help_panel=_PAIR,
        show_default=False,
        help="The target: a folder, or a name on the hub.",
    ),
]
Draft = Annotated[
    str,
    typer.Option(
        "--draft",
        metavar="CHECKPOINT",
        rich_help_panel=_PAIR,
        show_default=False,
        help="The draft: a folder, or a name on the hub.",
    ),
]
Prompts = Annotated[
    Path,
    typer.Option(
        "--prompts",
        metavar="FILE",
        rich_help_panel=_PAIR,
        show_default=False,
        help="One prompt a line: text, or JSON with `input_ids` or `prompt`, and what follows it if the file says so.",
    ),
]
Limit = Annotated[int, typer.Option("--limit", metavar="N", min=1, rich_help_panel=_PAIR, help="Take the first N prompts.")]
NewTokens = Annotated[
    int,
    typer.Option("--new-tokens", metavar="N", min=2, rich_help_panel=_PAIR, help="Tokens that follow a prompt, at most."),
]
TargetType = Annotated[
    Literal["auto", "float32", "bfloat16", "float16"],
    typer.Option(
        "--target-dtype", metavar="TYPE", rich_help_panel=_DRAFTING, help="What the target runs in; auto: as it is stored."
    ),
]
HeadType = Annotated[
    Literal["float64", "float32"],
    typer.Option("--head-dtype", metavar="TYPE", rich_help_panel=_PAIR, help="What the reference's head computes in."),
]
Device = Annotated[
    Literal["cpu", "cuda"],
    typer.Option("--device", metavar="DEVICE", rich_help_panel=_PAIR, help="Where both run: cpu or cuda."),
]
Steps = Annotated[
    int | None,
    typer.Option("--num-steps", metavar="N", min=1, rich_help_panel=_DRAFTING, help="Draft steps a round.  [default: 3]"),
]
Topk = Annotated[
    int | None,
    typer.Option("--topk", metavar="K", min=1, rich_help_panel=_DRAFTING, help="1: chains; more: trees.  [default: 1]"),
]
DraftTokens = Annotated[
    int | None,
    typer.Option(
        "--num-draft-tokens",
        metavar="N",
        min=2,
        rich_help_panel=_DRAFTING,
        help="Nodes of a tree that are verified, the root counted.",
    ),
]
ServerUrl = Annotated[
    str,
    typer.Option(
        "--server",
        metavar="URL",
        rich_help_panel=_SERVER,
        show_default=False,
        help="Send the prompts to this SGLang server, and compare the rounds that it used with those that the pair deserves.",
    ),
]
AtOnce = Annotated[
    int,
    typer.Option("--at-once", metavar="N", min=1, rich_help_panel=_SERVER, help="Requests at once, where prompts go together."),
]
Temperature = Annotated[
    float, typer.Option("--temperature", metavar="T", min=0.0, rich_help_panel=_SERVER, help="0: greedy decoding.")
]
