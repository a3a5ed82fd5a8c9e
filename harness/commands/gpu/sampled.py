"""Jobs of cases that sample, for a plan of a GPU campaign: by the target alone, chains and trees, and by rejection."""

from eagletwin.cases.drawn import drawn
from eagletwin.cases.regressions.draft_probabilities import DRAFT_PROBABILITIES, copies_nothing
from eagletwin.cases.regressions.retracted_chunk_tail import ENTRY as RETRACTED
from eagletwin.cases.strategies import VALUES, focus_of, rejects, sampling_cases

from .job import Job
from .plan import MODES, known_bugs

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
        # a pool that runs out retracts; with overlap that loses rounds (cases/sampling.py)
        held = {"topk": topk, "max_total_tokens": 512} | ({"model": model} if model else {})
        focus = focus_of(number, **held)
        if rejection:
            focus = rejects(focus)
        # greedy requests under rejection sampling draft by chance up to 0.5.20: a bug that would be found in every case
        found = drawn(
            sampling_cases(
                focus, held=tuple(VALUES), rejection=rejection, greedy=not rejection, retract=not MODES[name].overlap
            ),
            each,
            number,
        )
        known = known_bugs(release, model or "", MODES["graphs"]) | {RETRACTED.id: RETRACTED.green.patches[0]}
        if rejection and not model and copies_nothing(release):
            known["draft-probabilities-in-graph"] = DRAFT_PROBABILITIES
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
