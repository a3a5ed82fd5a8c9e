"""`eagletwin bench …`: what all this costs, printed or written down. Each command measures by bench.py."""

from pathlib import Path
from typing import Annotated

import typer

from .cli_options import Sglang
from .errors import EXIT_DIVERGED, EXIT_EQUAL

bench = typer.Typer(add_completion=False, help="What all this costs on this machine.")


@bench.command("rate")
def bench_rate(
    seconds: Annotated[float, typer.Option(min=1.0, help="How long to run cases.")] = 30.0,
    topk: Annotated[int, typer.Option(min=1, max=16, help="Tokens that each node of the draft tree proposes.")] = 1,
    sglang: Sglang = "",
) -> int:
    """Cases a second on one core: run, traced and judged. The last line is the figure."""
    from .bench import rate
    from .engines.source import resolve

    found = rate(seconds, topk, resolve(sglang))
    print(f"{found.cases} cases in {found.seconds:.1f} s, run, traced and judged")
    print(f"{found.per_second:.2f} cases/s/core")
    return EXIT_EQUAL


@bench.command("search")
def bench_search(
    entry: Annotated[list[str] | None, typer.Option(help="Only this entry of the ledger. Repeatable.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many searches for each entry of the ledger.")] = 10,
) -> int:
    """How soon each undone fix of the ledger is found and made small. 1 if a search found nothing."""
    from eagletwin.cases.regressions import LEDGER

    from .bench_search import search_all, searchable, why_not
    from .report.benchmarks import search_lines

    chosen = [LEDGER[name] for name in entry] if entry else searchable()
    found = search_all([one for one in chosen if not why_not(one)], seeds)
    print("\n".join(search_lines(found, [one for one in (chosen if entry else LEDGER.values()) if why_not(one)])))
    return EXIT_EQUAL if all(len(one.found) == seeds for one in found) else EXIT_DIVERGED


@bench.command("acceptance")
def bench_acceptance(
    layers: Annotated[bool, typer.Option(help="Of multi-layer drafts: what the live faults of their worker cost.")] = False,
) -> int:
    """What SGLang's layout of the draft tree costs in accepted tokens (PR #8409), by the reference alone; two minutes."""
    from .acceptance import SHAPES, acceptance
    from .acceptance_layers import FAULTS, layers_cost
    from .models.recipes import RECIPES
    from .report.benchmarks import acceptance_lines, layers_lines

    if layers:
        several = [name for name, recipe in RECIPES.items() if recipe.mtp_layers and recipe.family == "llama"]
        found = [layers_cost(model, steps, fault) for model in several for fault in FAULTS for steps in (2, 3, 4)]
        print("\n".join(layers_lines(found)))
    else:
        single = [name for name, recipe in RECIPES.items() if not recipe.mtp_layers]  # several layers have no tree to lay out
        print("\n".join(acceptance_lines([acceptance(model, shape) for model in single for shape in SHAPES])))
    return EXIT_EQUAL


@bench.command("all")
def bench_all(
    write: Annotated[Path, typer.Option(help="Folder for benchmarks.md and benchmarks.svg.")] = Path("docs"),
    seeds: Annotated[int, typer.Option(min=1, help="How many searches for each entry of the ledger.")] = 10,
) -> int:
    """All of it, some twenty minutes, as a page and a plot."""
    from eagletwin.cases.regressions import LEDGER

    from . import bench as measure
    from .bench_search import search_all, searchable, why_not
    from .report.benchmarks import PAGE, PLOT, page, plot

    rates = {topk: measure.spread([measure.rate(10, topk).per_second for _ in range(5)]) for topk in (1, 3)}
    alone, together = measure.parallel(10, 3)
    growth = measure.growth(5)
    text = page(
        rates=rates,
        share=measure.share(100),
        alone=alone,
        together=together,
        start=measure.start(5),
        growth=growth,
        found=search_all(searchable(), seeds),
        others=[entry for entry in LEDGER.values() if why_not(entry)],
        seeds=seeds,
    )
    write.mkdir(parents=True, exist_ok=True)
    (write / PAGE).write_text(text, encoding="utf-8")
    (write / PLOT).write_text(plot(growth), encoding="utf-8")
    print(text)
    return EXIT_EQUAL
