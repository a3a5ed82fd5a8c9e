"""The page of a campaign, made of its results.jsonl: what was drawn, exercised, known and new, and at which rates.

What was drawn is read from each job's job.json, and how long all of it took from campaign.json, where these are at hand.
"""

from collections import Counter
from pathlib import Path

import msgspec

from eagletwin.harness.commands.page_facts import read_facts, unexercised_features
from eagletwin.harness.core.errors import EXIT_DIVERGED, EXIT_EQUAL, InputError
from eagletwin.harness.core.terminal import count
from eagletwin.harness.page.document import Document, DocumentSection, Fields, Table, TableCell, TableRow, row
from eagletwin.harness.page.render import NAME, write_page

from .compared import Apart, apart_text
from .job import JOB, PATHS, RESULTS, CampaignFacts, CaseResult, Job, JobResult
from .summary import RACES, comparisons, exit_code, proofs, statuses_of

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
    rows = [_found(job, one) for job in plain for one in job.seen if one.status != "equal"]
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


def _found(job: JobResult, one: CaseResult) -> TableRow:
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
