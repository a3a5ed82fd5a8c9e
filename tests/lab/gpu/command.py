"""`gpu`: plan what runs on a GPU host, run it there, and make a page of the results."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from eagletwin.harness.commands.options import ATTENTION, DTYPE, RANKS, run_options
from eagletwin.harness.core.errors import EXIT_EQUAL, EXIT_HARNESS, InputError
from eagletwin.harness.core.run_spec import FLASHINFER_HEAD
from eagletwin.harness.core.terminal import count, progress

if TYPE_CHECKING:
    from eagletwin.cases.entry import Entry
    from eagletwin.harness.core.run_spec import Attention, Dtype

    from .job import Job


# The options of `gpu plan`, as Typer reads them.

File = Annotated[Path, typer.Argument(help="Where to write the plan (JSON).")]
Groups = Annotated[int, typer.Option(min=0, help="Groups of generated cases that share a configuration.")]
Cases = Annotated[int, typer.Option(min=1, help="Cases of each group or block.")]
Blocks = Annotated[
    int,
    typer.Option(
        min=0,
        help="Also this many blocks of what a search draws (`eagletwin fuzz`): every recipe and option that a GPU runs. Each "
        "job draws its cases itself, where it runs; of large cases a quarter as many.",
    ),
]
Seed = Annotated[int, typer.Option(min=0, help="The same seed draws the same cases.")]
Sizes = Annotated[
    bool, typer.Option("--sizes", help="Also batches of 1 to 8: in a graph of their size, padded, and without a graph.")
]
Samples = Annotated[
    int,
    typer.Option(
        "--sampling", min=0, help="Also this many groups of cases that sample: by the target alone, and by rejection."
    ),
]
Entries = Annotated[list[str] | None, typer.Option("--prove", metavar="PR|all", help="Ledger entries to prove. Repeatable.")]
Planted = Annotated[bool, typer.Option("--faults", help="Also planted faults that only a graph can have: each must be found.")]
Races = Annotated[
    int,
    typer.Option(
        min=0,
        help="Also this many groups of cases with overlap that run again with pauses between the GPU's streams: they must be "
        "answered alike.",
    ),
]
Waits = Annotated[
    bool, typer.Option("--missing-waits", help="Also missing waits, planted: pauses must find each in 200 cases.")
]
Rate = Annotated[
    int,
    typer.Option(
        "--rate", metavar="COPIES", min=0, help="For measuring a rate: only cases, no reruns, each group this many times."
    ),
]
OfModel = Annotated[
    str,
    typer.Option(
        "--model",
        metavar="RECIPE",
        help="Generate all cases of this model, and prove entries in it. Default: llama-tiny, and drafts of layers; of an "
        "entry, its own.",
    ),
]
OfMode = Annotated[
    Literal["", "graphs", "overlap", "prefill", "eager"],
    typer.Option(
        "--mode",
        metavar="MODE",
        help="Run all generated cases in this mode: `graphs`, `overlap` (graphs too), `prefill` (graphs of prefill too, with "
        "overlap) or `eager`. Default: one after the other.",
    ),
]
Records = Annotated[
    Path,
    typer.Option(
        metavar="FOLDER",
        help="With --model and --prove: where `python -m tests.lab models` keeps the cases by which entries show in it.",
    ),
]
OnRelease = Annotated[
    str,
    typer.Option(
        "--sglang",
        metavar="RELEASE",
        help="The release that the plan will run on: its live bugs are known. Default: the one that is installed here.",
    ),
]

gpu = typer.Typer(add_completion=False, help="Run many cases on a GPU host, which may have no network.")


@gpu.command("plan")
@run_options((RANKS, DTYPE, ATTENTION))
def gpu_plan(
    file: File,
    groups: Groups = 100,
    cases: Cases = 20,
    blocks: Blocks = 0,
    seed: Seed = 0,
    sizes: Sizes = False,
    samples: Samples = 0,
    entries: Entries = None,
    planted: Planted = False,
    races: Races = 0,
    missing_waits: Waits = False,
    tp: int = 1,
    rate: Rate = 0,
    dtype: "Dtype" = "float32",
    attention: "Attention" = "triton",
    model: OfModel = "",
    mode: OfMode = "",
    records: Records = Path("docs/records"),
    sglang: OnRelease = "",
) -> int:
    """Write a plan: generated cases, batches of every size, and both sides of ledger entries (graphs, overlap, eager)."""
    from eagletwin.harness.commands.options import check_attention, check_ranks
    from eagletwin.harness.families.valid import check_model

    from ..models.survey import proofs_in_model
    from . import faults
    from .plan import Options, every_size, generated, plain, proofs, release_of, sampling, searched

    _must_be_new(file)
    check_attention(attention, "cuda", dtype)
    check_ranks(tp)
    if model:
        check_model(model, "--model")
    if model or groups or planted:
        _check_heads(attention, model or "llama-tiny", planted=planted)
    _check_float32(dtype, others=bool(blocks or sizes or samples or rate or races or missing_waits))
    options = Options(release=release_of(sglang), tp=tp, dtype=dtype, attention=attention, model=model, mode=mode)
    with progress("plan") as line:
        line.look(f"drawing {count(groups, 'group')} of {count(cases, 'case')}")
        jobs = plain(groups, cases, seed, rate) if rate else generated(groups, cases, seed, options)
    jobs += searched(blocks, cases, seed, options)
    jobs += every_size(tp) if sizes else []
    jobs += sampling(samples, cases, seed, options.release)
    chosen, others = _reached(entries or [], dtype, attention)
    for entry in () if model else chosen:
        _check_heads(attention, entry.case.model)
    carried, elsewhere = proofs_in_model(chosen, options, records) if model else (proofs(chosen, options), [])
    jobs, others = jobs + carried, others + elsewhere
    jobs += faults.faults(dtype, attention) if planted else []
    jobs += faults.races(races, cases, seed) + (faults.missing_waits(seed) if missing_waits else [])
    return _write_plan(file, jobs, others)


def _write_plan(file: Path, jobs: "list[Job]", others: list[str]) -> int:
    """Write the jobs, and say what was left out. Raises InputError if there are none."""
    import msgspec

    if not jobs:
        raise InputError(
            "the plan would be empty: it has no group of cases, batch sizes, proof, fault or race",
            consequence="no plan was written",
            remedy="give --groups 1 or more, --blocks, --sizes, --sampling, --prove, --faults, --races or --missing-waits",
        )
    file.write_bytes(msgspec.json.encode(jobs))
    print("".join(f"left out: {why}\n" for why in others), end="")
    cases = sum(job.draw.cases if job.draw else len(job.cases) for job in jobs)
    size = f"{count(len(jobs), 'job')}, {'up to ' * any(job.draw for job in jobs)}{count(cases, 'case')}"
    print(f"{size}: {file}")
    return EXIT_EQUAL


def _check_heads(attention: "Attention", model: str, *, planted: bool = False) -> None:
    """Raises InputError for models whose heads the attention backend has no kernel for."""
    _check_heads_of(attention, model, "--model llama-wide")
    if planted:
        _check_heads_of(attention, "llama-tiny", "no --faults, which are planted in models of their own")


def _check_heads_of(attention: "Attention", model: str, other: str) -> None:
    """Raises InputError for a model whose heads the backend has no kernel for. other: what to give in place of the model."""
    from eagletwin.harness.families import RECIPES

    if attention == "flashmla" and RECIPES[model].target.latent is None:
        raise InputError(
            f"--attention flashmla with {model}: its kernels are those of latent attention",
            consequence="nothing was run",
            remedy="give --model deepseek-nextn-wide, or another attention backend",
        )
    narrow = RECIPES[model].narrowest_head
    if attention == "flashinfer" and narrow < FLASHINFER_HEAD:
        raise InputError(
            f"--attention flashinfer with {model}: its heads are {narrow} wide, and FlashInfer's kernels take "
            f"{FLASHINFER_HEAD} and more",
            consequence="nothing was run",
            remedy=f"give {other}, or another attention backend",
        )


def _check_float32(dtype: "Dtype", *, others: bool) -> None:
    """Raises InputError for another type with what is planned in float32 alone."""
    if dtype != "float32" and others:
        raise InputError(
            f"--dtype {dtype} with --blocks, --sizes, --sampling, --races, --missing-waits or --rate: these are planned in "
            "float32 alone",
            consequence="no plan was written",
            remedy="plan generated cases and proofs in it, and the others in a plan of their own",
        )


def _must_be_new(file: Path) -> None:
    """Raises InputError for a file that is there."""
    if file.exists():
        raise InputError(f"{file} exists", consequence="no plan was written", remedy="name another file, or remove it")


def _reached(names: list[str], dtype: "Dtype", attention: "Attention") -> "tuple[list[Entry], list[str]]":
    """The entries of these names that such a plan reaches, and why it does not reach the others of `all`. Raises InputError."""
    from msgspec.structs import replace

    from eagletwin.cases.ledger import ledger_of
    from eagletwin.cases.reach import why_unreachable

    from .plan import MODES

    modes = [replace(mode, dtype=dtype, attention=attention) for mode in MODES.values()]
    whys = {entry.id: min((why_unreachable(entry, mode) for mode in modes), key=len) for entry in ledger_of(names)}
    if attention != "triton":
        alone = {entry.id: entry.on_cuda.triton_alone for entry in ledger_of(names)}
        whys |= {name: f"{name} is proven with --attention triton alone: {why}" for name, why in alone.items() if why}
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
    blocks: Annotated[
        bool, typer.Option("--blocks", help="Also write to OUT/blocks.txt which branches of SGLang's speculative code ran.")
    ] = False,
    mps: Annotated[
        bool,
        typer.Option(
            "--mps/--no-mps",
            help="Let engines use a GPU at the same time, by NVIDIA's MPS, where its daemon is there. "
            "A job whose worker dies runs again alone.",
        ),
    ] = True,
) -> int:
    """Run a plan.

    Exit codes: 1 if a case diverged that no known bug explains, or is different on the engine next to it; 125 if a case is
    unknown, leaves another trace after the others (a state leak), a bug that must be found is not, or a job did not run.
    """
    import time
    from contextlib import closing

    from .jobs import read_plan, run_plan
    from .processes import Sharing
    from .summary import CampaignSummary, keep_campaign

    jobs = read_plan(plan)
    _must_be_able(plan, jobs, out, gpus)
    begun, summary = time.monotonic(), CampaignSummary()
    noted = out / "blocks" if blocks else None
    with (
        Sharing(wanted=mps) as sharing,
        progress("jobs", len(jobs)) as line,
        closing(run_plan(jobs, out, processes, gpus, noted, sharing)) as results,
    ):
        for done in results:
            print(summary.add(done), flush=True)
            line.done(done.name)
    seconds = time.monotonic() - begun
    text = summary.text(seconds, out, noted, sharing.why_not)
    print(text)
    keep_campaign(summary.result(seconds, out, text), out)
    return summary.exit_code


@gpu.command("page")
def gpu_page(
    folder: Annotated[Path, typer.Argument(help="Folder of `gpu run`, or one that holds a results.jsonl alone.")],
) -> int:
    """Make report.html of a folder of results again."""
    from eagletwin.harness.page.render import write_page

    from .summary import campaign_page

    page = campaign_page(folder)
    written = write_page(folder, lambda: page)
    if written is None:
        return EXIT_HARNESS
    print(written)
    return EXIT_EQUAL


def _must_be_able(plan: Path, jobs: "list[Job]", out: Path, gpus: int) -> None:
    """Raises InputError where these jobs cannot run here, or would be added to another run's results."""
    from eagletwin.harness.commands.options import must_have_cuda

    if (out / "results.jsonl").exists():
        raise InputError(
            f"{out} holds the results of another run",
            consequence="nothing was run: the two would be one",
            remedy="name another folder, or remove it",
        )
    if any(job.mode.device == "cuda" for job in jobs):
        for attention in {job.mode.attention for job in jobs}:
            must_have_cuda(gpus, attention)
        if any(job.mode.tp > gpus for job in jobs):
            raise InputError(
                f"{plan} has jobs of {max(job.mode.tp for job in jobs)} ranks",
                consequence="nothing was run: each rank needs a GPU",
                remedy="give as many, with --gpus",
            )
