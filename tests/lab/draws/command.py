"""`draws`: whether tokens that are sampled speculatively have the target's distribution."""

from pathlib import Path
from typing import Annotated

import typer

from eagletwin.harness.core.errors import EXIT_DIVERGED, EXIT_EQUAL, EXIT_UNKNOWN, InputError


def draws(
    out: Annotated[Path, typer.Argument(help="Folder for draws.jsonl, to which each setting's counts are added.")],
    settings: Annotated[
        list[str] | None, typer.Option("--setting", help="tree, chain, rejection or seeded-tree. Repeatable. Default: all.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0, help="How long each engine begins new cases, its start included.")] = 180,
    cases: Annotated[
        int, typer.Option(min=0, help="Cases of each engine, 64 requests each. 0: as many as fit into the time.")
    ] = 0,
    processes: Annotated[int, typer.Option(min=1, help="Engines that run at the same time.")] = 12,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs to use.")] = 1,
    fault: Annotated[str, typer.Option(help="Plant this fault: then the counts must not agree.")] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cuda",
    graphs: Annotated[str, typer.Option(help="Batch sizes of CUDA graphs, or none.")] = "4,16,32",
    overlap: Annotated[bool, typer.Option(help="The overlap scheduler.")] = True,
    sglang: Annotated[str, typer.Option(metavar="RELEASE|PATH", help="Run this SGLang. Default: the installed one.")] = "",
) -> int:
    """Test whether speculatively sampled tokens have the target's distribution. 1: no; 125: too few were drawn to tell."""
    from eagletwin.harness.commands.options import mode_of, must_have_cuda

    from .campaign import FAULTS, Portion, lines, record, tell
    from .distribution import SETTINGS

    chosen = settings or list(SETTINGS)
    unknown = [name for name in chosen if name not in SETTINGS] + [name for name in (fault,) if name and name not in FAULTS]
    if unknown:
        raise InputError(
            f"{unknown[0]!r} is neither a setting nor a fault",
            consequence="nothing was run",
            remedy=f"settings: {', '.join(SETTINGS)}; faults: {', '.join(FAULTS)}",
        )
    if device == "cuda":
        must_have_cuda(gpus)
    mode = mode_of(device, graphs if device == "cuda" else None, overlap)
    out.mkdir(parents=True, exist_ok=True)
    agree, enough = True, True
    for name in chosen:
        share = Portion(setting=name, mode=mode, number=0, step=1, seconds=seconds, cases=cases, fault=fault, sglang=sglang)
        result = tell(share, processes, gpus)
        record(result, out)
        print("\n".join(lines(result)), flush=True)
        agree, enough = agree and result.agrees, enough and result.tells
    return EXIT_DIVERGED if not agree else EXIT_EQUAL if enough else EXIT_UNKNOWN
