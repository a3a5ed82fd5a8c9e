"""`eagletwin kernels`, in a process forked from one that has imported all it needs."""

import contextlib
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO
from unittest.mock import patch

import pytest

from eagletwin.harness.commands.kernels import results
from eagletwin.harness.commands.kernels.properties import ALL, FUNCTIONS
from eagletwin.harness.core.files import RUN_MODULE
from eagletwin.harness.core.run_spec import CPU
from eagletwin.harness.engines.source import INSTALLED
from eagletwin.harness.engines.start import _environment

from ..engine.warm import eagletwin
from ..harness.imported import Imported

# The process of `eagletwin kernels` as a fork of one that has imported what SGLang imports of others.
#
# That costs a process of its own five seconds of a core, and SGLang itself one or two.

_OTHERS = (
    *("torch", "hypothesis", "msgspec", "transformers.models.auto", "transformers.processing_utils", "triton.language"),
    *("torch.distributed", "torch.multiprocessing", "torch.profiler", "PIL.Image", "einops", "orjson", "pybase64", "pydantic"),
    *("requests", "sentencepiece", "tiktoken", "zmq.asyncio"),
)
_server = Imported(*_OTHERS, environment=_environment(INSTALLED, CPU))

# What Python does with these variables when it starts.
_AS_STARTED = """
import importlib, os, runpy, sys
sys.path[:0] = [path for path in os.environ["PYTHONPATH"].split(os.pathsep) if path]
sys.pycache_prefix = os.environ["PYTHONPYCACHEPREFIX"]
importlib.invalidate_caches()
sys.argv = {words!r}
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


class Forked:
    """As subprocess.Popen, of a module of eagletwin's."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        pass_fds: Sequence[int],
        env: Mapping[str, str],
        stdin: int,
        stdout: IO[bytes],
        stderr: IO[bytes],
    ) -> None:
        assert (tuple(command[: len(RUN_MODULE)]), stdin) == (RUN_MODULE, subprocess.DEVNULL)
        program = _AS_STARTED.format(words=[*command[len(RUN_MODULE) :]])
        streams = (stdout.fileno(), stderr.fileno())
        self._process = _server.start(["-c", program], os.getcwd(), env, *streams, handed=pass_fds)
        self._code: int | None = None

    def kill(self) -> None:
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self._process, signal.SIGKILL)

    def wait(self) -> int:
        if self._code is None:
            self._code = _server.ended()
        return self._code


# `eagletwin kernels` through its front door: which SGLang runs, exit codes, what is printed.

EAGLE = "sglang/kernels/ops/speculative/eagle.py"
KERNEL = "sglang.kernels.ops.speculative.eagle._draft_extend_inputs_kernel"
INPUTS = "draft extend gets its inputs"
ROOT = Path(__file__).parents[2]

# name of a tree -> (text of eagle.py, what is there instead, how often)
TREES = {
    "unchanged": ("", "", 0),
    "wrong": ("offset * WIDTH + accepted - 1", "offset * WIDTH + accepted", 1),
    "renamed": ("prepare_draft_extend_inputs", "prepare_draft_extend_inputs_of_a_batch", -1),
    "a syntax error": ("def _draft_extend_inputs_kernel", "def def _draft_extend_inputs_kernel", 1),
}


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the installed SGLang, hard-linked but for the file that tests edit."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or spec.origin is None:
        pytest.skip("sglang is not installed")
    site, folder = Path(spec.origin).parents[1], tmp_path_factory.mktemp("tree")
    for part in ("sglang", next(site.glob("sglang-*.dist-info")).name):
        shutil.copytree(site / part, folder / part, copy_function=link, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / EAGLE).unlink()
    shutil.copyfile(site / EAGLE, folder / "original.py")
    return folder


@pytest.fixture
def tree(copied: Path, request: pytest.FixtureRequest) -> Path:
    """The copy with the edit of TREES that the test names."""
    old, new, times = TREES[request.param]
    text = (copied / "original.py").read_text()
    assert old in text
    (copied / EAGLE).write_text(text.replace(old, new, times))
    return copied


