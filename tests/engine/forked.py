"""pytest, and programs, in a fork of the tests' own process, which has imported what they import, SGLang included (warm.py).

A process of its own costs a few seconds of processor time before its first case; a fork of this one costs none of them. All
else is as there: arguments, exit code, what is printed, and nothing that it sets is left behind. What starts workers (`-n`), or
asks what is imported, needs a process of its own: `runpytest_subprocess`.
"""

import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from eagletwin.harness.engines.source import INSTALLED, Source

from ..harness.imported import ended
from . import warm

SECONDS = 300.0


def session(folder: Path, *words: str, source: Source = INSTALLED) -> pytest.RunResult:
    """Run pytest in a folder. source: the SGLang that it is going to use."""
    warm.have(source)
    begun = time.monotonic()
    code, *said = _forked(folder, ["pytest", *words], lambda: int(pytest.main([*words])))
    lines = [text.splitlines() for text in said]
    return pytest.RunResult(pytest.ExitCode(code) if 0 <= code <= 5 else code, *lines, time.monotonic() - begun)


def script(file: Path, *words: str | Path, cwd: Path, source: Source | None = None) -> subprocess.CompletedProcess[str]:
    """`python FILE WORD…`. source: the SGLang that it is going to use, if no command has just used it."""
    if source is not None:
        warm.have(source)
    typed = [str(file), *map(str, words)]
    return subprocess.CompletedProcess(
        typed, *_forked(cwd, typed, lambda: ended(lambda: runpy.run_path(str(file), None, "__main__")))
    )


def program(code: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """`python -c CODE`, with these environment variables, on the installed SGLang."""
    warm.have(INSTALLED)

    def act() -> int:
        os.environ.update(env)
        return ended(lambda: exec(code, {"__name__": "__main__"}))

    return subprocess.CompletedProcess(["-c", code], *_forked(cwd, ["-c"], act))


def _forked(folder: Path, typed: list[str], act: Callable[[], int]) -> tuple[int, str, str]:
    """The exit code of a fork that does this, what it printed, and what it said on stderr."""
    with tempfile.TemporaryFile("w+b") as out, tempfile.TemporaryFile("w+b") as errors:
        process = multiprocessing.get_context("fork").Process(target=_main, args=(folder, typed, act, out, errors))
        process.start()
        process.join(SECONDS)
        if process.exitcode is None:
            process.kill()
            process.join()
        told, said = _text(out), _text(errors)
        sys.stdout.write(told)  # shown if the test fails
        sys.stderr.write(said)
        assert process.exitcode is not None
        return process.exitcode, told, said


def _main(folder: Path, typed: list[str], act: Callable[[], int], out: IO[bytes], errors: IO[bytes]) -> None:
    for number, file in ((1, out), (2, errors)):
        os.dup2(file.fileno(), number)
    # pytest's capture of the outer session is left alone
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", encoding="utf-8", closefd=False)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", encoding="utf-8", closefd=False)  # type: ignore[misc]
    sys.argv = typed
    os.chdir(folder)
    warnings.resetwarnings()
    warm.inherit()
    with warm.keeping():
        code = act()
    warm.close_own()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")
