"""The front doors as a user opens them, each a process of its own: for tests of what they end with."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from . import imported

ROOT = Path(__file__).parents[2]


def opened(
    command: Sequence[str | Path], cwd: Path, *, path: Path | None = None, **env: str
) -> subprocess.CompletedProcess[str]:
    """Run a command. path: a folder whose modules stand before the installed ones."""
    if path is None:
        return imported.run([str(word) for word in command], cwd, {**os.environ, **env})
    environment = {**os.environ, "PYTHONPATH": str(path), **env}
    return subprocess.run(
        [sys.executable, "-P", *map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def console_script() -> list[str]:
    """The script that pip writes for [project.scripts], as an argument of Python's."""
    section = (ROOT / "pyproject.toml").read_text().partition("[project.scripts]")[2]
    found = re.search(r'^eagletwin = "([\w.]+):(\w+)"$', section, re.MULTILINE)
    assert found, "pyproject.toml names no console script"
    module, name = found.groups()
    return ["-c", f"import sys\nfrom {module} import {name}\nsys.argv[0] = 'eagletwin'\nsys.exit({name}())"]


def program(setup: str, *arguments: str) -> list[str]:
    """The command line, in a process where these statements have run: it is what stands behind every door."""
    typed = f"import sys\nsys.argv = {['eagletwin', *arguments]!r}\n"
    return ["-c", f"{typed}{setup}\nfrom eagletwin.harness.cli.main import main\nsys.exit(main())"]


def ctrl_c_works() -> None:
    """For `preexec_fn`: not so where the tests run in the background of a shell, which hands on "ignore"."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
