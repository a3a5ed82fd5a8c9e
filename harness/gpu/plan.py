"""What to run on a GPU: generated cases in all modes, and the ledger's proofs."""

import random
import warnings

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.strategies import SearchStrategy
from msgspec.structs import replace

from eagletwin.cases.entry import Entry, Side
from eagletwin.cases.profiles import draw_from_seeds_alone
from eagletwin.cases.regressions.greedy_drafts import PREFILL
from eagletwin.cases.regressions.multi_layer_chunk_tail import ALL_LAYERS
from eagletwin.cases.regressions.multi_layer_topk import REMEDY as TREES_OF_LAYERS
from eagletwin.cases.strategies import VALUES, cases, focus_of
from eagletwin.harness.case import Case
from eagletwin.harness.dtype import WIDEST, Dtype
from eagletwin.harness.engines.mode import Attention, Mode
from eagletwin.harness.patch import Edit, Patch

from .campaign import Job

# PR #33758 on the releases before it: the stop token is looked for before the length.
STOP_FIRST = Patch(
    name="stop-before-length",
    edits=(
        Edit(
            target="sglang.srt.managers.schedule_batch.Req.update_finish_state",
            match="if len(self.output_ids) >= self.sampling_params.max_new_tokens:",
            replacement="""most = self.sampling_params.max_new_tokens
if self._check_token_based_finish(self.output_ids[-new_accepted_len:]) and self.finished_len <= most:
    return
if len(self.output_ids) >= most:""",
        ),
    ),
)

# What 0.5.21 does for a greedy request under rejection sampling, for a case in which all are greedy: 0.5.17 hands the function
# that draws no top_k by which to know them.
_BEST = Patch(
    name="greedy-drafts-best",
    edits=(
        Edit(
            target="sglang.srt.speculative.spec_utils.sample_draft_proposal",
            match="fast_sample(probs, num_samples=1)",
            replacement="probs.max(dim=-1, keepdim=True)",
        ),
    ),
)
assert PREFILL.remedy is not None

ONE_GRAPH = (
    "sglang.srt.speculative.multi_layer_eagle_draft_extend_cuda_graph_runner"
    ".OneGraphMultiLayerEagleMultiStepDraftExtendCudaGraphRunner"
)
_WINDOWS_IN_ONE_GRAPH = Patch(
    name="multi-layer-trees-in-one-graph",
    edits=(
        Edit(
            target=f"{ONE_GRAPH}._capture_one_graph",
            match="ret.topk_index,\n",
            replacement="ret.topk_index[:, 0].contiguous(),\n",
        ),
    ),
)

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
# Entries whose bug the release of the bundle has, and whose fix is not undone in it: patches of the green side, and of the red.
# Two of greedy-drafts are in one case, so each is shown with the other mended.
_LIVE = {
    "33758": ((STOP_FIRST,), ()),
    "greedy-drafts-decode": ((PREFILL.remedy, _BEST), (PREFILL.remedy,)),
    "greedy-drafts-prefill": ((PREFILL.remedy, _BEST), (_BEST,)),
    "greedy-drafts-layers": ((_BEST,), ()),
}
# New tokens of cases whose coins are others on a GPU: so many that not every draw is the best token.
_LONGER = {"greedy-drafts-decode": 24}
# What an entry is proven in beside the usual: graphs for its own batch only, where a larger one's buffer hides it.
_MORE = {"indices-overflow": ("one",)}


def generated(
    groups: int, each: int, seed: int, tp: int = 1, dtype: Dtype = "float32", attention: Attention = "triton"
) -> list[Job]:
    """Groups of cases that share a configuration, with graphs, every second one with overlap too, some of these with graphs of
    prefill. Every tenth group has a draft of several layers. The first case of each also runs on the CPU engine.

    tp: ranks that share the work, on the CPU too. dtype: what both compute in; in bfloat16 every case also runs in float32 on
    the same device, in place of the first on the CPU.
    attention: with fa3 every second group has several layers, which one graph has all of then; nothing runs beside, and
    prefill has no graphs.
    """
    brain, flash = dtype == "bfloat16", attention == "fa3"
    draw_from_seeds_alone()
    jobs = []
    for group in range(groups):
        number = seed * 7919 + group
        layered = group % 4 in (1, 2) if flash else group % 10 == 9
        held = {"model": random.Random(number).choice(_LAYERED)} if layered else {}
        name = "prefill" if group % 10 == 5 and not flash else "overlap" if group % 2 else "graphs"
        cpu = Mode(overlap=MODES[name].overlap, tp=tp)
        focus = focus_of(number, WIDEST[dtype], **held)
        found = tuple(drawn(cases(focus, held=tuple(VALUES)), each, number))
        known = {"33758": STOP_FIRST} | ({"multi-layer-chunk-tail": ALL_LAYERS} if held else {})
        jobs.append(
            Job(
                known=known,
                name=f"generated-{_named(name, tp, dtype, attention)}-{group:03}",
                mode=replace(MODES[name], tp=tp, dtype=dtype, attention=attention),
                cases=found,
                again=True,
                beside=None if brain else cpu,
                apart=replace(MODES[name], tp=tp) if brain and not flash else None,
                keep=True,
            )
        )
    return jobs


