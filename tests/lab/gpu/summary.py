"""What a campaign came to: its exit code, what `gpu run` prints, the blocks of SGLang that ran, and its page."""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct

from eagletwin.harness.commands.page_facts import read_facts, unexercised_features
from eagletwin.harness.core.errors import EXIT_DIVERGED, EXIT_EQUAL, EXIT_UNKNOWN, InputError
from eagletwin.harness.core.terminal import count
from eagletwin.harness.engines.blocks import blocks_of
from eagletwin.harness.judge.completeness import shows_instead
from eagletwin.harness.page.document import Document, DocumentSection, Fields, Table, TableCell, TableRow, row
from eagletwin.harness.page.render import NAME, write_page

from .compared import Apart, Race, apart_text
from .job import JOB, PATHS, RESULTS, CampaignFacts, CaseResult, Job, JobResult, table

# The sums over the jobs of a campaign: its exit code, what `gpu run` prints, and the blocks of SGLang that ran.

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


# The page of a campaign, made of its results.jsonl: what was drawn, exercised, known and new, and at which rates.
#
# What was drawn is read from each job's job.json, and how long all of it took from campaign.json, where these are at hand.

CAMPAIGN = "campaign.json"  # in the folder of a campaign: the sums that `gpu run` prints


def keep_campaign(result: CampaignFacts, out: Path) -> None:
    """Write campaign.json and the page into the folder of a campaign, and name the page."""
    (out / CAMPAIGN).write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    if write_page(out, lambda: campaign_page(out)) is not None:
        print(f"page: {out / NAME}")


def campaign_page(folder: Path) -> Document:
    """The page of the folder of `gpu run`. Raises InputError for results that cannot be read."""
    jobs = _read(folder / RESULTS)
    whole = read_facts(folder / CAMPAIGN, CampaignFacts, "the folder of `gpu run`") if (folder / CAMPAIGN).is_file() else None
    statuses = sum((statuses_of(job) for job in jobs), Counter[str]())
    cases = sum(len(job.seen) for job in jobs)
    said = ", ".join(f"{number} {name}" for name, number in sorted(statuses.items()))
    return Document(
        title=f"Campaign {folder.name}",
        status={EXIT_EQUAL: "equal", EXIT_DIVERGED: "diverged"}.get(exit_code(statuses), "unknown"),
        headline=f"{count(len(jobs), 'job')}, {count(cases, 'case')}: {said or 'nothing'}",
        facts=_facts(jobs, cases, whole),
        sections=(
            *findings(jobs),
            *_drawn(folder, jobs),
            *_exercised(jobs),
            _rates(jobs),
            *proven(jobs),
            *_apart(jobs),
            all_jobs(jobs),
        ),
        files=tuple(name for name in (RESULTS, CAMPAIGN) if (folder / name).is_file()),
    )


def _read(file: Path) -> list[JobResult]:
    try:
        return [msgspec.json.decode(line, type=JobResult) for line in file.read_bytes().splitlines() if line.strip()]
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InputError(
            f"{file} cannot be read: {error}",
            consequence="no page was made",
            remedy="name the folder of `gpu run` of this eagletwin",
        ) from error


def _facts(jobs: list[JobResult], cases: int, whole: CampaignFacts | None) -> Fields:
    engines = [job.engine for job in jobs if job.engine is not None]
    seen = [one for job in jobs for one in job.seen]
    facts = [
        ("SGLang", ", ".join(sorted({engine.version for engine in engines})) or "no engine started"),
        ("device", ", ".join(sorted({engine.device for engine in engines})) or "no engine started"),
        ("comparisons", str(sum(one.compared for one in seen))),
        ("choices", f"{sum(one.choices for one in seen)}, of them {count(sum(one.ties for one in seen), 'tie')}"),
        ("known", count(sum(bool(one.known) for one in seen), "case")),
        ("largest share of a bound", f"{max((one.headroom for one in seen), default=0.0):.2f}"),
    ]
    if whole is not None and whole.cases == cases:  # results.jsonl may hold those of several runs
        rate = f", {cases / whole.seconds:.2f} cases/s" if whole.seconds else ""
        facts.append(("time", f"{whole.seconds:.1f} s{rate}, all engines together"))
    return tuple(facts)


