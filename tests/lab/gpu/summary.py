"""The sums over the jobs of a campaign: its exit code, what `gpu run` prints, and the blocks of SGLang that ran."""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct

from eagletwin.harness.core.errors import EXIT_DIVERGED, EXIT_EQUAL, EXIT_UNKNOWN
from eagletwin.harness.core.terminal import count
from eagletwin.harness.engines.blocks import blocks_of
from eagletwin.harness.judge.completeness import shows_instead

from .compared import Apart, Race, apart_text
from .job import CampaignFacts, JobResult, table

# Which blocks of SGLang's speculative code a campaign reached, on which device: what `gpu run --blocks` writes.


class Reached(Struct, frozen=True, kw_only=True):
    """A block, and the devices on which it ran. branch: what leads into it; empty: a call of the function."""

    file: str
    line: int
    function: str
    branch: str
    ran: tuple[str, ...]


def reached(folder: Path) -> list[Reached]:
    """All blocks of the modules that were imported, by what the processes of the run wrote into `folder`."""
    ran: dict[tuple[str, int], set[str]] = defaultdict(set)
    files: set[str] = set()
    for said in sorted(folder.glob("*.json")):
        device = said.name.partition("-")[0]
        for file, lines in msgspec.json.decode(said.read_bytes(), type=dict[str, list[int]]).items():
            files.add(file)
            for line in lines:
                ran[file, line].add(device)
    return [
        Reached(
            file=Path(file).name,
            line=block.line,
            function=block.function,
            branch=block.branch,
            ran=tuple(sorted(ran[file, block.line])),
        )
        for file in sorted(files)
        for block, _, _ in blocks_of(ast.parse(Path(file).read_bytes(), file))
    ]


def written(blocks: list[Reached], file: Path) -> str:
    """Write a line for each block; what to print of them: how many ran, and in which called functions some did not."""
    called = {(one.file, one.function) for one in blocks if one.ran or not one.function}
    lines = [
        "\t".join(
            (
                f"{one.file}:{one.line}",
                ", ".join(one.ran) or ("not run" if (one.file, one.function) in called else "function not called"),
                one.function,
                one.branch,
            )
        )
        for one in blocks
    ]
    file.write_text("\n".join([*lines, ""]), encoding="utf-8")
    inside = [one for one in blocks if (one.file, one.function) in called]
    counts = ", ".join(
        f"{sum(device in one.ran for one in blocks):,} on {device}"
        for device in sorted({name for one in blocks for name in one.ran})
    )
    return (
        f"blocks of SGLang's speculative code: {len(blocks):,}, of which ran {counts or 'none'}; "
        f"{sum(not one.ran for one in inside):,} of {len(inside):,} in functions that were called did not run: {file}"
    )


# What a campaign's jobs count for: every comparison that was asked for reaches the exit code of `gpu run`.

RACES = "races/"  # how the names of jobs with a missing wait begin


def statuses_of(done: JobResult) -> Counter[str]:
    """Verdicts of a job, by status: one a case, and one for each further comparison that failed.

    known     a case that diverged by a bug that is known
    unknown   also a job that did not run to its end; a trace that was another after the other cases (a state leak, as in
              `check`); and a comparison in which nothing was compared, or one of whose two runs did not finish
    diverged  also a trace that is different on the engine next to it, beyond the judge's bound
    found     an engine with a bug, whose job says what must be found; hidden: nothing shows in its mode, as the job says.
              Where it is otherwise, that is unknown
    """
    if done.expected is not None:
        return Counter({_found(done).kind: 1})
    statuses = Counter("known" if seen.known else seen.status for seen in done.seen)
    statuses["unknown"] += bool(done.error) + (done.again is not None and not (done.again and done.again_compared))
    if done.beside is not None:
        if done.beside.unfinished or not done.beside.compared:
            statuses["unknown"] += 1
        elif not done.beside.same:
            statuses["diverged"] += 1
    return +statuses


@dataclass(frozen=True, slots=True)
class _Shown:
    """kind: found, hidden, or unknown. words: in short, for a table."""

    kind: str
    words: str


