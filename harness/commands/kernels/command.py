"""`eagletwin kernels`: the options, what is printed, and the exit code."""

import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from eagletwin.harness.commands.options import KERNELS, SOURCE, flag, log_progress, option, run_options
from eagletwin.harness.core.errors import EXIT_EQUAL, EXIT_UNKNOWN, InputError
from eagletwin.harness.core.run_spec import RunSpec, unusual

if TYPE_CHECKING:
    from .results import PropertyJob, Report

EXAMPLES, SECONDS = 120, 300.0


OPTIONS = (
    option("", "listed", bool, False, "", "--list")("List functions and their properties. Imports no SGLang."),
    flag("", "support")("List which functions this SGLang has, where, and which cannot be called."),
    option("", "as_json", bool, False, "", "--json")("Print JSON."),
    option("", "examples", int, EXAMPLES, min=1)("Cases that are drawn for each property."),
    option("", "seed", int, 0, min=0)("0: the same cases in every run. Another seed draws others."),
    option("", "timeout", float, SECONDS, min=0.1)("Seconds that one property and its faults may take."),
)


@run_options(OPTIONS, SOURCE, KERNELS)
def kernels(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]…", help="Functions, by their dotted name or its end, or properties. Default: all."),
    ] = None,
    *,
    listed: bool,
    support: bool,
    as_json: bool,
    examples: int,
    seed: int,
    timeout: float,
    spec: RunSpec,
) -> int:
    """Compare SGLang's small speculative functions with the reference, one at a time; check that planted faults are caught."""
    if listed and (support or spec.release):
        raise InputError(
            "--list names what can be compared, on any SGLang",
            consequence="nothing was listed",
            remedy="use --support, which looks at one SGLang, or --list alone",
        )
    from .properties import chosen, listing

    functions, properties = chosen(names or [])
    if listed:
        print(listing(functions, as_json))
        return EXIT_EQUAL
    from eagletwin.harness.engines.provision import releases
    from eagletwin.harness.engines.source import resolve

    from .results import PropertyJob, Report, run

    source = resolve(spec.release)
    job = PropertyJob(
        version=source.version if source.paths else "",
        root=str(source.paths[0]) if source.paths else "",
        properties=properties,
        functions=functions,
        kernels=spec.kernels,
        examples=examples,
        seed=seed,
        trial=support,
    )
    # of a tree, a function that is absent may have been renamed
    report = Report(named=functions if names else (), strict=source.called not in releases())
    log_progress(f"importing SGLang {source.called}")
    for message in run(source, job, timeout):
        text = report.add(message, job)
        if text and not (as_json or support):
            print(text, flush=True)
    return _conclude(report, job, spec, as_json, timeout)


def _conclude(report: "Report", job: "PropertyJob", spec: RunSpec, as_json: bool, timeout: float) -> int:
    """Print what there is to say at the end, and return the exit code."""
    from . import results

    if as_json:
        print(report.to_json().decode())
    elif job.trial:
        if report.imported is not None:
            print(f"SGLang {report.imported.version}  {report.imported.file}\n")
        print(f"UNKNOWN  {report.end}" if report.end else results.support(report))
    else:
        for of in report.outcomes:
            if of.status in ("diverged", "unknown"):
                print(results.details(of, _again(of.property, job, spec, timeout)))
        for text in (results.changes(report), results.describe_uncompared(report)):
            if text:
                print(text)
        print(f"\n{results.summary(report)}")
    if job.trial:  # a list: what is absent is what was asked for
        return EXIT_UNKNOWN if report.end or any(of.broken for of in report.functions) else EXIT_EQUAL
    return report.exit_code


def _again(name: str, job: "PropertyJob", spec: RunSpec, timeout: float) -> str:
    """The command that runs this property again."""
    given = (("--examples", job.examples, EXAMPLES), ("--seed", job.seed, 0), ("--timeout", timeout, SECONDS))
    return shlex.join(["eagletwin", "kernels", name, *spec.options, *unusual(given)])
