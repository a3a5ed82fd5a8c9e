"""`eagletwin gpu …`: pack what a GPU host without network needs, say what to run there, run it, and sum it up."""

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer

from .cli_options import AttentionBackend, DataType, Ranks
from .errors import EXIT_DIVERGED, EXIT_EQUAL, EXIT_UNKNOWN, InputError
from .words import count

gpu = typer.Typer(add_completion=False, help="Many cases on a GPU host, also one without network.")


@gpu.command("bundle")
def gpu_bundle(
    folder: Annotated[Path, typer.Argument(help="Where to write it; some 32 MB.")],
    flash_attention: Annotated[
        bool, typer.Option("--flash-attention", help="With FlashAttention's kernels, for `--attention fa3`; some 250 MB more.")
    ] = False,
) -> int:
    """Pack eagletwin, SGLang 0.5.17, its kernels for Hopper and what they need. `. FOLDER/setup.sh` unpacks it on the host."""
    from .gpu.bundle import bundle

    for file in bundle(folder, Path(__file__).resolve().parents[1], flash_attention):
        print(f"{file.stat().st_size / 1e6:8.1f} MB  {file}")
    return EXIT_EQUAL


@gpu.command("plan")
def gpu_plan(
    file: Annotated[Path, typer.Argument(help="Where to write the plan (JSON).")],
    groups: Annotated[int, typer.Option(min=0, help="Groups of generated cases that share a configuration.")] = 100,
    cases: Annotated[int, typer.Option(min=1, help="Cases of each group.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="The same seed draws the same cases.")] = 0,
    sizes: Annotated[
        bool, typer.Option("--sizes", help="Batches of 1 to 8 as well: each in a graph of its size, padded, and without one.")
    ] = False,
    samples: Annotated[
        int,
        typer.Option("--sampling", min=0, help="Groups of generated cases that sample: by the target alone, and by rejection."),
    ] = 0,
    entries: Annotated[
        list[str] | None, typer.Option("--prove", metavar="PR|all", help="Ledger entries to prove. Repeatable.")
    ] = None,
    planted: Annotated[
        bool, typer.Option("--faults", help="Faults that only a graph can have, planted: each must be found.")
    ] = False,
    tp: Ranks = 1,
    rate: Annotated[
        int,
        typer.Option(
            "--rate", metavar="COPIES", min=0, help="To measure a rate: cases alone, nothing run again, each group so often."
        ),
    ] = 0,
    dtype: DataType = "float32",
    attention: AttentionBackend = "triton",
) -> int:
    """Write down what to run: generated cases, batches of every size, and both sides of ledger entries with graphs, with
    overlap, and eager."""
    import msgspec

    from .cli_options import check_attention, check_ranks, ledger_of
    from .engines.mode import Mode
    from .gpu.faults import faults
    from .gpu.plan import GRAPHS, generated, plain, proofs
    from .gpu.sampling import sampling
    from .gpu.sizes import every_size
    from .reach import unreached

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
    mode = Mode(device="cuda", graphs=GRAPHS, dtype=dtype, attention=attention)
    ledger = ledger_of(entries or [])
    others = [entry for entry in ledger if unreached(entry, mode)]
    if others and "all" not in (entries or ()):
        raise InputError(
            unreached(others[0], mode), consequence="no plan was written", remedy="give these options, or leave the entry out"
        )
    jobs += proofs([entry for entry in ledger if entry not in others], tp=tp, dtype=dtype, attention=attention)
    jobs += faults(dtype, attention) if planted else []
    if not jobs:
        raise InputError(
            "there is nothing to run: no group of cases, no batch sizes, no proof, no fault",
            consequence="no plan was written",
            remedy="give --groups 1 or more, --sizes, --sampling, --prove or --faults",
        )
    file.write_bytes(msgspec.json.encode(jobs))
    for entry in others:
        print(f"left out: {unreached(entry, mode)}")
    print(f"{count(len(jobs), 'job')}, {count(sum(len(job.cases) for job in jobs), 'case')}: {file}")
    return EXIT_EQUAL


@gpu.command("run")
def gpu_run(
    plan: Annotated[Path, typer.Argument(help="A plan that `gpu plan` wrote.")],
    out: Annotated[Path, typer.Argument(help="Where results.jsonl, and the traces that are kept, go.")],
    processes: Annotated[int, typer.Option(min=1, help="Engines that run side by side; each holds some 1 GB of the GPU.")] = 12,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs over which they are spread.")] = 1,
) -> int:
    """Run a plan. 1 if a case diverged that no known bug explains, 125 if one is unknown or a job did not run."""
    import time

    from .cli_options import must_have_cuda
    from .gpu.apart import apart_text
    from .gpu.campaign import read_plan, run_plan
    from .gpu.paths import table

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
        statuses.update("known" if seen.known else seen.status for seen in done.seen)
        statuses["unknown"] += bool(done.error)
        if done.engine is not None:
            parts.update(done.engine.parts)
        if done.apart is not None:
            apart.append(done.apart)
        for seen in done.seen:
            batches.update(seen.paths)
        said = Counter(f"{seen.status} {seen.known or seen.rule}".strip() for seen in done.seen)
        again = "" if done.again is None else f", again {'the same' if done.again else 'DIFFERENT: ' + done.again_differs}"
        if done.beside is not None:
            beside = "the same" if done.beside.same else f"DIFFERENT: {done.beside.differs}"
            again += f", beside {beside} ({done.beside.largest:.1e})"
        print(f"{done.name}: {dict(said)}{again} {done.error} ({done.start:.0f} s, {done.seconds:.0f} s)", flush=True)
    seconds = time.monotonic() - begun
    if batches:
        print(f"decode batches, by size and by how they ran:\n{table(batches)}")
    if parts:
        print("\n".join(["engines, by what SGLang made them of:", *(f"{parts[name]:>5} {name}" for name in sorted(parts))]))
    if apart:
        print(f"the two types, of cases that are equal in both:\n{apart_text(apart)}")
    print(f"{dict(statuses)} in {seconds:.1f} s, {sum(statuses.values()) / seconds:.2f} cases/s")
    return EXIT_DIVERGED if statuses["diverged"] else EXIT_UNKNOWN if statuses["unknown"] else EXIT_EQUAL


@gpu.command("draws")
def gpu_draws(
    out: Annotated[Path, typer.Argument(help="Folder for draws.jsonl, to which each setting's counts are added.")],
    settings: Annotated[
        list[str] | None, typer.Option("--setting", help="tree, chain, rejection, seeded-tree. Repeatable; by default all.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0, help="How long each engine begins further cases, its start included.")] = 180,
    cases: Annotated[int, typer.Option(min=0, help="Cases of each engine, 64 requests each; 0: as many as there is time.")] = 0,
    processes: Annotated[int, typer.Option(min=1, help="Engines that run side by side.")] = 12,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs over which they are spread.")] = 1,
    fault: Annotated[str, typer.Option(help="Plant this fault: the counts must not agree then.")] = "",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cuda",
    graphs: Annotated[str, typer.Option(help="Batch sizes of CUDA graphs, or none.")] = "4,16,32",
    overlap: Annotated[bool, typer.Option(help="The overlap scheduler.")] = True,
    sglang: Annotated[str, typer.Option(metavar="RELEASE|PATH", help="Which SGLang; by default the installed one.")] = "",
) -> int:
    """Do tokens that are sampled speculatively have the target's distribution? 1: no; 125: too few were drawn to tell."""
    from .cli_options import mode_of, must_have_cuda
    from .distribution import SETTINGS
    from .errors import InputError
    from .gpu.draws import FAULTS, Share, lines, record, tell

    chosen = settings or list(SETTINGS)
    unknown = [name for name in chosen if name not in SETTINGS] + [name for name in (fault,) if name and name not in FAULTS]
    if unknown:
        raise InputError(
            f"{unknown[0]!r} is no setting, and no fault",
            consequence="nothing was run",
            remedy=f"settings: {', '.join(SETTINGS)}; faults: {', '.join(FAULTS)}",
        )
    if device == "cuda":
        must_have_cuda(gpus)
    mode = mode_of(device, graphs if device == "cuda" else "", overlap)
    out.mkdir(parents=True, exist_ok=True)
    agree, enough = True, True
    for name in chosen:
        share = Share(setting=name, mode=mode, number=0, step=1, seconds=seconds, cases=cases, fault=fault, sglang=sglang)
        told = tell(share, processes, gpus)
        record(told, out)
        print("\n".join(lines(told)), flush=True)
        agree, enough = agree and told.agrees, enough and told.tells
    return EXIT_DIVERGED if not agree else EXIT_EQUAL if enough else EXIT_UNKNOWN
