"""Jobs of cases that sample, for a plan of a GPU campaign: by the target alone, chains and trees, and by rejection."""

from packaging.version import Version

from eagletwin.cases.ledger.retracted_chunk_tail import ENTRY as RETRACTED
from eagletwin.cases.sample_cases import draw_cases
from eagletwin.cases.strategies import VALUES, focus_of, rejects, sampling_cases
from eagletwin.harness.core.patch import Edit, Patch

from .job import Job
from .plan import MODES, known_bugs

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