def _counted(caption: str, what: str, numbers: Counter[str], of: int) -> Table:
    rows = tuple(row(name, str(number), f"{number / max(1, of):.0%}") for name, number in numbers.most_common())
    return Table(caption=caption, header=(what, "cases", "of all"), rows=rows, searched=True)


def _drawn(folder: Path, jobs: list[JobResult]) -> list[DocumentSection]:
    modes, kinds, configurations = Counter[str](), Counter[str](), Counter[str]()
    for job in jobs:
        modes[job.mode.words or "the CPU engine"] += len(job.seen)
        kinds[_kind(job)] += len(job.seen)
    for file in sorted(folder.glob(f"job-*/{JOB}")):
        for case in read_facts(file, Job, "the folder of `gpu run`").cases:
            nodes = f" with {case.verify_nodes} nodes" if case.topk > 1 else ""
            configurations[
                f"{case.model}, num_steps {case.num_steps}, topk {case.topk}{nodes}, page_size {case.page_size}"
            ] += 1
    cases, drawn = sum(modes.values()), sum(configurations.values())
    tables = (
        _counted("Modes", "mode", modes, cases),
        _counted("Kinds of jobs", "kind", kinds, cases),
        _counted("Configurations", "configuration", configurations, drawn),
    )
    lines = () if drawn else ("The jobs themselves are not at hand, so their configurations are not known.",)
    return [DocumentSection(heading="What was drawn", lines=lines, tables=tuple(table for table in tables if table.rows))]


def _kind(job: JobResult) -> str:
    """What a plan's job is for, by its name: `generated-graphs-007`, `25015/graphs/red`, `faults/…`."""
    if job.name.startswith(("faults/", RACES)):
        return "planted fault"
    if job.name.endswith(("/green", "/red")):
        return "side of a proof"
    return job.name.partition("-")[0]


def _exercised(jobs: list[JobResult]) -> list[DocumentSection]:
    seen = [one for job in jobs for one in job.seen]
    features = Counter(name for one in seen for name in one.exercised)
    unseen = sum((Counter(one.unseen) for one in seen), Counter[str]())
    tables = [_counted("Features", "feature", features, len(seen)), unexercised_features(features), _batches(jobs)]
    rows = tuple(row(rule, str(number)) for rule, number in sorted(unseen.items()))
    tables.append(
        Table(caption="Could not be compared, as in a graph", header=("rule", "comparisons"), rows=rows, searched=True)
    )
    return [
        DocumentSection(
            heading="What the cases exercised",
            tables=tuple(table for table in tables if table.rows),
        )
    ]


def _batches(jobs: list[JobResult]) -> Table:
    """Decode batches by size and by how they ran: in a graph of their size, padded to a larger one's, or without a graph."""
    counts = sum((Counter(one.paths) for job in jobs for one in job.seen), Counter[str]())
    sizes = sorted({int(size) for name in counts if (size := name.partition(" ")[0]).isdigit()})
    rows = tuple(row(str(size), *(str(counts[f"{size} {path}"]) for path in PATHS)) for size in sizes)
    return Table(caption="Decode batches, by size and by how they ran", header=("batch", *PATHS), rows=rows)


def _rates(jobs: list[JobResult]) -> DocumentSection:
    """Seconds by mode. A rate is that of one engine: the campaign runs many side by side."""
    rows = list[TableRow]()
    for mode in sorted({job.mode.words for job in jobs}):
        of_mode = [job for job in jobs if job.mode.words == mode]
        seen = [one for job in of_mode for one in job.seen]
        engine, judge, trace = (sum(getattr(one, name) for one in seen) for name in ("engine", "judge", "trace"))
        rows.append(
            row(
                mode or "the CPU engine",
                str(len(of_mode)),
                str(len(seen)),
                f"{len(seen) / engine:.2f}" if engine else "",
                f"{sum(job.start for job in of_mode) / len(of_mode):.1f} s",
                f"{engine:.1f} s",
                f"{trace:.1f} s",
                f"{judge:.1f} s",
            )
        )
    header = ("mode", "jobs", "cases", "cases/s of an engine", "mean start", "engines", "of that traces", "judge")
    table = Table(caption="Rates, by mode", header=header, rows=tuple(rows))
    return DocumentSection(heading="Rates", tables=(table,))


def _apart(jobs: list[JobResult]) -> list[DocumentSection]:
    found: list[Apart] = [job.apart for job in jobs if job.apart is not None]
    if not found:
        return []
    return [DocumentSection(heading="float32 and bfloat16, in cases that are equal in both", text=apart_text(found))]