def on(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("tree", [name], indirect=True)


def link(source: str, target: str) -> str:
    try:
        Path(target).hardlink_to(source)
    except OSError:
        shutil.copy2(source, target)
    return target


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command in this process; SGLang is imported in one of its own, as ever, which is a fork."""
    with patch.object(results, "subprocess", SimpleNamespace(Popen=Forked, DEVNULL=subprocess.DEVNULL)):
        return eagletwin("kernels", *arguments, cwd=ROOT)


@on("unchanged")
def test_an_unchanged_copy_is_equal_and_the_header_names_its_file(tree: Path) -> None:
    done = run("_draft_extend_inputs_kernel", "--sglang", str(tree))
    assert done.returncode == 0, done
    assert done.stdout.splitlines()[0].endswith(f"  {tree}/sglang/__init__.py")
    assert re.search(rf"^EQUAL +{INPUTS} +120 examples, 1 of 1 planted fault caught$", done.stdout, re.MULTILINE)
    assert done.stdout.splitlines()[-1] == "EQUAL  1 of 1 function compared"


@on("wrong")
def test_a_wrong_function_of_a_tree_diverges_with_the_smallest_case(tree: Path) -> None:
    done = run(INPUTS, "--sglang", str(tree))
    assert done.returncode == 1, done
    report = done.stdout[done.stdout.index(f"DIVERGED  {INPUTS}") :]
    assert "sglang.kernels.ops.speculative.eagle._draft_extend_inputs_kernel" in report
    assert "output   select_index at [0]" in report
    assert "expected [1]" in report
    assert "actual   [2]" in report
    assert "case     Verified(batch=Batch(topk=1, num_steps=1, nodes=2," in report
    assert f"again    eagletwin kernels '{INPUTS}' --sglang {tree}" in report


@pytest.mark.long
@on("wrong")
def test_pytest_runs_the_tree_that_is_named_and_says_where_it_lies(tree: Path) -> None:
    words = ["-m", "pytest", "tests/kernels/test_properties.py", "-n", "0", "-k", "gets and its and inputs"]
    command = [sys.executable, *words, "--eagletwin-sglang", str(tree)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout
    assert f"({tree}/sglang/__init__.py)" in done.stdout
    assert "select_index at [0]: expected [1], actual [2]" in done.stdout


def test_a_process_that_has_imported_another_sglang_refuses(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom eagletwin.harness.engines import source\n"
        "one, other = map(source.resolve, sys.argv[1:])\nsource.use(one)\n"
        "import sglang\nsource.use(one)\nsource.use(other)\n"
    )
    for name in ("one", "other"):
        (tmp_path / name / "sglang").mkdir(parents=True)
        (tmp_path / name / "sglang/__init__.py").write_text(f"called = {name!r}\n")
    command = [sys.executable, "-c", program, str(tmp_path / "one"), str(tmp_path / "other")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"already imported the SGLang in {tmp_path}/one/sglang/__init__.py" in done.stderr


@on("renamed")
def test_a_named_function_that_is_not_in_this_sglang_is_unknown(tree: Path) -> None:
    done = run("prepare_draft_extend_inputs", "--sglang", str(tree))
    assert done.returncode == 125, done
    assert "this SGLang has no sglang.kernels.ops.speculative.eagle.prepare_draft_extend_inputs" in done.stdout
    assert done.stdout.splitlines()[-1] == "UNKNOWN  0 of 1 function compared"


@on("wrong")
def test_a_change_that_no_property_runs_is_unknown(tree: Path) -> None:
    done = run("ids rotate", "--sglang", str(tree), "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["exit_code"], report["status"]) == (125, 125, "unknown")
    assert [(of["property"], of["status"]) for of in report["outcomes"]] == [("ids rotate", "equal")]
    assert report["imported"]["file"] == f"{tree}/sglang/__init__.py"
    assert report["differs"]["functions"] == [KERNEL]
    assert report["differs"]["ran"] == []


@on("a syntax error")
def test_a_module_that_does_not_import_is_unknown(tree: Path) -> None:
    done = run(INPUTS, "--sglang", str(tree))
    assert done.returncode == 125, done
    assert "SyntaxError" in done.stdout


def test_an_sglang_that_does_not_import_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang/__init__.py").write_text("raise RuntimeError('no')\n")
    done = run("--sglang", str(tmp_path))
    assert done.returncode == 125, done
    assert done.stdout.splitlines()[-1] == "UNKNOWN  SGLang would not import: RuntimeError: no"


def test_time_that_is_up_is_unknown() -> None:
    done = run(INPUTS, "--timeout", "0.1", "--examples", "100000")
    assert done.returncode == 125, done
    assert done.stdout.splitlines()[-1] == f"UNKNOWN  no answer within 0.1 s while '{INPUTS}' ran"


def test_an_unknown_name_is_a_usage_error_before_anything_is_fetched() -> None:
    done = run("prepare_draft_extend_input", "--sglang", "0.5.10")
    assert done.returncode == 128, done
    assert "'prepare_draft_extend_input' is neither a function of the kernel tier nor a property" in done.stderr
    assert "prepare_draft_extend_inputs" in done.stderr.partition("try: ")[2]
    assert "importing" not in done.stderr


def test_the_list_names_every_function_without_an_sglang() -> None:
    done = run("--list", "--json")
    assert done.returncode == 0, done
    rows = json.loads(done.stdout)
    assert [row["function"] for row in rows] == list(FUNCTIONS)
    assert all(row["planted_faults"] and row["properties"] for row in rows)
    assert {name for row in rows for name in row["properties"]} == {of.name for of in ALL}
    assert run("--list", "--sglang", "0.5.22").returncode == 128


@pytest.mark.long
@on("renamed")
def test_support_says_where_each_function_is_and_why_one_cannot_be_called(tree: Path) -> None:
    done = run("--support", "--sglang", str(tree))
    assert done.returncode == 0, done
    lines = done.stdout.splitlines()
    assert lines[0].endswith(f"{tree}/sglang/__init__.py")
    assert sum(line.startswith("yes  ") for line in lines) == len(FUNCTIONS) - 2
    kernel = lines.index("no   sglang.kernels.ops.speculative.eagle._draft_extend_inputs_kernel")
    assert lines[kernel + 1].strip().startswith(f"{INPUTS}: this SGLang has no ")
