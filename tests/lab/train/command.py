"""`train`: a real, trained target with three drafts, for whatever depends on how many drafts are accepted."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from eagletwin.harness.commands.options import let_threads_sleep
from eagletwin.harness.core.errors import EXIT_EQUAL
from eagletwin.harness.core.terminal import progress

from ..common import telling
from .settings import SIZES, Size


def train(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="FOLDER",
            help="Empty folder to write the pair into. Without it, the pair is kept in the cache and made only once.",
            show_default=False,
        ),
    ] = None,
    size: Annotated[
        Size,
        typer.Option(
            help="Target of 0.8 million parameters (minutes on two cores), 4.6 million, or 52 million (for a GPU).",
        ),
    ] = "tiny",
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="Where it is trained.")] = "cpu",
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Seed of all that is drawn.")] = 0,
) -> int:
    """Train a small byte-level Llama and three drafts of it, and print where their checkpoints are.

    The drafts are an EAGLE head, an EAGLE-3 head and an MTP draft of three layers. The text is Python's own library, so nothing
    is downloaded. prompts.jsonl has prompts that were held out, for `acceptance --prompts`; pair.json says how good the drafts
    are. Tokens are bytes: a server needs --skip-tokenizer-init.
    """
    let_threads_sleep()
    from .pair import PARTS, PROMPTS, cached_pair, new_pair

    settings = replace(SIZES[size], seed=seed)
    with progress("reports of the training") as line:
        say = telling(line)
        found = cached_pair(settings, device, say) if folder is None else new_pair(settings, device, folder, say)
    written = {**{part: found / part for part in PARTS}, "prompts": found / PROMPTS}
    for name, path in written.items():
        print(f"{name:7} {path}")
    return EXIT_EQUAL
