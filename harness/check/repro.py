"""A script that shows one case again, alone: written before the engine starts, so that a crash leaves one too.

The script holds versions, seed and command in its header, the case as one literal, and one call: `reproduce`.
"""

import argparse
import contextlib
import pprint
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from eagletwin import __version__
from eagletwin.harness.core.case import Case, without_defaults
from eagletwin.harness.core.errors import EXIT_EQUAL, EXIT_HARNESS, EXIT_UNKNOWN, InputError, exit_code_of, run_guarded
from eagletwin.harness.core.files import installed_version, keep_bytecode
from eagletwin.harness.core.run_spec import CPU, DEFAULT_RUN, TITLES, Engine, Limits, RunSpec
from eagletwin.harness.core.signature import signature_of
from eagletwin.harness.core.terminal import show, width
from eagletwin.harness.engines.difference import PATCH, keep
from eagletwin.harness.engines.source import INSTALLED, Source, resolve
from eagletwin.harness.families.valid import decode_case

if TYPE_CHECKING:
    from eagletwin.harness.core.trace import Trace
    from eagletwin.harness.engines.host import EngineProcess, Host

    from .confirm import Outcome

SCRIPT = "repro.py"

_TEMPLATE = '''\
"""Case {name}, written by eagletwin {eagletwin} before the engine ran it.

made on     {versions}
seed        {seed}
command     {command}
{difference}
python {script}              exit code 0: equal, 1: diverged, 125: cannot tell, 128 and more: it did not run
python {script} --{engine} X   on another {title} than {version}: a release or a source tree
"""

import sys

try:
    from eagletwin.door import reproduce
except BaseException as error:
    print(f"error: {{error}}, for {{sys.executable}}", file=sys.stderr)
    print("  so:  nothing was run\\n  try: the Python of the environment that eagletwin is installed in", file=sys.stderr)
    sys.exit({harness_error})

CASE = {case}

if __name__ == "__main__":
    reproduce(CASE, version={version!r}, {where}kernels={kernels!r}, without={without!r}, view={view!r},
        patches={patches}{more})
'''


def write_script(
    folder: Path, case: Case, run: RunSpec = DEFAULT_RUN, *, command: str, source: Source = INSTALLED, seed: int | None = None
) -> Path:
    """Write repro.py into a folder, over the one that may be there."""
    version = source.called
    versions = [f"{run.mode.engine} {version}" + (f" in {source.tree}" if source.tree else "")]
    versions += [f"{name} {installed_version(name)}" for name in ("torch", "triton")]
    versions.append(f"Python {'.'.join(str(part) for part in sys.version_info[:3])}")
    text = _TEMPLATE.format(
        name=case.name,
        eagletwin=__version__,
        versions=_docstring(", ".join(versions)),
        harness_error=EXIT_HARNESS,
        seed="none" if seed is None else seed,
        command=_docstring(command),
        difference=_docstring(_difference_text(source)),
        script=SCRIPT,
        version=version,
        engine=run.mode.engine,
        title=run.mode.title,
        where=_where(run, source),
        case=literal(without_defaults(case)),
        kernels=run.kernels,
        without=sorted(run.without),
        view=run.view,
        patches=literal([without_defaults(patch) for patch in run.patches]),
        more=_more(run),
    )
    keep(source.difference, folder)
    path = folder / SCRIPT
    path.write_text(text, encoding="utf-8")
    return path


def _difference_text(source: Source) -> str:
    """How to come by the tree, where it was changed."""
    if source.difference is None:
        return ""
    base = source.difference.base
    return f"""
{PATCH}, next to this script, makes that tree of {TITLES[source.engine]} {base}: in the folder that holds the
{source.engine}/ of a copy, `patch -p1 < {PATCH}`. The same content has the same name,
wherever it lies; what the patch cannot hold is named in it.
"""


def _where(run: RunSpec, source: Source) -> str:
    """Tree, mode, looks and time limits, where they are not the usual ones: without them the script says something else."""
    given = (
        ("tree", source.tree, ""),
        ("mode", without_defaults(run.mode), without_defaults(CPU)),
        ("repeat", run.repeat, DEFAULT_RUN.repeat),
        ("step_timeout", run.limits.step, DEFAULT_RUN.limits.step),
        ("case_timeout", run.limits.case, DEFAULT_RUN.limits.case),
    )
    return "".join(f"{name}={value!r}, " for name, value, usual in given if value != usual)


def _more(run: RunSpec) -> str:
    """What the case showed, and what keeps known bugs out of its way; nothing where there is neither."""
    found = f",\n        finding={run.finding!r}" if run.finding else ""
    workarounds = literal([without_defaults(patch) for patch in run.workarounds])
    return found + (f",\n        workarounds={workarounds}" if run.workarounds else "")


def _docstring(text: str) -> str:
    """Text that cannot end the docstring it stands in, nor escape from it."""
    return text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')


def literal(value: Any) -> str:
    """Plain data as Python writes it."""
    return pprint.pformat(value, width=118, compact=True, sort_dicts=False)


def reproduce(case: dict[str, Any], *, version: str, tree: str = "", **how: Any) -> None:
    """What a script calls, through eagletwin.door: run the case, print the argument, leave by the exit code of the verdict.

    version: the release, or what the source tree in the folder `tree` was called, when the script was made.
    how: the rest of the run: fields of a RunSpec as plain data, with step_timeout and case_timeout in place of its limits.
    """
    keep_bytecode()
    sys.exit(run_guarded(lambda: _reproduce(case, version, tree, _run_of(dict(how)))))


