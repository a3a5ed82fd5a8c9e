"""The jobs of a plan: generated cases, batches of every size, cases that sample, and both sides of ledger entries."""

import dataclasses
import random
from typing import Any

from msgspec import Struct
from msgspec.structs import replace
from packaging.version import InvalidVersion, Version

from eagletwin.cases.blocks import FEW_REQUESTS, SMALL
from eagletwin.cases.entry import Entry, Side
from eagletwin.cases.ledger import hybrid_keys, pr_33758, prefill_graph, trees, windows
from eagletwin.cases.ledger.multi_layer import ALL_LAYERS
from eagletwin.cases.ledger.retracted import CHUNK_TAIL as RETRACTED
from eagletwin.cases.ledger.standalone import KEYS
from eagletwin.cases.reach import why_unreachable
from eagletwin.cases.strategies import VALUES, Focus, cases, greedy_cases, rejects, sampling_cases
from eagletwin.harness.core.case import Case, Event, Request
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.files import ABSENT, installed_version
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.run_spec import FLASHMLA_PAGE, WIDEST, Attention, Dtype, Mode
from eagletwin.harness.core.verdict import DECLARED_VIEW
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.dimensions.dimension import tokens

from .draw import draw_cases, focus_of
from .job import Draw, Job, MustShow, bugs_of

# What to run on a GPU: generated cases in all modes, and the ledger's proofs.

ONE_GRAPH = (
    "sglang.srt.speculative.multi_layer_eagle_draft_extend_cuda_graph_runner"
    ".OneGraphMultiLayerEagleMultiStepDraftExtendCudaGraphRunner"
)


class Options(Struct, frozen=True, kw_only=True):
    """What all jobs of a plan share.

    release    the release that it runs on: bugs that are live there are fixed in memory
    tp         ranks that share the work, on the CPU too
    dtype      what engine and reference compute in
    attention  SGLang's attention backend
    model      the recipe of all generated cases; empty: the default ones
    mode       the name of the mode of all generated cases; empty: one mode after the other
    """

    release: str
    tp: int = 1
    dtype: Dtype = "float32"
    attention: Attention = "triton"
    model: str = ""
    mode: str = ""


_LAYERED = ("llama-mtp", "llama-mtp-chain")
# Batch sizes of generated cases are 1 to 6, and up to 8 requests run at once: 1, 2 and 4 fit, 3 is padded, the rest is eager.
GRAPHS = (1, 2, 4)
MODES = {
    "graphs": Mode(device="cuda", graphs=GRAPHS),
    "overlap": Mode(device="cuda", graphs=GRAPHS, overlap=True),
    "prefill": Mode(device="cuda", graphs=GRAPHS, prefill_graphs=(16, 64, 256), overlap=True),
    "eager": Mode(device="cuda"),
    "one": Mode(device="cuda", graphs=(1,), overlap=True),
}
_SEARCHED = ("overlap", "graphs", "overlap", "eager", "prefill")  # of blocks of a search: users have overlap and graphs


def generated(groups: int, each: int, seed: int, options: Options) -> list[Job]:
    """Groups of cases that share a configuration, with graphs, every second one with overlap too, some of these with graphs of
    prefill, unless the options name a mode. Every tenth group has a draft of several layers. The first case of each also runs
    on the CPU engine.

    In bfloat16 every case also runs in float32 on the same device, in place of the first on the CPU. With fa3 every second
    group has several layers, which one graph has all of then; there is no second engine, and prefill has no graphs. With a
    model every group has it, and every fifth runs without graphs; in bfloat16 all do if a router chooses experts, since in a
    graph nobody sees how a tie between two of them was decided.
    """
    tp, dtype, attention = options.tp, options.dtype, options.attention
    brain, flash = dtype == "bfloat16", attention == "fa3"
    jobs = []
    for group in range(groups):
        number = seed * 7919 + group
        model = options.model or _layered(group, number, flash=flash)
        held: dict[str, Any] = {"model": model} if model else {}
        held |= {"page_size": FLASHMLA_PAGE, "topk": 1, "max_total_tokens": 2048} if attention == "flashmla" else {}
        name = options.mode or _mode_of(group, options)
        cpu = Mode(overlap=MODES[name].overlap, tp=tp)
        focus = focus_of(number, WIDEST[dtype], **held)
        found = tuple(draw_cases(cases(focus, held=tuple(VALUES)), each, number))
        jobs.append(
            Job(
                known=known_bugs(options.release, model, MODES[name]),
                view="shifted" if _plain(model) else DECLARED_VIEW,
                name=f"generated-{_named(name, options)}{f'-{model}' if options.model else ''}-{group:03}",
                mode=replace(MODES[name], tp=tp, dtype=dtype, attention=attention),
                cases=found,
                again=True,
                beside=None if brain else cpu,
                apart=replace(MODES[name], tp=tp) if brain and not flash else None,
                keep=True,
            )
        )
    return jobs


