"""The options of `eagletwin fuzz` that choose cases and limit the search, as Typer reads them."""

from pathlib import Path
from typing import Annotated

import typer

MINUTES, SHRINK_MINUTES, MAX_CASES = 5.0, 3.0, 1_000_000

_SEARCH, _WHERE, _CASES = "Search", "Where it runs", "Cases"

Minutes = Annotated[
    float,
    typer.Option(
        metavar="MINUTES",
        min=0.01,
        rich_help_panel=_SEARCH,
        help="Limits the search, the import of SGLang included. Shrinking has its own limit, --shrink-minutes. The "
        "case that runs when time is up is finished.",
    ),
]
MaxCases = Annotated[
    int,
    typer.Option(
        "--cases",
        metavar="N",
        min=1,
        rich_help_panel=_SEARCH,
        help="Limits the generated cases; runs that shrink one do not count. Four cases mostly share one configuration.",
    ),
]
Seed = Annotated[int, typer.Option(metavar="N", min=0, rich_help_panel=_SEARCH, help="The same seed draws the same cases.")]
Findings = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=0,
        rich_help_panel=_SEARCH,
        help="End after this many different findings; 0: when the time is up. Two differ by rule, stage, layer or kernel; two "
        "crashes by exception and function.",
    ),
]
ShrinkMinutes = Annotated[
    float,
    typer.Option(
        metavar="MINUTES",
        min=0.0,
        rich_help_panel=_SEARCH,
        help="Limits the shrinking of each finding, whatever --minutes says. The smallest case until then counts; "
        "three more runs confirm it.",
    ),
]
Processes = Annotated[
    int,
    typer.Option(
        "--workers",
        "-n",
        metavar="N",
        min=0,
        rich_help_panel=_WHERE,
        help="Processes that run cases, or workers of the cluster with --address. Default: one a core, as far as the memory "
        "goes. A seed gives the same cases and the same result for any number, except where a change directs the search.",
        show_default=False,
    ),
]
Address = Annotated[
    str,
    typer.Option(
        metavar="ADDRESS",
        rich_help_panel=_WHERE,
        help="Run cases on a Ray cluster as well: HOST:PORT, or `auto` for the one of this machine.",
        show_default=False,
    ),
]
Resume = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        rich_help_panel=_WHERE,
        help="Continue the search of this run folder, with its options. --minutes, --cases, --findings and --shrink-minutes "
        "set new limits for all of it.",
    ),
]
Shrink = Annotated[
    Path | None,
    typer.Option(
        metavar="CASE",
        rich_help_panel=_SEARCH,
        help="Search nothing: make this case smaller, a file with a finding whose time was up. --shrink-minutes limits it.",
    ),
]
Explain = Annotated[
    bool,
    typer.Option(
        "--explain",
        rich_help_panel=_SEARCH,
        help="If nothing is found: the smallest case in which the change alters a recorded value, with both values. "
        "--shrink-minutes limits it.",
    ),
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FEATURE",
        rich_help_panel=_CASES,
        help="Only cases with this feature, or with one of a list with commas: a topic such as trees, sampling or grammar, a "
        "value such as topk=4, context-length=16 or updates=disk, a model recipe or a family. Repeatable: cases that have all "
        "of them. docs/guide/fuzz.md lists the features.",
    ),
]
Not = Annotated[
    list[str] | None,
    typer.Option("--not", metavar="FEATURE", rich_help_panel=_CASES, help="No cases with this feature. Repeatable."),
]
