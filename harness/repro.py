"""A script that shows one case again, alone: written before the engine starts, so that a crash leaves one too.

The script holds versions, seed and command in its header, the case as one literal, and one call: `reproduce`.
"""

import argparse
import pprint
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from eagletwin import __version__

from .case import Case, decode_case, without_defaults
from .engines.mode import CPU, Mode
from .engines.source import INSTALLED, Source, resolve
from .errors import EXIT_EQUAL, EXIT_HARNESS, EXIT_UNKNOWN, InputError, exit_code_of
from .judge import DECLARED_VIEW, View
from .patch import Patch
from .versions import installed

SCRIPT = "repro.py"

_TEMPLATE = '''\
"""Case {name}, written by eagletwin {eagletwin} before the engine ran it.

made on     {versions}
seed        {seed}
command     {command}

python {script}              exit code 0: equal, 1: diverged, 125: cannot tell, 128 and more: it did not run
python {script} --sglang X   on another SGLang than {sglang}: a release or a source tree
"""

import sys

try:
    from eagletwin.harness.repro import reproduce
except ModuleNotFoundError as error:
    print(f"error: {{error}}, for {{sys.executable}}", file=sys.stderr)
    print("  so:  nothing was run\\n  try: the Python of the environment that eagletwin is installed in", file=sys.stderr)
    sys.exit({harness_error})

CASE = {case}

if __name__ == "__main__":
    reproduce(CASE, sglang={sglang!r}, {tree}{mode}kernels={kernels!r}, without={without!r}, view={view!r}, patches={patches})
'''


def write_script(
    folder: Path,
    case: Case,
    *,
    command: str,
    source: Source = INSTALLED,
    mode: Mode = CPU,
    seed: int | None = None,
    patches: Sequence[Patch] = (),
    kernels: str = "fast",
    without: frozenset[str] = frozenset(),
    view: View = DECLARED_VIEW,
) -> Path:
    """Write repro.py into a folder, over the one that may be there."""
    sglang = source.called
    versions = [f"sglang {sglang}" + (f" in {source.tree}" if source.tree else "")]
    versions += [f"{name} {installed(name)}" for name in ("torch", "triton")]
    versions.append(f"Python {'.'.join(str(part) for part in sys.version_info[:3])}")
    text = _TEMPLATE.format(
        name=case.name,
        eagletwin=__version__,
        versions=_docstring(", ".join(versions)),
        harness_error=EXIT_HARNESS,
        seed="none" if seed is None else seed,
        command=_docstring(command),
        script=SCRIPT,
        sglang=sglang,
        tree=f"tree={source.tree!r}, " if source.tree else "",
        mode=f"mode={without_defaults(mode)}, " if mode != CPU else "",
        case=_literal(without_defaults(case)),
        kernels=kernels,
        without=sorted(without),
        view=view,
        patches=_literal([without_defaults(patch) for patch in patches]),
    )
    path = folder / SCRIPT
    path.write_text(text, encoding="utf-8")
    return path


def _docstring(text: str) -> str:
    """Text that cannot end the docstring it stands in, nor escape from it."""
    return text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')


def _literal(value: Any) -> str:
    return pprint.pformat(value, width=118, compact=True, sort_dicts=False)


def reproduce(
    case: dict[str, Any],
    *,
    sglang: str,
    tree: str = "",
    mode: Mapping[str, Any] = MappingProxyType({}),
    kernels: Any = "fast",
    without: Sequence[str] = (),
    view: View = DECLARED_VIEW,
    patches: Sequence[dict[str, Any]] = (),
) -> None:
    """What a script calls: run the case, print the argument, leave by the exit code of the verdict.

    sglang: the release, or what the source tree in the folder `tree` was called, when the script was made.
    mode: fields of a Mode that are not those of the CPU engine.
    """
    from .cli import guarded

    sys.exit(guarded(lambda: _reproduce(case, sglang, tree, mode, kernels, frozenset(without), view, patches)))


def _reproduce(
    raw: dict[str, Any],
    sglang: str,
    tree: str,
    mode: Mapping[str, Any],
    kernels: Any,
    without: frozenset[str],
    view: View,
    patches: Sequence[dict[str, Any]],
) -> int:
    parser = argparse.ArgumentParser(description="Run one case of eagletwin again.")
    parser.add_argument("--sglang", metavar="RELEASE|PATH", default="", help=f"run on another SGLang than {sglang}")
    parser.add_argument("--out", type=Path, default=Path("eagletwin-runs"), help="folder for run folders")
    try:
        options = parser.parse_args()
    except SystemExit as stop:  # argparse leaves by 2 for a usage error, which is no exit code of ours
        if stop.code == 0:
            return EXIT_EQUAL
        raise InputError(
            "the options above are not those of this script", consequence="nothing was run", remedy="--help"
        ) from stop
    source = resolve(options.sglang or tree or sglang)
    if not options.sglang and source.called != sglang:
        raise InputError(
            f"this case was made on SGLang {sglang}, and {tree} is now at {source.called}",
            consequence="nothing was run: on another SGLang the same case may come to something else",
            remedy=f"check {sglang} out, or add --sglang {tree}",
        )
    from .check import check
    from .doctor import missing_for_cuda
    from .engines.process import Host, Limits, WouldNotStart
    from .paths import new_run_folder

    case = decode_case(msgspec.json.encode(raw), sys.argv[0])
    driven = msgspec.convert(dict(mode), Mode)
    missing = missing_for_cuda(driven.tp, driven.attention) if driven.device == "cuda" else None
    if missing is not None:
        raise InputError(missing[0], consequence="nothing was run: this case was made on a GPU", remedy=missing[1])
    with Host(source=source, mode=driven) as host:
        try:
            engine = host.engine(case, tuple(msgspec.convert(patch, Patch) for patch in patches), kernels)
        except WouldNotStart as error:
            print(f"UNKNOWN  {case.name}\n\n  {error}")
            return EXIT_UNKNOWN
        folder = new_run_folder(options.out, case.name)
        outcome = check(engine, case, folder, Limits(), without=without, view=view, again=f"python {sys.argv[0]}")
    print(outcome.report)
    print(f"  folder: {folder}")
    return exit_code_of(outcome.verdict.status)
