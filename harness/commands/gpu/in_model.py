"""The ledger's proofs of a plan in another model than each entry's own, by the cases and rules with which a CPU proved them
there."""

import dataclasses
from pathlib import Path

from msgspec.structs import replace

from eagletwin.cases.entry import Entry
from eagletwin.cases.ledger import remedies_of
from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.patch import Patch

from ..models.results import asked_of, case_in, read
from .job import Job
from .plan import Options, proofs


def proofs_in_model(entries: list[Entry], options: Options, records: Path) -> tuple[list[Job], list[str]]:
    """Both sides of the entries that are proven in the model of these options, and why the others are left out. Live bugs that
    would show first there are mended on both sides. records: the folder into which `eagletwin models table` wrote."""
    answers, jobs, others = read(records)[options.model].answers, list[Job](), list[str]()
    for entry in entries:
        answer = answers.get(entry.id)
        if answer is None or answer.asked != asked_of(entry):
            raise InputError(
                f"{records} does not say by which case {entry.id} shows in {options.model}",
                consequence="no plan was written",
                remedy=f"run `eagletwin models table {options.model} --entry {entry.id} --write {records}`, or give --records",
            )
        if answer.attempt is None:
            others.append(f"{entry.id} in {options.model}: {answer.why or answer.status}")
            continue
        mended = remedies_of(answer.beside)
        case = case_in(entry, options.model, answer.attempt)
        there = dataclasses.replace(entry, case=case, rule=answer.rule or entry.rule)
        jobs += [_beside(job, mended) for job in proofs([there], options)]
    return jobs, others


def _beside(job: Job, mended: tuple[Patch, ...]) -> Job:
    return replace(job, patches=(*job.patches, *(patch for patch in mended if patch not in job.patches)))
