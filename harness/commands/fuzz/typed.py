"""The options of `eagletwin fuzz` that choose cases and limit the search, as Typer reads them."""

from typing import Annotated, Literal

import typer

Sampling = Literal["none", "target", "rejection", "any"]
MINUTES, SHRINK_MINUTES, MAX_CASES = 5.0, 3.0, 1_000_000

_SEARCH, _CASES = "Search", "Cases: what all of them have"

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
        help="Limits the generated cases; runs that shrink one do not count. Of 20 cases most share one configuration.",
    ),
]
Seed = Annotated[int, typer.Option(metavar="N", min=0, rich_help_panel=_SEARCH, help="The same seed draws the same cases.")]
Findings = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=1,
        rich_help_panel=_SEARCH,
        help="Go on until there are this many different findings. Two differ by rule, stage, layer or kernel; two "
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
Model = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        rich_help_panel=_CASES,
        help="A model recipe (docs/reference/case.md). Default: a Llama with a single draft layer; llama-mtp, "
        "llama-mtp-chain, mimo-v2 and step-3.5 have several, deepseek-nextn has latent attention and experts, "
        "qwen3-next-nextn layers that keep a state, qwen3-moe-eagle3 experts.",
    ),
]
Topk = Annotated[
    int | None,
    typer.Option(metavar="N", rich_help_panel=_CASES, help="1 (chains), 2, 3, 4, 8 or 16 (trees). Default: any."),
]
ContextLength = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        rich_help_panel=_CASES,
        help="Context length of the model, 8, 16, 32 or 64: requests then reach its end, where 0.5.23 has known bugs. "
        "Default: never reached.",
    ),
]
SmallTrees = Annotated[
    bool,
    typer.Option(
        "--small-trees",
        rich_help_panel=_CASES,
        help="Trees with fewer nodes than their longest path: a known bug of 0.5.23 ends the worker.",
    ),
]
UpdateWeights = Annotated[
    Literal["disk", "tensor"] | None,
    typer.Option(
        metavar="HOW",
        rich_help_panel=_CASES,
        help="The worker starts with other weights and is given the model's, from `disk` or by `tensor`.",
    ),
]
SamplingOption = Annotated[
    Sampling,
    typer.Option(
        metavar="HOW",
        rich_help_panel=_CASES,
        help="Requests that sample: by the `target` alone, by `rejection` (chains only), or `any` of the two. `none`: all "
        "requests are greedy.",
    ),
]