def _mode_of(group: int, options: Options) -> str:
    """Of the group with this number."""
    if options.model and (group % 5 == 4 or (options.dtype == "bfloat16" and RECIPES[options.model].target.chooses)):
        return "eager"
    if group % 10 == 5 and options.attention != "fa3":
        return "prefill"
    return "overlap" if group % 2 else "graphs"


def searched(blocks: int, each: int, seed: int, options: Options) -> list[Job]:
    """Blocks as a search draws them, in one mode after the other. In most of them known live bugs are mended, as a search does
    it."""
    jobs = []
    for number in range(blocks):
        name = options.mode or _SEARCHED[number % len(_SEARCHED)]
        mode, draw = MODES[name], Draw(seed, number, each, MODES[name].overlap)
        block = draw.block
        probe = block.probe
        jobs.append(
            Job(
                name=f"block-{number:03}-{name}-{probe.model}",
                mode=mode,
                draw=draw,
                view="shifted" if _plain(probe.model) else DECLARED_VIEW,
                known=bugs_of(probe, options.release, mode),
                mend=not block.as_released,
            )
        )
    return jobs


def known_bugs(release: str, model: str, mode: Mode) -> dict[str, Patch]:
    """What generated cases of this model would find in the release, and what fixes each."""
    known = {"33758": pr_33758.STOP_FIRST} if pr_33758.ENTRY.is_in(release) else {}
    if not model:
        return known
    recipe = RECIPES[model]
    if recipe.mtp_layers:
        known["multi-layer-chunk-tail"] = ALL_LAYERS
    if not recipe.reads_states:  # in the view that has its rows as SGLang shifts them, its prefix cache is keyed wrongly
        known["standalone-keys"] = KEYS
    for entry, shows in (
        (windows.TREE, recipe.window),
        (windows.DECODE, recipe.window and recipe.frozen),
        (trees.CERTAIN, recipe.window and recipe.frozen),  # whose drafts are certain of many tokens
        (hybrid_keys.ENTRY, recipe.target.states),
        (prefill_graph.ENTRY, recipe.family in prefill_graph.FAMILIES and mode.prefill_graphs),
    ):
        if shows and entry.remedy is not None and entry.is_in(release):
            known[entry.id] = entry.remedy
    return known


def _plain(model: str) -> bool:
    return bool(model) and not RECIPES[model].reads_states


def _layered(group: int, number: int, *, flash: bool) -> str:
    """A draft of several layers for some of the groups; empty: the default model."""
    layered = group % 4 in (1, 2) if flash else group % 10 == 9
    return random.Random(number).choice(_LAYERED) if layered else ""


def plain(groups: int, each: int, seed: int, copies: int) -> list[Job]:
    """To measure a rate: groups of small cases, as most of a search's are, with graphs and overlap, each so often; nothing runs
    twice to compare results.

    No request has stop tokens, so none meets the bug that the bundle's release has with them. Copies follow each other, so
    that as many GPUs have equal work."""
    jobs = []
    for group in range(groups):
        number = seed * 7919 + group
        small = greedy_cases(focus_of(number), held=tuple(VALUES), sizes=SMALL, max_requests=FEW_REQUESTS)
        found = draw_cases(small, each, number)
        endless = tuple(replace(case, requests=tuple(replace(one, stop=()) for one in case.requests)) for case in found)
        job = Job(name=f"plain-{group:03}", mode=MODES["overlap"], cases=endless)
        jobs += [replace(job, name=f"{job.name}-{copy}") for copy in range(copies)]
    return jobs


