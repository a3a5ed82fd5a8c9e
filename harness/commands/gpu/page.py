"""The page of a campaign, made of its results.jsonl: what was drawn, exercised, known and new, and at which rates.

What was drawn is read from each job's job.json, and how long all of it took from campaign.json, where these are at hand.
"""

from collections import Counter
from pathlib import Path

import msgspec

from eagletwin.harness.core.errors import EXIT_DIVERGED, EXIT_EQUAL, InputError
from eagletwin.harness.core.terminal import count
from eagletwin.harness.page.render import NAME, Fields, Page, PageSection, Table, TableRow, write_page

from ..compare.precision_gap import Apart, apart_text
from ..page_facts import never_happened, read_facts, row
from ..result import CampaignFacts
from .batches import PATHS
from .job import JOB, RESULTS, Job, JobResult
from .page_jobs import all_jobs, findings, proven
from .tally import RACES, exit_code, statuses_of

CAMPAIGN = "campaign.json"  # in the folder of a campaign: what `gpu run --json` prints


def keep_campaign(result: CampaignFacts, out: Path) -> None:
    """Write campaign.json and the page into the folder of a campaign, and name the page."""
    (out / CAMPAIGN).write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
    if write_page(out, lambda: campaign_page(out)) is not None:
        print(f"page: {out / NAME}")


def campaign_page(folder: Path) -> Page:
    """The page of the folder of `gpu run`. Raises InputError for results that cannot be read."""
    jobs = _read(folder / RESULTS)
    whole = read_facts(folder / CAMPAIGN, CampaignFacts, "the folder of `gpu run`") if (folder / CAMPAIGN).is_file() else None
    statuses = sum((statuses_of(job) for job in jobs), Counter[str]())
    cases = sum(len(job.seen) for job in jobs)
    said = ", ".join(f"{number} {name}" for name, number in sorted(statuses.items()))
    return Page(
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
            remedy="name the folder of `eagletwin gpu run` of this eagletwin",
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


def _drawn(folder: Path, jobs: list[JobResult]) -> list[PageSection]:
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
    return [PageSection(heading="What was drawn", lines=lines, tables=tuple(table for table in tables if table.rows))]


def _kind(job: JobResult) -> str:
    """What a plan's job is for, by its name: `generated-graphs-007`, `25015/graphs/red`, `faults/…`."""
    if job.name.startswith(("faults/", RACES)):
        return "planted fault"
    if job.name.endswith(("/green", "/red")):
        return "side of a proof"
    return job.name.partition("-")[0]


def _exercised(jobs: list[JobResult]) -> list[PageSection]:
    seen = [one for job in jobs for one in job.seen]
    features = Counter(name for one in seen for name in one.exercised)
    unseen = sum((Counter(one.unseen) for one in seen), Counter[str]())
    tables = [_counted("Features", "feature", features, len(seen)), never_happened(features), _batches(jobs)]
    rows = tuple(row(rule, str(number)) for rule, number in sorted(unseen.items()))
    tables.append(
        Table(caption="Could not be compared, as in a graph", header=("rule", "comparisons"), rows=rows, searched=True)
    )
    return [
        PageSection(
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


def _rates(jobs: list[JobResult]) -> PageSection:
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
    return PageSection(heading="Rates", tables=(table,))


def _apart(jobs: list[JobResult]) -> list[PageSection]:
    found: list[Apart] = [job.apart for job in jobs if job.apart is not None]
    if not found:
        return []
    return [PageSection(heading="float32 and bfloat16, in cases that are equal in both", text=apart_text(found))]
