"""pytest in a fork of the tests' own process, which has imported what a session imports, SGLang included (warm.py).

A process of its own costs a few seconds of processor time before its first case; a fork of this one costs none of them. All
else is as there: arguments, exit code, what is printed, and nothing that it sets is left behind. What starts workers (`-n`), or
asks what is imported, needs a process of its own: `runpytest_subprocess`.
"""

import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import IO

import pytest

from eagletwin.harness.engines.source import INSTALLED, Source

from . import warm

SECONDS = 300.0


def session(folder: Path, *words: str, source: Source = INSTALLED) -> pytest.RunResult:
    """Run pytest in a folder. source: the SGLang that it is going to use."""
    warm.have(source)
    begun = time.monotonic()
    with tempfile.TemporaryFile("w+b") as out, tempfile.TemporaryFile("w+b") as errors:
        process = multiprocessing.get_context("fork").Process(target=_main, args=(folder, words, out, errors))
        process.start()
        process.join(SECONDS)
        if process.exitcode is None:
            process.kill()
            process.join()
        said = [_lines(file) for file in (out, errors)]
        sys.stdout.write("\n".join(said[0]))  # shown if the test fails
        sys.stderr.write("\n".join(said[1]))
        code = process.exitcode
        assert code is not None
        return pytest.RunResult(pytest.ExitCode(code) if 0 <= code <= 5 else code, *said, time.monotonic() - begun)


def _main(folder: Path, words: tuple[str, ...], out: IO[bytes], errors: IO[bytes]) -> None:
    for number, file in ((1, out), (2, errors)):
        os.dup2(file.fileno(), number)
    # pytest's capture of the outer session is left alone
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", encoding="utf-8", closefd=False)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", encoding="utf-8", closefd=False)  # type: ignore[misc]
    sys.argv = ["pytest", *words]
    os.chdir(folder)
    warnings.resetwarnings()
    warm.inherit()
    with warm.keeping():
        code = pytest.main([*words])
    warm.close_own()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(int(code))


def _lines(file: IO[bytes]) -> list[str]:
    file.seek(0)
    return file.read().decode(errors="replace").splitlines()
