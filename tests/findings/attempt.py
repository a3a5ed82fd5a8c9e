"""Whether upstream can take a finding: its test is red on the newest release, and green with its patch.

A finding's folder in docs/findings/ holds a report, which ends with a patch of an engine's source, and a test, which needs the
source alone. Here the files that the patch changes are copied as a checkout has them (`python/sglang/...`, `vllm/...`), git
applies the report to them, and run_test.py imports them in place of the release's. change.py (`make findings`) tries every
folder, test_folders.py one.
"""

import contextlib
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from eagletwin.harness.core.errors import InputError
from eagletwin.harness.core.run_spec import DEFAULT_ENGINE, ENGINES, Engine
from eagletwin.harness.engines.source import INSTALLED, resolve

ROOT = Path(__file__).parents[2]
FINDINGS = ROOT / "docs" / "findings"
# engine -> where its package lies in a checkout
BELOW: dict[Engine, str] = {engine: f"{facts.folder}/{engine}/".lstrip("/") for engine, facts in ENGINES.items()}
REPORT = "report.md"  # of a folder; git takes the patch at its end, and eagletwin does
Variables = tuple[tuple[str, str], ...]  # of the environment: name and value
SECONDS = 300  # a test that takes a tenth of it is a bad test; a hanging one must end


@dataclass(frozen=True)
class Attempt:
    """The tests of one folder, before and after the patch."""

    name: str
    ran: int
    red: list[str]
    seconds: tuple[float, float]

    def line(self) -> str:
        before, after = self.seconds
        return f"{self.name:26} red {before:5.1f} s ({len(self.red)} of {self.ran} fail)   green {after:5.1f} s with the patch"


def folders() -> list[Path]:
    return sorted(path for path in FINDINGS.iterdir() if path.is_dir())


def attempt(folder: Path, process: "Process") -> Attempt:
    """The tests are run in forks of the process. Raises InputError if the folder is not what upstream can take."""
    patch, test = _files(folder)
    with tempfile.TemporaryDirectory() as place:
        checkout = Path(place) / "sglang"
        take_out(patch, checkout)
        start = time.monotonic()
        engine = engine_of(patch)
        before = _run(process, test, engine, checkout)
        middle = time.monotonic()
        if before["errors"] or before["skipped"] or not before["failures"]:
            raise InputError(
                f"{_short(test)} does not fail by an assertion on the release: {_tally(before)}",
                consequence="it does not show the bug",
                remedy="let it compare what the engine computes with what is right, and give it all that it asks for",
            )
        _apply(patch, checkout)
        after = _run(process, test, engine, checkout)
        if after["errors"] or after["skipped"] or after["failures"] or after["ran"] != before["ran"]:
            raise InputError(
                f"{_short(test)} does not pass with the patch: {_tally(after)}",
                consequence="the patch does not cure what the test shows",
                remedy="mend either, and run the test in a checkout with the patch",
            )
        return Attempt(folder.name, before["ran"], before["failures"], (middle - start, time.monotonic() - middle))


def _files(folder: Path) -> tuple[Path, Path]:
    report, test = folder / REPORT, folder / f"test_{folder.name.replace('-', '_')}.py"
    for file in (report, test):
        if not file.is_file():
            raise InputError(
                f"{_short(file)} is not there",
                consequence="upstream cannot take the finding",
                remedy="add the file, or remove the folder",
            )
    return report, test


def changed(patch: Path) -> list[str]:
    """The files that a patch changes, as paths in a checkout."""
    files = re.findall(r"^\+\+\+ b/(\S+)$", patch.read_text(encoding="utf-8"), re.MULTILINE)
    if not files or not any(all(file.startswith(below) for file in files) for below in BELOW.values()):
        raise InputError(
            f"{_short(patch)} changes {', '.join(files) or 'no file'}",
            consequence="it cannot be applied to a release",
            remedy=f"make it with `git diff` in a checkout, of files in {' or '.join(BELOW.values())} alone",
        )
    return files


def engine_of(patch: Path) -> Engine:
    """Whose source a patch changes."""
    return next(engine for engine, below in BELOW.items() if changed(patch)[0].startswith(below))


@cache
def root_of(engine: Engine) -> Path:
    """The folder that holds the package of the newest release: for an installed engine, this environment's."""
    return INSTALLED.root if ENGINES[engine].installed else resolve("", engine).root


def take_out(patch: Path, checkout: Path) -> None:
    """The release's files that a patch changes, where a checkout has them; the patch fits them."""
    copy_out(checkout, changed(patch), engine_of(patch))
    _apply(patch, checkout, "--check")


def patched(patch: Path) -> dict[str, str]:
    """The release's files that a patch changes, by their paths from where the package lies, with the patch."""
    with tempfile.TemporaryDirectory() as place:
        checkout = Path(place) / "sglang"
        take_out(patch, checkout)
        _apply(patch, checkout)
        below = ENGINES[engine_of(patch)].folder + "/"
        return {file.removeprefix(below): (checkout / file).read_text(encoding="utf-8") for file in changed(patch)}