def _found(done: JobResult) -> _Shown:
    """What a job with a bug has shown."""
    assert done.expected is not None
    rule, hidden = done.expected.rule, done.expected.hidden
    if done.error or not done.seen:
        return _Shown("unknown", "did not run")
    ends = "unknown" if rule.startswith("engine.") else "diverged"  # a worker that does not survive leaves no verdict
    shown = [one for one in done.seen if one.status == ends]
    if not shown:
        if all(one.status == "equal" for one in done.seen):
            return _Shown("hidden", f"hidden: {hidden}") if hidden else _Shown("unknown", "NOT FOUND: equal")
        return _Shown("unknown", f"UNKNOWN: {next(one.reason for one in done.seen if one.status != 'equal')}")
    if hidden:
        return _Shown("unknown", f"NOT HIDDEN: {shown[0].rule}")
    if not rule or shown[0].rule == rule:
        return _Shown("found", "" if rule else shown[0].rule)
    if shows_instead(shown[0].rule, rule) and shown[0].unseen.get(rule):
        return _Shown("found", f"by {shown[0].rule}")
    return _Shown("unknown", f"ANOTHER RULE: {shown[0].rule}")


def proofs(results: Iterable[JobResult]) -> Iterator[str]:
    """Each entry of the ledger that was run, with what came of its two sides in each mode."""
    sides: dict[tuple[str, str], dict[str, JobResult]] = {}
    for done in results:
        match done.name.split("/"):
            case [entry, mode, "green" | "red" as side]:
                sides.setdefault((entry, mode), {})[side] = done
    for (entry, mode), both in sorted(sides.items()):
        green, red = both.get("green"), both.get("red")
        if green is None or red is None:
            yield f"{entry} {mode}: only one side was run"
            continue
        fails = [f"{one.status} {one.rule} {one.reason}".strip() for one in green.seen if one.status != "equal"]
        fails += ["did not run"] if green.error or not green.seen else []
        found = _found(red)
        words = {"found": "proven", "hidden": ""}.get(found.kind, "red is")
        yield f"{entry} {mode}: " + (f"GREEN IS {fails[0]}" if fails else f"{words} {found.words}".strip())


def waits(results: Iterable[JobResult]) -> Iterator[str]:
    """Each missing wait that was planted, and in which case what showed it."""
    for done in sorted(results, key=lambda done: done.name):
        if done.expected is None or not done.name.startswith(RACES):
            continue
        found = _found(done)
        how = next((f"by {one.rule} in case {n}: {one.where}" for n, one in enumerate(done.seen, 1) if one.where), "")
        how = how or found.words + ("" if found.kind == "hidden" else f" in {count(len(done.seen), 'case')}")
        yield f"{done.name.removeprefix(RACES)}: {'found ' if found.kind == 'found' else ''}{how}"


def comparisons(done: JobResult) -> Iterator[str]:
    """The further comparisons of a job as a person reads them."""
    if done.again is not None:
        same = "the same" if done.again_compared else "UNKNOWN: nothing was compared"
        yield f"again {same if done.again else 'DIFFERENT: ' + done.again_differs}"
    if done.beside is not None:
        differs = "the same" if done.beside.same else f"DIFFERENT: {done.beside.differs}"
        word = f"UNKNOWN: {done.beside.unfinished}" if done.beside.unfinished else differs
        yield f"beside {word if done.beside.compared else 'UNKNOWN: nothing was compared'} ({done.beside.largest:.1e})"


def exit_code(statuses: Mapping[str, int]) -> int:
    """A divergence outweighs a doubt; if no case has a verdict, the result is unknown."""
    if statuses.get("diverged"):
        return EXIT_DIVERGED
    judged = sum(statuses.get(word, 0) for word in ("equal", "known", "found"))
    return EXIT_UNKNOWN if statuses.get("unknown") or not judged else EXIT_EQUAL


# What `gpu run` prints of a campaign: a line a job, and at the end what they come to.


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
