"""Run the jobs of a plan, and look for the known bugs that explain what diverged."""

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Collection, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from eagletwin.cases.entry import Entry
from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.check.confirm import agree
from eagletwin.harness.check.known import KnownBugMatcher
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.errors import EagletwinError, InputError
from eagletwin.harness.core.patch import Patch
from eagletwin.harness.core.run_spec import Limits, Mode, RunSpec
from eagletwin.harness.core.trace import Trace, rank_folder, write_trace
from eagletwin.harness.core.verdict import Verdict
from eagletwin.harness.engines.blocks import FOLDER
from eagletwin.harness.engines.host import EngineProcess, Host, PatchDoesNotApply
from eagletwin.harness.families.valid import check_case, read_trace
from eagletwin.harness.judge.judge import judge
from eagletwin.harness.judge.trace_diff import diff

from ..common import module
from .compared import RACE, Apart, Race, apart, jitter_of, race
from .job import JOB, RESULTS, Beside, CaseResult, Job, JobResult, paths
from .processes import Processes, Sharing

# Which known bugs the wrong cases of a job are: first by few engines for all, then case by case, as a search does it.

_NAMED = 3  # known bugs of a job that are all tried alone, and named where it takes all of them


def apt_for(job: Job, host: Host, probe: Case) -> tuple[Entry, ...]:
    """The live bugs that cases with what this one has may show, and whose remedies fit together."""
    return KnownBugMatcher(host, RunSpec(mode=job.mode, patches=job.patches, view=job.view)).applicable(probe, job.view)


def explained(job: Job, seen: list[CaseResult], limits: Limits) -> list[CaseResult]:
    """The same, and of each case that is wrong again the known bugs without which it is equal: one that breaks its rule, any
    other where few are known, as many of them together as fit, or those that `KnownBugMatcher` finds for this case."""
    if not job.known:
        return seen
    job = msgspec.structs.replace(job, known={name: fix for name, fix in job.known.items() if fix not in job.patches})
    wrong = [number for number, one in enumerate(seen) if one.status == "diverged" or one.rule.startswith("engine.")]
    wrong = _wrong_again(job, seen, wrong, limits) if wrong else []
    for name in job.known:
        breaks = LEDGER[name].rule if name in LEDGER and len(job.known) > _NAMED else ""
        _try(job, seen, [number for number in wrong if breaks in ("", seen[number].rule)], (name,), limits)
    for several in range(len(job.known), 1, -1):
        if _try(job, seen, wrong, tuple(job.known)[:several], limits):
            break
    _one_by_one(job, seen, [number for number in wrong if not seen[number].known], limits)
    return seen


def _wrong_again(job: Job, seen: list[CaseResult], numbers: list[int], limits: Limits) -> list[int]:
    """Those of these cases that break the same rule once more with nothing mended. What takes the cases before it, or pauses
    between streams, is right here: a remedy would explain it by changing nothing."""
    again = []
    with Host(mode=job.mode) as host:
        for number in numbers:
            if _verdict(host, job, number, (), limits).rule == seen[number].rule:
                again.append(number)
    return again


def _verdict(host: Host, job: Job, number: int, more: Iterable[Patch], limits: Limits) -> Verdict:
    """Of this case, with more patches than the job's own."""
    engine = host.engine(job.cases[number], (*job.patches, *more))
    with TemporaryDirectory(prefix="eagletwin-") as scratch:
        return judge(engine.run(job.cases[number], Path(scratch), limits), view=job.view)


def _try(job: Job, seen: list[CaseResult], numbers: list[int], names: tuple[str, ...], limits: Limits) -> bool:
    """Run those of these cases again that no bug explains yet, with what mends the bugs of these names. Whether it fits."""
    patches = dict.fromkeys(job.known[name] for name in names)
    unexplained = [number for number in numbers if not seen[number].known]
    if not unexplained:
        return True
    with Host(mode=job.mode) as host:
        for number in unexplained:
            try:
                verdict = _verdict(host, job, number, patches, limits)
            except PatchDoesNotApply:
                return False
            if verdict.status == "equal" or (verdict.vacuous and len(names) > 1):  # of several, one may change nothing here
                words = " and ".join(names) if len(names) <= _NAMED else f"several of {len(names)} known bugs"
                seen[number] = msgspec.structs.replace(seen[number], known=words)
    return True