def _named(mode: str, options: Options) -> str:
    tp, dtype, attention = options.tp, options.dtype, options.attention
    words = ["" if tp == 1 else f"tp{tp}", "" if dtype == "float32" else dtype, "" if attention == "triton" else attention]
    return "-".join([mode, *filter(None, words)])


def proofs(entries: list[Entry], options: Options, modes: tuple[str, ...] = ("graphs", "overlap", "eager")) -> list[Job]:
    """Both sides of each entry, in each mode, three times each."""
    jobs = []
    for entry in entries:
        there = entry.on_cuda
        green, red = there.sides(options.release)
        for name in (*modes, *there.modes):
            mode = replace(MODES[name], tp=options.tp, dtype=options.dtype, attention=options.attention)
            if why_unreachable(entry, mode):
                continue
            for word, side, patches in (("green", entry.green, green), ("red", entry.red, red)):
                changes = side.patches if patches is None else patches
                job = Job(
                    name=f"{entry.id}/{_named(name, options)}/{word}",
                    mode=mode,
                    cases=(_longer(entry),),
                    patches=_elsewhere(entry, side, mode) or changes,
                    view=side.view,
                    times=3,
                    proof=True,
                    expected=MustShow(rule=entry.rule, hidden=there.hidden.get(name, "")) if word == "red" else None,
                )
                jobs.append(job)
    return jobs


def _elsewhere(entry: Entry, side: Side, mode: Mode) -> tuple[Patch, ...]:
    """The green side's where one graph has all layers, and moves the windows on itself, or where there is no graph; empty: its
    own."""
    there = entry.on_cuda
    patch = (there.one_graph if mode.attention == "fa3" else None) if mode.graphs else there.eager
    return (patch,) if patch is not None and side == entry.green else ()


def _longer(entry: Entry) -> Case:
    """The entry's case, with as many new tokens as it takes."""
    case, length = entry.case, entry.on_cuda.max_new_tokens
    return replace(case, requests=tuple(replace(one, max_new_tokens=length or one.max_new_tokens) for one in case.requests))


def release_of(typed: str) -> str:
    """The release that was typed, or the installed one. Raises InputError if that is none."""
    release = typed or installed_version("sglang")
    if release == ABSENT:
        raise InputError(
            "SGLang is not installed here", consequence="no plan was written", remedy="name the host's release with --sglang"
        )
    try:
        return str(Version(release))
    except InvalidVersion as error:
        raise InputError(
            f"--sglang {release}: it is the version of no release",
            consequence="no plan was written",
            remedy="name one, as 0.5.23: a plan goes by the bugs that it has",
        ) from error


# Jobs of cases that sample, for a plan of a GPU campaign: by the target alone, chains and trees, and by rejection.

# Under rejection sampling, what draft decode drew from stayed in the memory of its CUDA graph before 0.5.21. The target's graph
# runs in the same memory before verify reads it. It takes a GPU, and no entry shows it alone.
_DRAFT_PROBABILITIES = Patch(
    name="draft-probabilities-copied",
    edits=(
        Edit(
            target="sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft",
            match="self.cuda_graph_runner.execute(forward_batch)",
            replacement="tuple(one if one is None else one.clone() for one in self.cuda_graph_runner.execute(forward_batch))",
        ),
    ),
)

# model, topk, rejection, mode: what a group holds; None: as the seed has it
_KINDS: tuple[tuple[str | None, int, bool, str], ...] = (
    (None, 1, False, "graphs"),
    (None, 3, False, "overlap"),
    (None, 1, True, "graphs"),
    (None, 4, False, "graphs"),
    (None, 1, True, "overlap"),
    (None, 1, False, "overlap"),
    (None, 1, True, "eager"),
    ("llama-mtp", 1, True, "graphs"),
    (None, 2, False, "eager"),
    ("llama-mtp-chain", 1, False, "graphs"),
)


