"""`mutants`: the share of one-place faults of SGLang's worker that a search sees; `oracle`: of our judge."""

from pathlib import Path
from typing import Annotated

import typer

from eagletwin.harness.commands.options import SOURCE, run_options
from eagletwin.harness.core.errors import EXIT_DIVERGED, EXIT_EQUAL, InputError
from eagletwin.harness.core.files import cache_folder
from eagletwin.harness.core.terminal import progress

from ..common import telling

Records = Annotated[
    Path, typer.Option("--write", help="Folder for mutants.md, and for mutants/ with what came of each mutant.")
]
Seed = Annotated[int, typer.Option(help="Which mutants are drawn, and which cases.")]
AIM, AIM_OF_ORACLE = 0.97, 0.95


@run_options(SOURCE)
def mutants(
    number: Annotated[int, typer.Option(min=1, help="How many mutants.")] = 300,
    seed: Seed = 0,
    blocks: Annotated[int, typer.Option(min=1, help="Blocks of a default search whose cases are run.")] = 144,
    asking: Annotated[int, typer.Option(min=0, help="Blocks of a search for each thing that requests may ask for.")] = 4,
    most: Annotated[int, typer.Option("--cases", min=1, help="Cases with each mutant, of those that run its place.")] = 24,
    seconds: Annotated[float, typer.Option(min=1.0, help="How long to search for each mutant.")] = 45.0,
    sglang: str = "",
    write: Records = Path("build/records"),
) -> int:
    """What share of one-place mutants of SGLang's speculative code a search kills. Some hours; it goes on where it was left.
    1 if fewer than 97 % of those that can be seen."""
    from eagletwin.harness.engines.source import resolve

    from .hunt import DrawnCases, hunt_all, make_corpus

    drawn = DrawnCases(seed=seed, blocks=blocks, asking=asking)
    source = resolve(sglang)
    corpus = cache_folder("mutants") / drawn.named(source.called)
    with progress("mutants", number) as line:
        if not corpus.exists():
            make_corpus(corpus, source, drawn, telling(line))
        hunt_all(corpus, write / "mutants" / WORKER, source, (number, seed, most, seconds), telling(line))
    return _written(write)


@run_options(SOURCE)
def oracle(
    number: Annotated[int, typer.Option(min=1, help="How many mutants.")] = 150,
    seed: Seed = 0,
    changes: Annotated[int, typer.Option(min=0, help="Numbers that are changed in each healthy trace, one at a time.")] = 20,
    most: Annotated[int, typer.Option("--traces", min=1, help="Traces with each mutant, of those that run its line.")] = 300,
    sglang: str = "",
    blocks: Annotated[int, typer.Option(min=1, help="As in `mutants`, which is run first.")] = 144,
    asking: Annotated[int, typer.Option(min=0, help="The same.")] = 4,
    write: Records = Path("build/records"),
) -> int:
    """What share of one-place mutants of the judge and the reference says another thing of recorded traces. 1 if fewer than
    95 % of those that can be seen."""
    from eagletwin.harness.engines.source import resolve

    from .hunt import DrawnCases, corpus_in, outcomes_in
    from .oracle import ask_all, record

    source = resolve(sglang)
    corpus = cache_folder("mutants") / DrawnCases(seed=seed, blocks=blocks, asking=asking).named(source.called)
    if not corpus.exists():
        raise InputError(
            "the cases of the worker's mutants are not there",
            consequence="there are no traces to judge",
            remedy="run `python -m tests.lab mutants` first",
        )
    traces = cache_folder("mutants") / f"traces-{corpus.stem}"
    with progress("mutants", number) as line:
        record(traces, source, corpus_in(corpus), outcomes_in(write / "mutants" / WORKER))
        ask_all(traces, write / "mutants" / ORACLE, (number, seed, changes, most), telling(line))
    return _written(write)


WORKER, ORACLE = "worker.jsonl", "oracle.jsonl"


def _written(folder: Path) -> int:
    """Write the page of what was measured so far."""
    from .hunt import outcomes_in
    from .page import PAGE, examined, page, rate

    worker, oracle = ((outcomes_in(folder / "mutants" / name), examined(name)) for name in (WORKER, ORACLE))
    text = page(worker, oracle)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / PAGE).write_text(text, encoding="utf-8")
    print(text)
    figures = (rate(*worker), rate(*oracle))
    short = [killed < aim * seen for (killed, seen), aim in zip(figures, (AIM, AIM_OF_ORACLE), strict=True)]
    return EXIT_DIVERGED if any(short) else EXIT_EQUAL