def copy_out(checkout: Path, files: list[str], engine: Engine = DEFAULT_ENGINE) -> None:
    """The release's files, where a checkout has them. One that it lacks is left out: git will name it."""
    site = root_of(engine)
    for file in files:
        installed, copy = site / Path(file).relative_to(ENGINES[engine].folder), checkout / file
        copy.parent.mkdir(parents=True, exist_ok=True)
        if installed.is_file():
            shutil.copy(installed, copy)


def _apply(patch: Path, checkout: Path, *options: str) -> None:
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(checkout.parent)}  # in no repository: paths as they are
    done = subprocess.run(
        ["git", "apply", *options, str(patch)], cwd=checkout, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise InputError(
            f"{_short(patch)} does not apply to the release: {done.stderr.strip()}",
            consequence="its test was not run",
            remedy="make it anew with `git diff` in a checkout of this release",
        )


class Process:
    """The processes of run_test.py, without eagletwin: one for the tests that set no variable of the environment, one for those
    that set TRITON_INTERPRET, one for those of vLLM, and so on. Triton reads it when it is imported, which is before the
    test is. Each is started when its first test is run. Use as a context manager."""

    def __init__(self) -> None:
        self._processes: dict[Variables, subprocess.Popen[str]] = {}

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *_: object) -> None:
        for variables in [*self._processes]:
            self._end(variables)

    def run(self, test: Path, engine: Engine, *files: Path) -> bool:
        """Whether the test ended in time. files: see run_test.py."""
        variables = (*_set_by(test), *_OF_ENGINE.get(engine, lambda: ())())
        process = self._processes.get(variables)
        if process is None or process.poll() is not None:
            process = self._processes[variables] = _started(variables)
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps([str(test), *map(str, files)]), file=process.stdin, flush=True)
        if not select.select([process.stdout], [], [], SECONDS)[0]:
            self._end(variables)
            return False
        if not process.stdout.readline():  # it died: the next test has another one
            self._end(variables)
        return True

    def _end(self, variables: Variables) -> None:
        process = self._processes.pop(variables)
        with contextlib.suppress(ProcessLookupError):  # with the fork that may be under way
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _of_vllm() -> Variables:
    """What has vLLM imported from the cache, on a machine without a GPU, as it is with a server's accelerator."""
    paths = os.pathsep.join(str(path) for path in resolve("", "vllm").paths)
    return ("PYTHONPATH", paths), ("VLLM_TARGET_DEVICE", "cpu"), ("CUDA_VISIBLE_DEVICES", ""), ("VLLM_PLUGINS", "")


_OF_ENGINE: dict[Engine, Callable[[], Variables]] = {"vllm": _of_vllm}


def _set_by(test: Path) -> Variables:
    """The variables of the environment that a test sets before it imports the engine."""
    return tuple(
        re.findall(r"""^os\.environ\[["'](\w+)["']\] = ["'](\w*)["']""", test.read_text(encoding="utf-8"), re.MULTILINE)
    )


def _started(variables: Variables) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("EAGLETWIN_", "TRITON_INTERPRET"))}
    # On a GPU host PYTHONPATH names SGLang. A folder of it that has eagletwin is left out: a test must do without.
    paths = [
        path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path and not Path(path, "eagletwin").exists()
    ]
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths), **dict(variables)}
    command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("run_test.py"))]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, text=True, start_new_session=True, **streams)


def _run(process: Process, test: Path, engine: Engine, checkout: Path) -> dict[str, list[str]]:
    """What run_test.py says of the test."""
    result, errors = checkout / "result.json", checkout / "stderr"
    result.unlink(missing_ok=True)
    if not process.run(test, engine, checkout, result, errors):
        raise InputError(
            f"{_short(test)} did not end within {SECONDS} s",
            consequence="it shows nothing",
            remedy="let it call the one function that is wrong",
        )
    said_there = errors.read_text(encoding="utf-8", errors="replace") if errors.exists() else "its process was killed"
    if not result.exists():
        raise InputError(
            f"{_short(test)} cannot be run:\n{said_there[-2000:]}",
            consequence="it shows nothing",
            remedy=f"run it by itself; it may import {engine}, torch and the standard library",
        )
    said = json.loads(result.read_text(encoding="utf-8"))
    if not said["imported"] and not said["errors"]:
        raise InputError(
            f"{_short(test)} imports no file that the patch changes",
            consequence="the patch was not tried",
            remedy="import what is wrong from the file that the patch mends",
        )
    return said | {"output": said_there[-3000:]}


def _tally(said: dict[str, list[str]]) -> str:
    parts = [f"{kind}: {', '.join(said[kind])}" for kind in ("failures", "errors", "skipped") if said[kind]]
    return f"{said['ran']} ran; {'; '.join(parts) or 'all pass'}\n{said['output']}"


def _short(path: Path) -> str:
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
