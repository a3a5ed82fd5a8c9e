"""What `gpu run` prints of a campaign: a line a job, and at the end what they come to."""

from collections import Counter
from pathlib import Path

from eagletwin.harness.core.terminal import count

from .batches import table
from .blocks import reached, written
from .job import CampaignFacts, JobResult
from .precision_gap import Apart, apart_text
from .races import Race
from .tally import comparisons, exit_code, proofs, statuses_of, waits


class CampaignSummary:
    """The sums over the jobs that are done."""

    def __init__(self) -> None:
        self._done: list[JobResult] = []
        self._statuses, self._batches, self._parts = Counter[str](), Counter[str](), Counter[str]()
        self._cases = 0
        self._apart: list[Apart] = []

    @property
    def exit_code(self) -> int:
        return exit_code(self._statuses)

    def add(self, done: JobResult) -> str:
        """Count a job. Returns its line."""
        self._done.append(done)
        self._cases += len(done.seen)
        self._statuses.update(statuses_of(done))
        if done.engine is not None:
            self._parts.update(done.engine.parts)
        if done.apart is not None:
            self._apart.append(done.apart)
        for seen in done.seen:
            self._batches.update(seen.paths)
        said = Counter(f"{seen.status} {seen.known or seen.rule}".strip() for seen in done.seen)
        mended = f" with {count(len(done.mended), 'known bug')} mended" if done.mended else ""
        again = "".join(f", {comparison}" for comparison in comparisons(done))
        return f"{done.name}: {dict(said)}{mended}{again} {done.error} ({done.start:.0f} s, {done.seconds:.0f} s)"

    def result(self, seconds: float, out: Path, report: str) -> CampaignFacts:
        """The sums, as campaign.json has them."""
        return CampaignFacts(
            jobs=len(self._done),
            cases=self._cases,
            statuses=dict(self._statuses),
            seconds=round(seconds, 3),
            folder=str(out),
            report=report,
            exit_code=self.exit_code,
        )

    def text(self, seconds: float, out: Path, blocks: Path | None, turns: str = "") -> str:
        """What all jobs come to. blocks: the folder in which their processes left what ran; turns: why engines took turns on
        a GPU, if they did."""
        parts = []
        if self._batches:
            parts.append(f"decode batches, by size and by how they ran:\n{table(self._batches)}")
        if self._parts:
            parts.append("engines, by the classes that SGLang chose:")
            parts += [f"{self._parts[name]:>5} {name}" for name in sorted(self._parts)]
        if self._apart:
            parts.append(f"float32 and bfloat16, in cases that are equal in both:\n{apart_text(self._apart)}")
        proven = list(proofs(self._done))
        if proven:
            parts += ["entries of the ledger:", *(f"  {line}" for line in proven)]
        runs = [run for done in self._done if done.expected is None for one in done.seen for run in one.races]
        if runs:
            parts.append(_raced(runs))
        missing = list(waits(self._done))
        if missing:
            parts += ["missing waits, planted:", *(f"  {line}" for line in missing)]
        if blocks is not None:
            parts.append(written(reached(blocks), out / "blocks.txt"))
        if any(done.mode.device == "cuda" for done in self._done):
            parts.append(_shared(self._done, turns))
        mended = sum(len(done.seen) for done in self._done if done.mended)
        parts += [f"{mended} cases ran with the known bugs mended that they may show"] if mended else []
        parts.append(f"{dict(self._statuses)} in {seconds:.1f} s, {self._cases / seconds:.2f} cases/s")
        return "\n".join(parts)


def _shared(jobs: list[JobResult], turns: str) -> str:
    """How many engines used a GPU at the same time, or why none did."""
    shared = sum(done.shared for done in jobs)
    of = f"{shared} of {len(jobs)} jobs used a GPU at the same time as others (MPS)"
    return f"{of}: {turns}" if turns else of


def _raced(runs: list[Race]) -> str:
    """What all runs with pauses come to."""
    pauses = [pause for run in runs for pause in run.pauses]
    places = Counter(pause.place for pause in pauses)
    lines = [
        f"runs with pauses: {len(runs)}, of them answered otherwise {sum(bool(run.differs) for run in runs)}; "
        f"{sum(run.compared for run in runs)} comparisons; points {sum(run.points for run in runs)}, pauses {len(pauses)}, "
        f"together {sum(pause.microseconds for pause in pauses) / 1e6:.1f} s"
    ]
    return "\n".join(lines + [f"{number:>7} {place}" for place, number in sorted(places.items())])