def sampling(groups: int, each: int, seed: int, release: str) -> list[Job]:
    """Groups of cases that share a configuration. The first case of each runs again after all others: the same coins, and so
    the same trace. Nothing runs on a CPU as well, since its coins differ."""
    jobs = []
    for group in range(groups):
        number = seed * 7919 + 100_000 + group
        model, topk, rejection, name = _KINDS[group % len(_KINDS)]
        # a pool that runs out retracts; with overlap that loses rounds (cases/strategies.py)
        held = {"topk": topk, "max_total_tokens": 512} | ({"model": model} if model else {})
        focus = focus_of(number, **held)
        if rejection:
            focus = rejects(focus)
        # greedy requests under rejection sampling draft by chance up to 0.5.20: a bug that would be found in every case
        found = draw_cases(
            sampling_cases(
                focus, held=tuple(VALUES), rejection=rejection, greedy=not rejection, retract=not MODES[name].overlap
            ),
            each,
            number,
        )
        known = known_bugs(release, model or "", MODES["graphs"]) | {RETRACTED.id: RETRACTED.green.patches[0]}
        if rejection and not model and Version(release) < Version("0.5.21"):
            known["draft-probabilities-in-graph"] = _DRAFT_PROBABILITIES
        word = "rejection" if rejection else "target-only"
        jobs.append(
            Job(
                name=f"sampling-{word}-{name}-{group:03}",
                mode=MODES[name],
                cases=tuple(found),
                known=known,
                again=True,
                keep=True,
            )
        )
    return jobs


# Batches of every size, in a graph of their own size, padded to a larger one, and without one: what `gpu plan --sizes` adds.
#
# Generated cases seldom have more than six requests. Here each request arrives when the one before has had its first round, so
# that a case decodes batches of one, two, … eight; and each engine captures graphs for other sizes.

SIZES = range(1, 9)

# Sizes that graphs are captured for -> what that makes of batches of 1 to 8. For more requests than may run at once SGLang
# captures nothing, so 16 may.
CAPTURES = (
    tuple(SIZES),  # all exact
    (16,),  # all padded
    (4, 8),  # exact and padded
    (2, 5),  # padded, exact, and from 6 on without a graph: a runner that is there and must not be taken for one that ran
    (1,),  # all but one without a graph
    (),
)
# A chain, a tree, and a draft of several layers; none has a known bug of 0.5.17 that these cases would show.
CONFIGURATIONS = {
    "chain": Focus(num_steps=3, max_running_requests=16),
    "tree": Focus(num_steps=3, topk=3, tree_size=1, max_running_requests=16),
    "layers": Focus(model="llama-mtp", num_steps=2, max_running_requests=16),
}


def staircase(configuration: Focus, seed: int, events: tuple[Event, ...] = ()) -> Case:
    """Eight requests, one after the other: a prefill and a round of all that are there, and so on until all eight have met.
    They end one after the other too."""
    requests = tuple(
        Request(
            id=f"r{number}",
            prompt=tokens(seed * 16 + number, 3 + number % 4, 96),
            max_new_tokens=(len(SIZES) - number) * (configuration.num_steps + 1) + 2,  # a round brings num_steps + 1 at most
            arrive=2 * number,
        )
        for number in range(len(SIZES))
    )
    return configuration.case(f"sizes-{seed}", requests, events=events)


# Events of a batch of eight: an abort, a retraction of all, a pause, and an abort in the queue.
EIGHT_EVENTS = (
    Event(at=9, kind="abort", request="r1"),
    Event(at=13, kind="retract"),
    Event(at=16, kind="pause"),
    Event(at=18, kind="resume"),
    Event(at=19, kind="retract"),
    Event(at=19, kind="abort", request="r5"),
)


def every_size(tp: int = 1) -> list[Job]:
    """An engine for each configuration and each set of graphs, with overlap and without, half of them with pages.

    tp: ranks that share the work"""
    jobs = []
    for number, graphs in enumerate(CAPTURES):
        for place, (name, configuration) in enumerate(CONFIGURATIONS.items()):
            for overlap in (False, True):
                chosen = dataclasses.replace(configuration, page_size=4 if (number + place + overlap) % 2 else 1)
                cases = (staircase(chosen, 1), staircase(chosen, 2, EIGHT_EVENTS), staircase(chosen, 3))
                words = "-".join(map(str, graphs)) or "none"
                jobs.append(
                    Job(
                        name=f"sizes-{name}-{words}-{'overlap' if overlap else 'normal'}-page{chosen.page_size}",
                        mode=Mode(device="cuda", graphs=graphs, overlap=overlap, tp=tp),
                        cases=cases,
                        again=True,
                    )
                )
    return jobs
