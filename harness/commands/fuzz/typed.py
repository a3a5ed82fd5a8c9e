"""The options of `eagletwin fuzz` that choose cases and limit the search, as Typer reads them."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from eagletwin.harness.core.case import WeightPath

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
        help="Limits the generated cases; runs that shrink one do not count. Four cases mostly share one configuration.",
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
Processes = Annotated[
    int,
    typer.Option(
        "-n",
        metavar="N",
        min=0,
        rich_help_panel=_SEARCH,
        help="Processes that run cases; on a CPU they share one import of SGLang. 0: one a core, as far as the memory goes. "
        "The same seed draws the same cases, and comes to the same, with any number, unless a change directs the search.",
        show_default=False,
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
Only = Annotated[
    list[str] | None,
    typer.Option(
        metavar="FEATURE",
        rich_help_panel=_CASES,
        help="Only cases with this feature, or with one of a list with commas: a topic such as trees, layers, sampling, "
        "rejection, context-end, small-trees or updates, a model recipe or a family. Repeated: cases that have all of them.",
    ),
]
Not = Annotated[
    list[str] | None,
    typer.Option("--not", metavar="FEATURE", rich_help_panel=_CASES, help="No cases with this feature. Can be repeated."),
]
Model = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        rich_help_panel=_CASES,
        help="Only this model recipe (docs/reference/case.md). Default: all of them.",
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
        help="Only this context length of the model, 8, 16, 32 or 64: requests reach its end. Default: in one block of eight "
        "any of them.",
    ),
]
SmallTrees = Annotated[
    bool,
    typer.Option(
        "--small-trees",
        rich_help_panel=_CASES,
        help="Only trees with fewer nodes than their longest path.",
    ),
]
UpdateWeights = Annotated[
    WeightPath | None,
    typer.Option(
        metavar="HOW",
        rich_help_panel=_CASES,
        help="Only workers that start with other weights and are given the model's, from `disk`, by `tensor` (all as one: "
        "`tensor_bucket`), or by another process that broadcasts them (`distributed`, `distributed_bucket`).",
    ),
]
SamplingOption = Annotated[
    Sampling | None,
    typer.Option(
        metavar="HOW",
        rich_help_panel=_CASES,
        help="Only requests that sample: by the `target` alone, by `rejection` (chains only), or by `any` of the two; or "
        "`none`: all requests are greedy. Default: some of each.",
    ),
]
Asks = Annotated[
    list[str] | None,
    typer.Option(
        "--ask",
        metavar="WHAT",
        rich_help_panel=_CASES,
        help="What requests may ask for beside: `stream` (tokens as they come), `logit_bias`, `processor` (a custom logit "
        "processor), `min_p` (of requests that sample), `logprobs` (of the prompt, of what is sent, of the best "
        "tokens), `penalties` (frequency, presence, repetition), `min_new_tokens`, `grammar` (small regular and "
        "context-free ones; a third of the blocks has llguidance, the others xgrammar), `hidden_states` (of all tokens, "
        "or of the last), `session` (turns of streaming sessions), `n` (several samples of a prompt), `adapter` (LoRA "
        "on the target). Default: some of each. Known bugs with them are counted and mended, as all are. Repeatable.",
    ),
]
