"""Which known bugs the wrong cases of a job are: first by few engines for all, then case by case, as a search does it."""

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from eagletwin.cases.entry import Entry
from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.check.known import KnownBugMatcher
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.errors import EagletwinError
from eagletwin.harness.core.patch import Patch
from eagletwin.harness.core.run_spec import Limits, RunSpec
from eagletwin.harness.core.verdict import Verdict
from eagletwin.harness.engines.host import Host, PatchDoesNotApply
from eagletwin.harness.judge.judge import judge

from .job import CaseResult, Job

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
