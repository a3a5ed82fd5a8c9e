"""What fast commands print and end with, without what differs from one machine, folder or minute to the next."""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

VERBS = (
    *("acceptance", "bisect", "check", "compare", "fuzz", "judge"),
    *("info", "kernels", "prove", "record"),
)
COMMANDS = (
    "--help",
    *(f"{verb} --help" for verb in VERBS),
    "info ledger --json",
    "info rules --json",
    "info models --json",
    "info releases list --json",
    "kernels --list --json",
    "check 25015 --json",
    "check 25015 --revert 25015 --json",
    "judge RUN/pr-25015 --json",
    "judge RUN/pr-25015-2 --json",
    "compare RUN/pr-25015 RUN/pr-25015-2 --json",
    "check row-overflow --remedy row-overflow --json",
    "prove 25015 --json",
    "fuzz --cases 4 -n 1 --json",
    "check absent.json --json",
    "check absent",
    "check 25015 --revert absent --json",
    "check 25015 --patch absent.json --json",
    "check 25015 --remedy 25015 --json",
    "check 25015 --sglang 0.0.1 --json",
    "check",
    "absent",
    "prove absent --json",
    "prove prefill-graph --json",
    "fuzz --only topk=2 --only rejection --json",
    "judge absent --json",
    "bisect 25015 --features --json",
)
VOLATILE = ("seconds", "shrink_seconds", "headroom", "sha256", "again", "command", "version")


def lines(verbs: tuple[str, ...] = COMMANDS) -> Iterator[dict[str, Any]]:
    """One of each command, in an empty folder."""
    with tempfile.TemporaryDirectory(prefix="golden-") as folder:
        environment = {**os.environ, "COLUMNS": "100", "NO_COLOR": "1", "TERM": "dumb"}
        for command in verbs:
            words = command.replace("RUN", "eagletwin-runs").split()
            call = [sys.executable, "-P", "-m", "eagletwin", *words]
            done = subprocess.run(call, cwd=folder, env=environment, capture_output=True, text=True, check=False)
            said = {"exit": done.returncode, "stdout": stable(done.stdout, folder)}
            if isinstance(said["stdout"], str):  # beside JSON it is for people, and has progress, which depends on the time
                said["stderr"] = stable(done.stderr, folder)
            yield {"id": f"command/{command}", "verdict": said}


def stable(printed: str, folder: str) -> Any:
    """JSON without what differs from run to run, or a text without numbers that do."""
    try:
        return _values(json.loads(printed), folder)
    except ValueError:
        return _words(printed, folder)


def _values(value: Any, folder: str) -> Any:
    if isinstance(value, dict):
        return {name: "VOLATILE" if name in VOLATILE else _values(inner, folder) for name, inner in value.items()}
    if isinstance(value, list):
        return [_values(inner, folder) for inner in value]
    return _words(value, folder) if isinstance(value, str) else value


def _words(printed: str, folder: str) -> str:
    text = printed.replace(folder, "FOLDER").replace(str(Path(__file__).parents[2]), "ROOT").replace(sys.prefix, "PREFIX")
    return re.sub(r"/\S*/site-packages|/root\S*|/tmp/\S*", "PATH", re.sub(r"\d+\.\d+ (s\b|of its bound)", r"N \1", text))