def _run_of(how: dict[str, Any]) -> RunSpec:
    """The run that a script names. Raises InputError for what is none."""
    usual = DEFAULT_RUN.limits
    limits = Limits(step=how.pop("step_timeout", usual.step), case=how.pop("case_timeout", usual.case))
    unknown = sorted(how.keys() - set(RunSpec.__struct_fields__))
    try:
        if unknown:
            raise ValueError(f"no run has {unknown[0]}")
        return msgspec.structs.replace(msgspec.convert(how, RunSpec), limits=limits)
    except (msgspec.ValidationError, ValueError) as error:
        raise InputError(
            f"this script names a run that cannot be had: {error}",
            consequence="nothing was run",
            remedy="use the eagletwin that wrote the script; its header has the version",
        ) from error


def _options(version: str, engine: Engine) -> argparse.Namespace | None:
    """What was typed behind the script's name; None: help, which was printed. Raises InputError."""
    parser = argparse.ArgumentParser(description="Run one case of eagletwin again.")
    other = f"run on another {TITLES[engine]} than {version}"
    parser.add_argument(f"--{engine}", metavar="RELEASE|PATH", default="", dest="version", help=other)
    parser.add_argument("--out", type=Path, default=Path("eagletwin-runs"), help="folder for run folders")
    try:
        return parser.parse_args()
    except SystemExit as stop:  # argparse exits with 2 on a usage error; eagletwin's code is EXIT_USAGE
        if stop.code == 0:
            return None
        raise InputError(
            "the options above are not those of this script", consequence="nothing was run", remedy="--help"
        ) from stop


def _source(chosen: str, tree: str, version: str, engine: Engine) -> Source:
    """The engine to run on: the chosen one, or that of the script. Raises InputError if that is another one now."""
    source = resolve(chosen or tree or version, engine)
    if not chosen and source.called != version:
        made = f" with the {PATCH} next to this script" if "+dirty." in version else ""
        raise InputError(
            f"this case was made on {TITLES[engine]} {version}, and {tree} is now at {source.called}",
            consequence=f"nothing was run: on another {TITLES[engine]} the same case may end otherwise",
            remedy=f"bring back {version}{made}, or ask another one: --{engine} {tree or source.called}",
        )
    if source.called != version:
        print(
            f"note: this case was made on {TITLES[engine]} {version}; this is {source.called}, and what follows is about it",
            file=sys.stderr,
        )
    return source


def _reproduce(raw: dict[str, Any], version: str, tree: str, run: RunSpec) -> int:
    options = _options(version, run.mode.engine)
    if options is None:
        return EXIT_EQUAL
    source = _source(options.version, tree, version, run.mode.engine)
    from eagletwin.harness.core.files import new_run_folder
    from eagletwin.harness.engines.host import Host, WouldNotStart
    from eagletwin.harness.engines.machine import missing_for_cuda

    from .confirm import check

    case = decode_case(msgspec.json.encode(raw), sys.argv[0])
    missing = missing_for_cuda(run.mode.tp, run.mode.attention) if run.mode.device == "cuda" else None
    if missing is not None:
        raise InputError(missing[0], consequence="nothing was run: this case was made on a GPU", remedy=missing[1])
    with Host(source=source, mode=run.mode) as host:
        try:
            engine, fitting = _engine(host, case, run)
        except WouldNotStart as error:
            print(f"UNKNOWN  {case.name}\n\n  {error}")
            return EXIT_UNKNOWN
        folder = new_run_folder(options.out, case.name)
        outcome = check(engine, case, folder, fitting, again=shlex.join(["python", *sys.argv]))
    show(outcome.text(width()))
    for line in [*_of_workarounds(outcome.trace, run, fitting), *_of_finding(outcome, run.finding, source.called, version)]:
        print(f"  {line}")
    print(f"  folder: {folder}")
    return exit_code_of(outcome.verdict.status)


def _engine(host: "Host", case: Case, run: RunSpec) -> "tuple[EngineProcess, RunSpec]":
    """The engine process, and the run with those workarounds alone that fit this engine. The bug of one that does not is mended
    there, or it shows, and the report says so. Raises WouldNotStart."""
    from eagletwin.harness.engines.host import PatchDoesNotApply

    with contextlib.suppress(PatchDoesNotApply):
        return host.engine(case, run.applied, run.kernels), run
    fitting = msgspec.structs.replace(run, workarounds=())
    for patch in run.workarounds:
        more = msgspec.structs.replace(fitting, workarounds=(*fitting.workarounds, patch))
        with contextlib.suppress(PatchDoesNotApply):
            host.engine(case, more.applied, run.kernels)
            fitting = more
    return host.engine(case, fitting.applied, run.kernels), fitting  # a patch that is no workaround must fit


def _of_workarounds(trace: "Trace", run: RunSpec, fitting: RunSpec) -> Iterator[str]:
    """Which of them did nothing."""
    from .trials import idle_workarounds

    idle = idle_workarounds(trace, fitting)
    for patch in run.workarounds:
        if patch not in fitting.workarounds:
            yield f"Left out: {patch.name} does not fit this {run.mode.title}."
        elif idle >= {edit.target for edit in patch.edits}:
            yield f"Not needed here: nothing called what {patch.name} changes."


def _of_finding(outcome: "Outcome", finding: str, called: str, version: str) -> Iterator[str]:
    """What became of that which the case showed on the engine's release or tree `version`."""
    title = TITLES[outcome.trace.header.engine.name]
    shown = signature_of(outcome.verdict, outcome.trace.header.ending)
    if finding and outcome.verdict.status == "equal":
        yield f"{'Fixed' if called != version else 'Not seen again'}: {finding} does not show on {title} {called}."
    elif finding and shown is not None and str(shown) != finding:
        yield f"Not the finding that this script is for, which was {finding}."