def plain(groups: int, each: int, seed: int, copies: int) -> list[Job]:
    """To measure a rate: groups of cases with graphs and overlap, each so often, and nothing run twice for what it comes to.

    No request has stop tokens, so none meets the bug that the bundle's release has with them. Copies follow each other, so
    that as many GPUs have equal work."""
    draw_from_seeds_alone()
    jobs = []
    for group in range(groups):
        number = seed * 7919 + group
        found = drawn(cases(focus_of(number), held=tuple(VALUES)), each, number)
        endless = tuple(replace(case, requests=tuple(replace(one, stop=()) for one in case.requests)) for case in found)
        job = Job(name=f"plain-{group:03}", mode=MODES["overlap"], cases=endless)
        jobs += [replace(job, name=f"{job.name}-{copy}") for copy in range(copies)]
    return jobs


def _named(mode: str, tp: int, dtype: Dtype, attention: Attention = "triton") -> str:
    words = ["" if tp == 1 else f"tp{tp}", "" if dtype == "float32" else dtype, "" if attention == "triton" else attention]
    return "-".join([mode, *filter(None, words)])


def drawn(strategy: SearchStrategy[Case], count: int, seed: int) -> list[Case]:
    """`count` different cases, the same for the same seed."""
    found: list[Case] = []

    @hypothesis.seed(seed)
    @settings(
        max_examples=2 * count, phases=(Phase.generate,), database=None, deadline=None, suppress_health_check=list(HealthCheck)
    )
    @hypothesis.given(strategy)
    def draw(case: Case) -> None:
        if case not in found:
            found.append(case)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hypothesis.errors.HypothesisWarning)
        draw()
    # Hypothesis begins with the simplest; these are spread over all that it drew
    return found[:: max(1, len(found) // count)][:count]


def proofs(
    entries: list[Entry],
    modes: tuple[str, ...] = ("graphs", "overlap", "eager"),
    tp: int = 1,
    dtype: Dtype = "float32",
    attention: Attention = "triton",
) -> list[Job]:
    """Both sides of each entry, in each mode, three times each."""
    jobs = []
    for entry in entries:
        for name in (*modes, *_MORE.get(entry.id, ())):
            mode = replace(MODES[name], tp=tp, dtype=dtype, attention=attention)
            for number, (word, side) in enumerate((("green", entry.green), ("red", entry.red))):
                changes = _LIVE[entry.id][number] if entry.id in _LIVE else side.patches
                job = Job(
                    name=f"{entry.id}/{_named(name, tp, dtype, attention)}/{word}",
                    mode=mode,
                    cases=(_longer(entry),),
                    patches=(*changes, *_in_one_graph(entry, side, mode)),
                    view=side.view,
                    times=3,
                )
                jobs.append(job)
    return jobs


def _in_one_graph(entry: Entry, side: Side, mode: Mode) -> tuple[Patch, ...]:
    """What the candidate fix of multi-layer-topk-* lacks where one graph has all layers and moves the windows on itself."""
    if entry.remedy is not TREES_OF_LAYERS or side != entry.green or mode.attention != "fa3" or not mode.graphs:
        return ()
    return (_WINDOWS_IN_ONE_GRAPH,)


def _longer(entry: Entry) -> Case:
    """The entry's case, with as many new tokens as it takes."""
    case = entry.case
    return replace(
        case, requests=tuple(replace(one, max_new_tokens=_LONGER.get(entry.id, one.max_new_tokens)) for one in case.requests)
    )