def _one_by_one(job: Job, seen: list[CaseResult], numbers: list[int], limits: Limits) -> None:
    """What a case may show depends on its requests, too, and so do the remedies that fit together."""
    if not numbers:
        return
    with Host(mode=job.mode) as host:
        matcher = KnownBugMatcher(host, RunSpec(mode=job.mode, patches=job.patches, view=job.view, limits=limits))
        for number in numbers:
            try:
                trial = matcher.trials().look(job.cases[number])
                if trial.verdict.rule != seen[number].rule:  # `explain` asks whether it is wrong alone, too
                    continue
                found = matcher.explain(trial, job.view)
            except EagletwinError:  # no engine stands with the remedies
                continue
            if found.known and found.trial.clean:
                seen[number] = msgspec.structs.replace(seen[number], known=" and ".join(entry.id for entry in found.known))


# Run many cases on the GPUs of one host and keep their results: the figures of docs/records/detection.md are made of these.
#
# A plan is a list of jobs. A job is one engine: one configuration, one mode, one set of patches; its cases run in it one after
# another, each after a reset. Jobs run side by side, since starting an engine costs the processor some twenty seconds and a
# case less than one. Each job is a process of its own, so that one that goes wrong costs itself alone.

_LIMITS = Limits(step=60.0, case=120.0)


def read_plan(file: Path) -> list[Job]:
    """The jobs in a file. Raises InputError if it is not a plan."""
    try:
        plan = msgspec.json.decode(file.read_bytes(), type=list[Job])
    except (OSError, msgspec.DecodeError) as error:
        raise InputError(
            f"{file}: {error}", consequence="nothing was run", remedy="name a plan that `gpu plan` wrote"
        ) from error
    if not any(job.cases or job.draw for job in plan):
        raise InputError(f"{file} has no cases", consequence="nothing was run", remedy="name a plan that has some")
    for job in plan:
        if any(case.configuration() != job.cases[0].configuration() for case in job.cases):
            raise InputError(
                f"{file}: the cases of job {job.name} do not share a configuration, and a job has one engine",
                consequence="nothing was run",
                remedy="give each configuration a job of its own",
            )
        for case in job.cases:
            check_case(case, f"{file}: job {job.name}")
    return plan


def run_job(job: Job, folder: Path) -> JobResult:
    """Run a job in this process. Traces that are kept go below `folder`."""
    begun = time.monotonic()
    probe = job.cases[0] if job.draw is None else job.draw.block.probe
    job = job if job.draw is None else msgspec.structs.replace(job, cases=job.draw.draw(), draw=None)
    seen: list[CaseResult] = []
    first: Trace | None = None
    equal: list[tuple[Case, Trace]] = []  # of a job that asks for `apart`
    done = JobResult(name=job.name, mode=job.mode, expected=job.expected)
    try:
        with Host(mode=job.mode) as host:
            mended = apt_for(job, host, probe) if job.mend else ()
            remedies = [entry.remedy for entry in mended if entry.remedy is not None]
            job = msgspec.structs.replace(job, patches=tuple(dict.fromkeys((*job.patches, *remedies))))
            done = msgspec.structs.replace(done, mended=tuple(entry.id for entry in mended))
            ours = {target for remedy in remedies for target in remedy.targets}
            engine = host.engine(job.cases[0], job.patches)
            done = msgspec.structs.replace(done, start=time.monotonic() - begun, engine=engine.info)
            for number, case in enumerate(job.cases):
                if not engine.alive:
                    engine = host.engine(case, job.patches)
                one, trace = _look(engine, job, case, folder / str(number), ours, keep=job.keep and number == 0)
                first = first or trace
                if one.status == "equal" and job.races:
                    one = _raced(engine, job, one, trace, number, folder / str(number))
                seen.append(one)
                if job.until_found and one.status == "diverged":
                    break
                if job.apart is not None and one.status == "equal":
                    equal.append((case, trace))
            if job.again and first is not None:
                with _folder(folder / "again") as again:
                    compared = diff(first, engine.run(job.cases[0], again, _LIMITS))
                    differs = compared.differences[0] if compared.differences else None
                    done = msgspec.structs.replace(
                        done,
                        again=differs is None,
                        again_compared=compared.compared,
                        again_differs=f"{differs.where}: {differs.left} | {differs.right}" if differs else "",
                    )
        seen = explained(job, seen, _LIMITS)
        if job.beside is not None and first is not None:
            done = msgspec.structs.replace(done, beside=_beside(job, job.beside, first, folder / "beside"))
        if job.apart is not None:
            done = msgspec.structs.replace(done, apart=_both(job, job.apart, equal, folder / "apart"))
    except EagletwinError as error:
        done = msgspec.structs.replace(done, error=str(error))
    return msgspec.structs.replace(done, seen=tuple(seen), seconds=time.monotonic() - begun)


