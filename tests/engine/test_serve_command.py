"""`python -m tests.lab serve` as a person runs it: until it is asked to end, or its scheduler dies; nothing of it is left."""

import os
import shlex
import signal
import subprocess
import tempfile
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

import psutil
import pytest

from eagletwin.harness.core.errors import InputError
from eagletwin.harness.families.store import checkpoints

from ..harness.doors import ctrl_c_works
from ..lab.__main__ import run
from ..lab.common import ROOT, module

COMMAND = module("tests.lab", "serve")


def ended(how: Callable[[psutil.Process, list[psutil.Process]], None], said: Path) -> tuple[int, str]:
    """Start a server, see that it answers, end it so: its exit code, and what it said. Nothing may be left of it."""
    with tempfile.TemporaryDirectory() as scratch, said.open("w") as errors:
        code = _ended(how, scratch, errors)
        assert not os.listdir(scratch)
    return code, said.read_text()


def _ended(how: Callable[[psutil.Process, list[psutil.Process]], None], scratch: str, errors: TextIO) -> int:
    process = subprocess.Popen(
        [*COMMAND, "--model", "llama-tiny", "--revert", "25015"],
        cwd=ROOT,
        env={**os.environ, "TMPDIR": scratch},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        # where these tests run in the background, Ctrl-C is ignored, and what they start inherits that
        preexec_fn=ctrl_c_works,
    )
    assert process.stdout is not None
    with process, process.stdout:
        try:
            ready = process.stdout.readline().split()
            assert ready[:1] == ["ready"]
            with urllib.request.urlopen(f"{ready[1]}/health", timeout=60) as answer:
                assert answer.status == 200
            command = psutil.Process(process.pid)
            tree = command.children(recursive=True)
            how(command, tree)
            code = process.wait(120)
        finally:
            process.kill()
    assert not [one for one in tree if one.is_running()]
    return code


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_all_of_it_with_130(tmp_path: Path, number: signal.Signals) -> None:
    code, said = ended(lambda command, _: command.send_signal(number), tmp_path / "said")
    assert code == 130, said
    assert "this server is SGLang's own but for:" in said
    target, draft = map(str, checkpoints("llama-tiny"))
    assert f"llama-tiny is --target {shlex.quote(target)} --draft {shlex.quote(draft)}\n" in said
    assert said.splitlines()[-1] == "the server was ended"


@pytest.mark.long
@pytest.mark.slow
def test_a_scheduler_that_dies_ends_all_of_it_with_125_and_the_cause(tmp_path: Path) -> None:
    def kill_scheduler(_: psutil.Process, tree: list[psutil.Process]) -> None:
        (scheduler,) = (one for one in tree if one.name() == "sglang::scheduler")
        scheduler.kill()

    code, said = ended(kill_scheduler, tmp_path / "said")
    assert code == 125, said
    assert "error: the server ended: scheduler_0 was killed by SIGKILL\n  so:  " in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "a server has a target and a draft"),
        (("--model", "none"), "there is no such recipe"),
        (("--model", "llama-tiny", "--draft", "."), "a server has a target and a draft"),
        (("--target", ".", "--draft", "."), "holds no config.json"),
        (("--model", "llama-tiny", "--topk", "2"), "without --num-draft-tokens"),
        (("--model", "llama-tiny", "--", "--port", "7"), "give --port before the `--`"),
        (("--model", "llama-tiny", "--revert", "1"), "the ledger has no entry"),
    ],
)
def test_a_server_that_cannot_be_asked_for_is_128(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        run(["serve", *arguments])
    assert error.value.exit_code == 128
