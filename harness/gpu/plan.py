"""What to run on a GPU: generated cases in all modes, and the ledger's proofs."""

import random
import warnings

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis.strategies import SearchStrategy
from msgspec.structs import replace

from eagletwin.cases.entry import Entry
from eagletwin.cases.profiles import draw_from_seeds_alone
from eagletwin.cases.regressions.multi_layer_chunk_tail import ALL_LAYERS
from eagletwin.cases.strategies import VALUES, cases, focus_of
from eagletwin.harness.case import Case
from eagletwin.harness.dtype import WIDEST, Dtype
from eagletwin.harness.engines.mode import Mode
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
# Fixes that the release of the bundle lacks: the green side is with them.
_LACKED = {"33758": (STOP_FIRST,)}
# What an entry is proven in beside the usual: graphs for its own batch only, where a larger one's buffer hides it.
_MORE = {"indices-overflow": ("one",)}


def generated(groups: int, each: int, seed: int, tp: int = 1, dtype: Dtype = "float32") -> list[Job]:
    """Groups of cases that share a configuration, with graphs, every second one with overlap too, some of these with graphs of
    prefill. Every tenth group has a draft of several layers. The first case of each also runs on the CPU engine.

    tp: ranks that share the work, on the CPU too. dtype: what both compute in; in bfloat16 every case also runs in float32 on
    the same device, in place of the first on the CPU.
    """
    brain = dtype == "bfloat16"
    draw_from_seeds_alone()
    jobs = []
    for group in range(groups):
        number = seed * 7919 + group
        held = {"model": random.Random(number).choice(_LAYERED)} if group % 10 == 9 else {}
        name = "prefill" if group % 10 == 5 else "overlap" if group % 2 else "graphs"
        cpu = Mode(overlap=MODES[name].overlap, tp=tp)
        focus = focus_of(number, WIDEST[dtype], **held)
        found = tuple(drawn(cases(focus, held=tuple(VALUES)), each, number))
        known = {"33758": STOP_FIRST} | ({"multi-layer-chunk-tail": ALL_LAYERS} if held else {})
        jobs.append(
            Job(
                known=known,
                name=f"generated-{_named(name, tp, dtype)}-{group:03}",
                mode=replace(MODES[name], tp=tp, dtype=dtype),
                cases=found,
                again=True,
                beside=None if brain else cpu,
                apart=replace(MODES[name], tp=tp) if brain else None,
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


def _named(mode: str, tp: int, dtype: Dtype) -> str:
    return mode + (f"-tp{tp}" if tp > 1 else "") + (f"-{dtype}" if dtype != "float32" else "")


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
) -> list[Job]:
    """Both sides of each entry, in each mode, three times each."""
    return [
        Job(
            name=f"{entry.id}/{_named(name, tp, dtype)}/{word}",
            mode=replace(MODES[name], tp=tp, dtype=dtype),
            cases=(entry.case,),
            patches=(*side.patches, *(_LACKED.get(entry.id, ()) if word == "green" else ())),
            view=side.view,
            times=3,
        )
        for entry in entries
        for name in (*modes, *_MORE.get(entry.id, ()))
        for word, side in (("green", entry.green), ("red", entry.red))
    ]