def _raced(engine: EngineProcess, job: Job, one: CaseResult, judged: Trace, number: int, folder: Path) -> CaseResult:
    """A case that is equal, again with pauses. The seed of each run follows from the places of case and run in the job."""
    begun, runs = time.monotonic(), list[Race]()
    for again in range(job.races):
        place = folder / f"race-{again}"
        place.mkdir(parents=True)
        runs.append(race(engine, job.cases[number], judged, jitter_of(number * job.races + again), place))
        if runs[-1].differs or not engine.alive:
            break
        shutil.rmtree(place, ignore_errors=True)
    last, taken = runs[-1], time.monotonic() - begun
    done = msgspec.structs.replace(one, races=tuple(runs), raced=taken)
    if last.differs:
        where = f"with the pauses of seed {last.jitter.seed}, {last.differs}"
        return msgspec.structs.replace(done, status="diverged", rule=RACE, where=where)
    if not last.compared:
        return msgspec.structs.replace(done, status="unknown", reason="nothing was compared with the run with pauses")
    return done


def _beside(job: Job, mode: Mode, first: Trace, folder: Path) -> Beside:
    """The first case on another engine."""
    with Host(mode=mode) as host, _folder(folder) as scratch:
        other = host.engine(job.cases[0], job.patches).run(job.cases[0], scratch, _LIMITS)
    compared = diff(first, other)
    both = [found for found in compared.differences if "absent" not in (found.left, found.right)]
    wrong = [found for found in both if not found.bits and not found.where.endswith(", in_graph")]
    differs = f"{wrong[0].where}: {wrong[0].left} | {wrong[0].right}" if wrong else ""
    endings = [one.header.ending for trace in (first, other) for one in trace.ranks]
    unfinished = next((f"{one.kind} {one.detail}".strip() for one in endings if one.kind != "finished"), "")
    return Beside(same=not wrong, compared=compared.compared, largest=compared.largest, differs=differs, unfinished=unfinished)


def _both(job: Job, mode: Mode, ran: list[tuple[Case, Trace]], folder: Path) -> Apart:
    """Cases that were run and are equal, in another mode: how far apart the two are, where they are equal in that one too."""
    total = Apart()
    with Host(mode=mode) as host:
        for case, trace in ran:
            with _folder(folder) as scratch:
                other = host.engine(case, job.patches).run(case, scratch, _LIMITS)
            if judge(other, view=job.view).status == "equal":
                total += apart(trace, other)
    return total


@contextlib.contextmanager
def _folder(folder: Path) -> Iterator[Path]:
    folder.mkdir(parents=True)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def _look(
    engine: EngineProcess, job: Job, case: Case, folder: Path, ours: Collection[str], *, keep: bool
) -> tuple[CaseResult, Trace]:
    """Run and judge a case, as often as the job says. ours: functions that the remedies edit of the bugs that were mended."""
    folder.mkdir(parents=True)
    begun = time.monotonic()
    trace = engine.run(case, folder, _LIMITS)
    ran = time.monotonic()
    verdict = judge(trace, view=job.view)
    judged = time.monotonic()
    for time_again in range(1, job.times if verdict.status != "unknown" else 1):
        with _folder(folder / f"replay-{time_again}") as replay:
            second = judge(engine.run(case, replay, _LIMITS), view=job.view)
        verdict = agree(verdict, second, f"in run {time_again + 1}")
        if verdict.status == "unknown":
            break
    idle = set(trace.header.idle_edits)
    hidden = job.expected is not None and job.expected.hidden
    # some of the bugs that are mended do not show in it, or the mode hides the entry's own
    if verdict.vacuous and not verdict.gap and idle and (hidden or idle <= set(ours)):
        verdict = msgspec.structs.replace(verdict, status="equal", reason="")
    vain = list(trace.header.unreached_edits or ())
    if verdict.status == "equal":
        vain += [name for change in trace.changes if change.patch for name in change.idle if name not in ours]
    if job.proof and vain and not hidden:
        reason = f"no changed statement of {vain[0]} ran"
        verdict = msgspec.structs.replace(verdict, status="unknown", rule="", reason=reason, first=None)
    found = verdict.first
    seen = CaseResult(
        case=case.name,
        status=verdict.status,
        rule=verdict.rule,
        where=f"{found.stage}, {found.index}: {found.actual} instead of {found.expected}" if found is not None else "",
        reason=verdict.reason,
        engine=ran - begun,
        trace=_trace_seconds(trace, folder),
        judge=judged - ran,
        choices=verdict.choices,
        ties=verdict.ties,
        adopted=verdict.adopted,
        compared=sum(verdict.checked.values()),
        headroom=verdict.headroom,
        unseen=verdict.unseen,
        exercised=verdict.exercised,
        paths=paths(trace, job.mode.graphs),
    )
    if verdict.status == "equal" and not keep:
        shutil.rmtree(folder, ignore_errors=True)
    return seen, trace


