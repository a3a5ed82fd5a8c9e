"""`eagletwin gpu …`: pack what a GPU host without network needs, plan what runs there, run it, and sum it up."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from eagletwin.harness.core.errors import EXIT_DIVERGED, EXIT_EQUAL, EXIT_UNKNOWN, InputError
from eagletwin.harness.core.words import count

from ..options import AttentionBackend, DataType, Ranks
from .typed import Cases, Entries, File, Groups, Planted, Rate, Samples, Seed, Sizes

if TYPE_CHECKING:
    from eagletwin.cases.entry import Entry
    from eagletwin.harness.core.dtype import Dtype
    from eagletwin.harness.core.mode import Attention

gpu = typer.Typer(add_completion=False, help="Run many cases on a GPU host, which may have no network.")


@gpu.command("bundle")
def gpu_bundle(
    folder: Annotated[Path, typer.Argument(help="Where to write it. 40 MB of 0.5.17, 400 MB of 0.5.23, in parts of 60 MB.")],
    sglang: Annotated[str, typer.Option(metavar="RELEASE", help="The release to pack: 0.5.17 or 0.5.23.")] = "0.5.17",
) -> int:
    """Pack eagletwin, a release of SGLang, and what both need on a Hopper GPU. `. FOLDER/setup.sh` unpacks it on the host."""
    from .bundle.pack import bundle

    for file in bundle(folder, Path(__file__).resolve().parents[3], sglang):
        print(f"{file.stat().st_size / 1e6:8.1f} MB  {file}")
    return EXIT_EQUAL


@gpu.command("plan")
def gpu_plan(
    file: File,
    groups: Groups = 100,
    cases: Cases = 20,
    seed: Seed = 0,
    sizes: Sizes = False,
    samples: Samples = 0,
    entries: Entries = None,
    planted: Planted = False,
    tp: Ranks = 1,
    rate: Rate = 0,
    dtype: DataType = "float32",
    attention: AttentionBackend = "triton",
) -> int:
    """Write a plan: generated cases, batches of every size, and both sides of ledger entries (graphs, overlap, eager)."""
    import msgspec

    from ..options import check_attention, check_ranks
    from .faults import faults
    from .plan import generated, plain, proofs
    from .sampled import sampling
    from .sizes import every_size

    if file.exists():
        raise InputError(f"{file} exists", consequence="no plan was written", remedy="name another file, or remove it")
    check_attention(attention, "cuda", dtype)
    check_ranks(tp)
    if dtype != "float32" and (sizes or samples or rate):
        raise InputError(
            f"--dtype {dtype} with --sizes, --sampling or --rate: these are planned in float32 alone",
            consequence="no plan was written",
            remedy="plan generated cases and proofs in it, and the others in a plan of their own",
        )
    jobs = plain(groups, cases, seed, rate) if rate else generated(groups, cases, seed, tp, dtype, attention)
    jobs += every_size(tp) if sizes else []
    jobs += sampling(samples, cases, seed)
    chosen, others = _reached(entries or [], dtype, attention)
    jobs += proofs(chosen, tp=tp, dtype=dtype, attention=attention)
    jobs += faults(dtype, attention) if planted else []
    if not jobs:
        raise InputError(
            "the plan would be empty: it has no group of cases, batch sizes, proof or fault",
            consequence="no plan was written",
            remedy="give --groups 1 or more, --sizes, --sampling, --prove or --faults",
        )
    file.write_bytes(msgspec.json.encode(jobs))
    for why in others:
        print(f"left out: {why}")
    print(f"{count(len(jobs), 'job')}, {count(sum(len(job.cases) for job in jobs), 'case')}: {file}")
    return EXIT_EQUAL


def _reached(names: list[str], dtype: "Dtype", attention: "Attention") -> "tuple[list[Entry], list[str]]":
    """The entries of these names that such a plan reaches, and why it does not reach the others of `all`. Raises InputError."""
    from eagletwin.cases.ledger import ledger_of
    from eagletwin.cases.reach import unreached
    from eagletwin.harness.core.mode import Mode

    from .plan import GRAPHS

    mode = Mode(device="cuda", graphs=GRAPHS, dtype=dtype, attention=attention)
    whys = {entry.id: unreached(entry, mode) for entry in ledger_of(names)}
    others = [why for why in whys.values() if why]
    if others and "all" not in names:
        raise InputError(others[0], consequence="no plan was written", remedy="give these options, or leave the entry out")
    return [entry for entry in ledger_of(names) if not whys[entry.id]], others


@gpu.command("run")
def gpu_run(
    plan: Annotated[Path, typer.Argument(help="A plan that `gpu plan` wrote.")],
    out: Annotated[Path, typer.Argument(help="Folder for results.jsonl, and for the traces that are kept.")],
    processes: Annotated[int, typer.Option(min=1, help="Engines that run side by side; each holds some 1 GB of the GPU.")] = 12,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs over which they are spread.")] = 1,
) -> int:
    """Run a plan.

    Exit codes: 1 if a case diverged that no known bug explains, or is different on the engine next to it; 125 if a case is
    unknown, leaves another trace after the others (a state leak), or a job did not run.
    """
    import time

    from ..diff.precision_gap import apart_text
    from ..options import must_have_cuda
    from .batches import table
    from .jobs import read_plan, run_plan
    from .tally import comparisons, exit_code, statuses_of

    jobs = read_plan(plan)
    if any(job.mode.device == "cuda" for job in jobs):
        must_have_cuda(gpus, "fa3" if any(job.mode.attention == "fa3" for job in jobs) else "triton")
        if any(job.mode.tp > gpus for job in jobs):
            raise InputError(
                f"{plan} has jobs of {max(job.mode.tp for job in jobs)} ranks",
                consequence="nothing was run: each rank needs a GPU",
                remedy="give as many, with --gpus",
            )
    begun, statuses, batches, apart = time.monotonic(), Counter[str](), Counter[str](), []
    parts = Counter[str]()
    for done in run_plan(jobs, out, processes, gpus):
        statuses.update(statuses_of(done))
        if done.engine is not None:
            parts.update(done.engine.parts)
        if done.apart is not None:
            apart.append(done.apart)
        for seen in done.seen:
            batches.update(seen.paths)
        said = Counter(f"{seen.status} {seen.known or seen.rule}".strip() for seen in done.seen)
        again = "".join(f", {comparison}" for comparison in comparisons(done))
        print(f"{done.name}: {dict(said)}{again} {done.error} ({done.start:.0f} s, {done.seconds:.0f} s)", flush=True)
    seconds = time.monotonic() - begun
    if batches:
        print(f"decode batches, by size and by how they ran:\n{table(batches)}")
    if parts:
        print(
            "\n".join(["engines, by the classes that SGLang chose:", *(f"{parts[name]:>5} {name}" for name in sorted(parts))])
        )
    if apart:
        print(f"float32 and bfloat16, in cases that are equal in both:\n{apart_text(apart)}")
    print(f"{dict(statuses)} in {seconds:.1f} s, {sum(statuses.values()) / seconds:.2f} cases/s")
    return exit_code(statuses)


@gpu.command("draws")
def gpu_draws(
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
    from eagletwin.harness.core.errors import InputError

    from ..draws.campaign import FAULTS, Portion, lines, record, tell
    from ..draws.distribution import SETTINGS
    from ..options import mode_of, must_have_cuda

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
