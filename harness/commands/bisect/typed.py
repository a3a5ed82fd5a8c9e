"""The options of `eagletwin bisect`, as Typer reads them."""

from typing import Annotated

import typer

_SEARCH = "Search: over releases, unless --git or --features"

CaseName = Annotated[str, typer.Argument(help="A case file (JSON), or the id of a ledger entry such as 25015.")]
Since = Annotated[
    str,
    typer.Option("--from", metavar="RELEASE", rich_help_panel=_SEARCH, show_default=False, help="The oldest release to try."),
]
Until = Annotated[
    str,
    typer.Option("--to", metavar="RELEASE", rich_help_panel=_SEARCH, show_default=False, help="The newest release to try."),
]
Git = Annotated[
    tuple[str, str, str] | None,
    typer.Option(
        "--git",
        metavar="PATH GOOD BAD",
        rich_help_panel=_SEARCH,
        help="Search the commits of this checkout between two, by `git bisect run` on a scratch worktree.",
    ),
]
Features = Annotated[
    bool,
    typer.Option(
        "--features",
        rich_help_panel=_SEARCH,
        help="Search for the smallest set of features of the case that the fault needs.",
    ),
]
RuleName = Annotated[
    str,
    typer.Option(
        "--rule",
        metavar="RULE",
        rich_help_panel=_SEARCH,
        show_default=False,
        help="The rule that counts as the fault, wherever in the case it breaks: draft.slots, engine.crash, …",
    ),
]