def _trace_seconds(trace: Trace, folder: Path) -> float:
    """What writing this trace and reading it takes."""
    with _folder(folder / "timing") as scratch:
        begun = time.monotonic()
        for rank, one in enumerate(trace.ranks):
            place = rank_folder(scratch, rank)
            place.mkdir(exist_ok=True)
            write_trace(place, one.header, one.tensors)
        read_trace(scratch)
        return time.monotonic() - begun


def run_plan(
    plan: list[Job], out: Path, processes: int, gpus: int = 1, blocks: Path | None = None, sharing: Sharing | None = None
) -> Generator[JobResult, None, None]:
    """Run the jobs side by side, spread over this many GPUs; yield each as it is done. results.jsonl has them all.

    blocks: the folder for what ran of SGLang's speculative code (engines/inside/own_loader.py)
    sharing: a daemon that is up; jobs that may share a GPU run by it, before all others. What ends one process may end those
    that share the GPU with it, so a job in which a worker died is not yielded: it runs again with the GPU to itself.
    """
    out.mkdir(parents=True, exist_ok=True)
    if blocks is not None:
        blocks.mkdir(exist_ok=True)
    noted = {} if blocks is None else {FOLDER: str(blocks.resolve())}
    shared = {} if sharing is None else sharing.environment
    with ThreadPoolExecutor(processes) as pool, (out / RESULTS).open("ab") as results, Processes() as started:

        def begin(number: int, together: bool, folder: str) -> Future[JobResult]:
            job = plan[number]
            environment = {"CUDA_VISIBLE_DEVICES": _gpus_of(job, number, gpus)} | noted | (shared if together else {})
            return pool.submit(_apart, job, out / folder, environment, started)

        together = {number: bool(shared) and may_share(job) for number, job in enumerate(plan)}
        order = sorted(together, key=lambda number: not together[number])
        running = {begin(number, together[number], f"job-{number:03}"): number for number in order}
        try:
            while running:
                for finished in wait(running, return_when=FIRST_COMPLETED).done:
                    number = running.pop(finished)
                    done = finished.result()
                    if together[number] and _died(done):
                        together[number] = False
                        running[begin(number, False, f"job-{number:03}-alone")] = number
                        continue
                    done = msgspec.structs.replace(done, shared=together[number])
                    results.write(msgspec.json.encode(done) + b"\n")
                    results.flush()
                    yield done
        finally:  # else the pool would run all that wait, though nobody asks for them any more
            pool.shutdown(wait=False, cancel_futures=True)


def may_share(job: Job) -> bool:
    """Whether a job's engine may use a GPU at the same time as others. Not what is to go wrong, nor what is about time."""
    return job.mode.device == "cuda" and job.mode.tp == 1 and job.expected is None and not job.races


def _died(done: JobResult) -> bool:
    """Whether a worker ended before its time, for whatever reason; also where that shows as a case that cannot be judged."""
    return bool(done.error) or any(one.status == "unknown" or one.rule in ("engine.crash", "engine.hang") for one in done.seen)


def _gpus_of(job: Job, number: int, gpus: int) -> str:
    """Which GPUs a job sees: one after the other, each of several ranks its own."""
    first = number * job.mode.tp
    return ",".join(str((first + rank) % gpus) for rank in range(job.mode.tp))


def _apart(job: Job, folder: Path, environment: dict[str, str], started: Processes) -> JobResult:
    """Run a job in a process of its own."""
    folder.mkdir(parents=True)
    (folder / JOB).write_bytes(msgspec.json.encode(job))
    with (folder / "log.txt").open("wb") as log:
        command = module("tests.lab.gpu.jobs", str(folder.resolve()))
        status = started.run(command, os.environ | {"OMP_NUM_THREADS": "1"} | environment, log)
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return msgspec.json.decode((folder / "done.json").read_bytes(), type=JobResult)
    return JobResult(name=job.name, mode=job.mode, error=f"its process ended with {status}; {folder / 'log.txt'} says more")


def main() -> None:
    """One job, in the folder that is named."""
    folder = Path(sys.argv[1])
    job = msgspec.json.decode((folder / JOB).read_bytes(), type=Job)
    done = run_job(job, folder / "cases")
    (folder / "done.json").write_bytes(msgspec.json.encode(done))


if __name__ == "__main__":
    main()
