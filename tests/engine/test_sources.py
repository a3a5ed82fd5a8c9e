"""Another SGLang than the installed one: a source tree as it is, by its own name in traces, scripts and comparisons."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.case import pretty_case
from eagletwin.harness.core.environment import installed
from eagletwin.harness.engines.source import INSTALLED, resolve

from . import forked
from .warm import eagletwin

RELEASE = installed("sglang")
PLACE, RIGHT, WRONG = "srt/speculative/eagle_worker_v2.py", "forward_batch.positions.add_(1)", "forward_batch.positions.add_(2)"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The installed release as a repository, and in its work tree draft decode that moves on two positions a step."""
    root = tmp_path_factory.mktemp("checkout")
    package = INSTALLED.root / "sglang"
    left_out = shutil.ignore_patterns("__pycache__", "multimodal_gen", "*.so")
    shutil.copytree(package, root / "python" / "sglang", ignore=left_out)
    for words in (
        ["init", "-q"],
        ["config", "core.compression", "0"],  # packing all of it takes three times what the rest takes
        ["add", "-A"],
        ["-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "-qm", "one"],
    ):
        subprocess.run(["git", "-C", root, *words], check=True)
    worker = root / "python" / "sglang" / PLACE
    text = worker.read_text()
    assert text.count(RIGHT) >= 2
    worker.write_text(text.replace(RIGHT, WRONG))
    return root


@pytest.mark.long
def test_a_changed_checkout_is_run_as_it_is_and_distinguished_from_its_base(checkout: Path, tmp_path: Path) -> None:
    head = ["git", "-C", str(checkout), "rev-parse", "--short=10", "HEAD"]
    commit = subprocess.check_output(head, text=True).strip()
    name = resolve(str(checkout)).version
    assert re.fullmatch(rf"{commit}\+dirty\.[0-9a-f]{{8}}", name)
    case = tmp_path / "case.json"
    case.write_text(pretty_case(replace(LEDGER["25015"].case, name="three-steps", num_steps=3)))

    red = eagletwin("check", case, "--sglang", checkout, cwd=tmp_path)
    assert red.returncode == 1, red
    assert f"DIVERGED  three-steps on SGLang {name} (cpu)" in red.stdout
    assert "draft.positions" in red.stdout

    compared = eagletwin("compare", RELEASE, checkout, "--case", case, cwd=tmp_path)
    assert compared.returncode == 1, compared
    assert f"three-steps runs on SGLang {RELEASE} (left) and on {checkout} (right); both" in compared.stderr
    assert compared.stdout.startswith(f"left:  SGLang {RELEASE}: equal")
    assert f"\nright: SGLang {name}: diverged draft.positions" in compared.stdout
    assert "\nDIFFERENT: " in compared.stdout

    script = tmp_path / "eagletwin-runs" / "three-steps" / "repro.py"
    assert f"sglang {name} in {checkout}" in script.read_text()
    subprocess.run(["git", "-C", checkout, "checkout", "-q", "."], check=True)
    refused = forked.script(script, cwd=tmp_path)
    assert refused.returncode == 128, refused
    assert f"this case was made on SGLang {name}, and {checkout} is now at {commit}\n" in refused.stderr
    assert forked.script(script, "--sglang", checkout, cwd=tmp_path, source=resolve(str(checkout))).returncode == 0


def test_a_tree_that_does_not_import_is_unknown_and_the_line_is_named(tmp_path: Path) -> None:
    file = tmp_path / "tree" / "python" / "sglang" / "__init__.py"
    file.parent.mkdir(parents=True)
    file.write_text("import sys\n\ndef (:\n")
    done = eagletwin("fuzz", "--sglang", tmp_path / "tree", "--cases", "1", cwd=tmp_path)
    assert done.returncode == 125, done
    assert done.stdout.startswith("UNKNOWN\n\n  SGLang cannot be imported: SyntaxError: ")
    log = Path("eagletwin-runs") / "fuzz-0" / "import.log"
    assert f"try: look at {file}:3; the whole message is in {log}\n" in done.stdout
    assert "SyntaxError" in (tmp_path / log).read_text()
    assert "doctor" not in done.stdout
    assert "NOTHING LOOKED AT" in done.stdout


@pytest.mark.long
def test_a_commit_that_changes_neither_size_nor_time_of_a_file_is_run(checkout: Path, tmp_path: Path) -> None:
    """Python would take the bytecode of the commit before."""
    subprocess.run(["git", "-C", checkout, "checkout", "-q", "."], check=True)
    case, worker = tmp_path / "case.json", checkout / "python" / "sglang" / PLACE
    case.write_text(pretty_case(replace(LEDGER["25015"].case, name="three-steps", num_steps=3)))
    assert eagletwin("check", case, "--sglang", checkout, cwd=tmp_path).returncode == 0
    state = worker.stat()
    worker.write_text(worker.read_text().replace(RIGHT, WRONG))
    os.utime(worker, ns=(state.st_atime_ns, state.st_mtime_ns))
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "-C", checkout, *who, "commit", "-qam", "two"], check=True)
    assert "+dirty" not in resolve(str(checkout)).version
    done = eagletwin("check", case, "--sglang", checkout, cwd=tmp_path)
    assert done.returncode == 1, done
    assert "draft.positions" in done.stdout