_MOST = 2000  # rows of a table
_TRACES = "Traces are kept in job-NNN/cases; `eagletwin judge --html` of a folder in it makes the page of the case."
_KINDS = {"equal": "right", "known": "", "found": "right", "hidden": "", "diverged": "wrong", "unknown": "doubt"}


def findings(jobs: list[JobResult]) -> list[DocumentSection]:
    """Cases that are not equal, where equal is what was expected; jobs that did not run; comparisons that came out wrong."""
    plain = [job for job in jobs if job.expected is None]
    rows = [_row_of(job, one) for job in plain for one in job.seen if one.status != "equal"]
    table = Table(
        caption="Cases that are not equal",
        header=("case", "job", "status", "rule", "where, or why", "known as"),
        rows=tuple(rows[:_MOST]),
        note=f"{_left(rows)} {_TRACES}".strip(),
        filters=(("As", ("new", "known", "unknown")),),
        searched=True,
    )
    bugs = Counter(one.known for job in plain for one in job.seen if one.known)
    known = tuple(row(bug, str(number)) for bug, number in bugs.most_common())
    tables = (table, Table(caption="Known bugs that explain a case", header=("bug", "cases"), rows=known), _others(jobs))
    shown = tuple(one for one in tables if one.rows)
    return [DocumentSection(heading="What was found", lines=() if shown else ("Nothing was found.",), tables=shown)]


def _row_of(job: JobResult, one: CaseResult) -> TableRow:
    news = "known" if one.known else "new" if one.status == "diverged" else one.status
    status = TableCell(one.status, "" if one.known else _KINDS.get(one.status, "doubt"))
    return row(one.case, job.name, status, one.rule, one.where or one.reason, one.known or news, tags=(news,))


def _others(jobs: list[JobResult]) -> Table:
    """What made a job count otherwise than its cases did."""
    rows = []
    for job in jobs:
        said = [text for text in comparisons(job) if "DIFFERENT" in text or "UNKNOWN" in text]
        rows += [row(job.name, TableCell(text, "doubt" if "UNKNOWN" in text else "wrong")) for text in said]
        if job.error:
            rows.append(row(job.name, TableCell(job.error, "doubt")))
    header = ("job", "what")
    return Table(
        caption="Jobs that did not run to their end, or came out otherwise",
        header=header,
        rows=tuple(rows[:_MOST]),
        note=_left(rows),
    )


def _left(rows: list[TableRow]) -> str:
    return f"{len(rows) - _MOST} more are not listed." if len(rows) > _MOST else ""


def proven(jobs: list[JobResult]) -> list[DocumentSection]:
    """Entries of the ledger and planted faults: whether what must be found was found."""
    rows = []
    for line in proofs(jobs):
        name, _, said = line.partition(": ")
        kind = "right" if said.startswith("proven") else "" if said.startswith("hidden") else "wrong"
        rows.append(row(name, TableCell(said, kind)))
    for job in jobs:
        if job.expected is not None and job.name.startswith(("faults/", RACES)):
            [word] = statuses_of(job)
            rows.append(row(job.name, TableCell(word, _KINDS[word])))
    table = Table(
        caption="Entries of the ledger, and planted faults", header=("what", "result"), rows=tuple(rows), searched=True
    )
    return [DocumentSection(heading="What must be found", tables=(table,))] if rows else []


def all_jobs(jobs: list[JobResult]) -> DocumentSection:
    rows = []
    for job in jobs:
        statuses = statuses_of(job)
        worst = next((word for word in ("diverged", "unknown") if statuses[word]), "equal" if statuses else "unknown")
        said = ", ".join(f"{number} {word}" for word, number in sorted(statuses.items())) or "nothing"
        cells = (TableCell(said, _KINDS[worst]), str(len(job.seen)), f"{job.start:.1f} s", f"{job.seconds:.1f} s")
        rows.append(row(job.name, job.mode.words or "the CPU engine", *cells, tags=(worst,)))
    table = Table(
        caption="Jobs",
        header=("job", "mode", "result", "cases", "start", "in all"),
        rows=tuple(rows[:_MOST]),
        note=_left(rows),
        filters=(("Result", ("equal", "diverged", "unknown")),),
        searched=True,
    )
    return DocumentSection(heading="All jobs", tables=(table,))
