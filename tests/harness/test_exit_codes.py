"""Which situation ends in which exit code, through the front doors, as a shell, CI or `git bisect run` sees it.

0 and 1 are verdicts: something was compared. All that keeps that from happening must end in 125 or more. What needs SGLang's
worker to run is in tests/engine/test_commands.py.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.check.repro import write_script
from eagletwin.harness.cli.main import main, run_command
from eagletwin.harness.core.errors import run_guarded
from eagletwin.harness.core.records import Ending, EngineInfo
from eagletwin.harness.core.trace import Recorder, new_header, write_trace
from eagletwin.harness.families.weights import model_pair

from ..rows import rows, spread
from .doors import ROOT, console_script, ctrl_c_works, opened, program

Done = subprocess.CompletedProcess[str]
CASE = LEDGER["25015"].case
ENGINE = EngineInfo(name="none", version="0", device="cpu", kernels="none", torch="0", triton="0")

# What can be wrong with an environment: files that stand before the installed packages.
NO_LIBRARY = b"\x7fELF but not the rest of a library"
BROKEN: dict[str, dict[str, str | bytes]] = {
    "a torch that does not load": {
        "torch/__init__.py": "from torch._C import *",
        f"torch/_C.{sys.implementation.cache_tag}-x86_64-linux-gnu.so": NO_LIBRARY,
        "torch/_C.so": NO_LIBRARY,
        "torch/_C.abi3.so": NO_LIBRARY,
    },
    "a torch whose libraries are gone": {"torch/__init__.py": "import ctypes\nctypes.CDLL('libtorch_that_is_gone.so')"},
    "no numpy": {"numpy.py": "raise ModuleNotFoundError(\"No module named 'numpy'\", name='numpy')"},
    "no msgspec": {"msgspec.py": "raise ModuleNotFoundError(\"No module named 'msgspec'\", name='msgspec')"},
    "no typer": {"typer.py": "raise ModuleNotFoundError(\"No module named 'typer'\", name='typer')"},
    "a package that fails as it is imported": {"msgspec.py": "raise ValueError('half installed')"},
    "a package that ends the process as it is imported": {"msgspec.py": "raise SystemExit(1)"},
}


def broken(folder: Path, what: str) -> Path:
    for name, content in BROKEN[what].items():
        file = folder / "broken" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder / "broken"


def by_console_script(folder: Path, path: Path) -> Done:
    trace = recorded(folder / "trace")  # `judge` needs torch, and no engine
    return opened([*console_script(), "judge", str(trace)], folder, path=path)


def by_module(folder: Path, path: Path) -> Done:
    return opened(["-m", "eagletwin", "judge", str(recorded(folder / "trace"))], folder, path=path)


def by_script(folder: Path, path: Path) -> Done:
    return opened([write_script(folder, CASE, command="")], folder, path=path)


DOORS: dict[str, Callable[[Path, Path], Done]] = {
    "eagletwin": by_console_script,
    "python -m eagletwin": by_module,
    "repro.py": by_script,
}
# repro.py works without typer, which only the command line needs
ENVIRONMENTS = [(door, what) for door in DOORS for what in BROKEN if what != "no typer" or "eagletwin" in door]


@pytest.mark.parametrize(("door", "what"), spread(ENVIRONMENTS, lambda row: row[0], lambda row: row[1]))
def test_an_environment_that_is_broken_ends_in_129_at_every_door(tmp_path: Path, door: str, what: str) -> None:
    done = DOORS[door](tmp_path, broken(tmp_path, what))
    assert done.returncode == 129, done
    assert "error: " in done.stderr
    assert not (tmp_path / "eagletwin-runs").exists()


@pytest.mark.parametrize(
    "command", [[*console_script(), "judge", "x"], ["-m", "eagletwin", "judge", "x"]], ids=["script", "-m"]
)
def test_without_any_package_the_command_line_ends_in_129_and_names_the_first(tmp_path: Path, command: list[str]) -> None:
    done = opened(["-S", *command], tmp_path, path=ROOT / "src")
    assert done.returncode == 129, done
    assert "No module named 'typer'" in done.stderr
    assert sys.executable in done.stderr


def recorded(folder: Path, ending: Ending = Ending(kind="finished"), *values: float) -> Path:  # noqa: B008  frozen
    recorder = Recorder()
    if values:
        recorder.add(CASE.requests[0].id, 0, "prefill", numbers={"end": 1}, tensors={"proposal_hidden": torch.tensor(values)})
    folder.mkdir(exist_ok=True)
    write_trace(folder, new_header(CASE, model_pair(CASE.model).digest, ENGINE, ending, recorder.records), recorder.tensors)
    return folder


CRASHED = Ending(kind="crashed", detail="it fell")
FINISHED = Ending(kind="finished")
COMPARED: dict[str, tuple[Ending, Ending, tuple[float, ...], int]] = {
    "two traces that crashed before the first record": (CRASHED, CRASHED, (), 125),
    "two traces that crashed, alike until then": (CRASHED, CRASHED, (0.5,), 125),
    "one trace that crashed, alike until then": (FINISHED, CRASHED, (0.5,), 125),
    "two traces without a record": (FINISHED, FINISHED, (), 125),
    "two traces that are alike": (FINISHED, FINISHED, (0.5,), 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", COMPARED)
def test_diff_is_0_only_where_something_was_compared_to_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    left, right, values, code = COMPARED[what]
    folders = recorded(tmp_path / "a", left, *values), recorded(tmp_path / "b", right, *values)
    assert run_guarded(lambda: run_command(["compare", *map(str, folders)])) == code
    assert ("UNKNOWN: 0 compared" in capsys.readouterr().out) == (not values)


@pytest.mark.slow
def test_options_of_an_engine_are_a_usage_error_where_diff_runs_none(tmp_path: Path) -> None:
    folders = [str(recorded(tmp_path / name, FINISHED, 0.5)) for name in "ab"]
    done = opened([*console_script(), "compare", *folders, "--tp", "2"], tmp_path)
    assert done.returncode == 128, done


WITHOUT_A_CODE = """\
from eagletwin.harness.cli.main import app
@app.command()
def nothing() -> {}:
    return {}
"""
RETURNED = {"None": 129, "True": 129, "'0'": 129, "0": 0, "1": 1, "125": 125}


@pytest.mark.parametrize("value", spread(RETURNED, lambda value: RETURNED[value]))
def test_a_command_that_returns_no_exit_code_ends_in_129(tmp_path: Path, value: str) -> None:
    done = opened(program(WITHOUT_A_CODE.format("object", value), "nothing"), tmp_path)
    assert done.returncode == RETURNED[value], done


TYPED: dict[str, tuple[list[str], int]] = {
    "help": (["--help"], 0),
    "nothing": ([], 0),
    "help of a command": (["check", "--help"], 0),
    "the version": (["--version"], 0),
    "no command": (["--"], 128),
    "an entry that this mode cannot reach": (["check", "context-end-stores"], 125),
    "the same with options that reach as little": (["check", "context-end-stores", "--dtype", "bfloat16"], 125),
    "a comparison by an entry that this mode cannot reach": (["compare", "a", "b", "--ledger", "context-end-stores"], 125),
    "a comparison with an SGLang that does not exist": (["compare", "0.5.23", "0.4.1"], 128),
    "a comparison by nothing": (["compare", "a", "b", "--cases", "0", "--ledger", "none"], 128),
    "one SGLang by an entry that this mode cannot reach": (["compare", "--ledger", "context-end-stores"], 125),
    "one SGLang by nothing": (["compare", "--ledger", "none", "--minutes", "0"], 128),
    "a search of a family that does not exist": (["compare", "--family", "gpt"], 128),
    "a base that does not exist": (["compare", "--base", "no-such-base"], 128),
    "a revision of no checkout, by the old name": (["ci", "--sglang", ".", "--base", "HEAD"], 128),
    "no entry that wheels could prove": (["prove", "--releases", "small-tree"], 125),
    "a rule that is looked for and switched off": (["bisect", "25015", "--rule", "draft.kv", "--without", "draft.kv"], 128),
    "wheels, with options that they are not run with": (["prove", "--releases", "25015", "--tp", "2"], 128),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", spread(TYPED, lambda what: TYPED[what][1]))
def test_what_is_typed_without_an_engine_ends_in_its_code(tmp_path: Path, what: str) -> None:
    words, code = TYPED[what]
    done = opened([*console_script(), *words], tmp_path)
    assert done.returncode == code, done
    assert "this is a bug" not in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("what", TYPED)
def test_the_command_line_returns_the_code_of_what_is_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    words, code = TYPED[what]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["eagletwin", *words])
    assert main() == code
    assert "this is a bug" not in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_stderr_that_nothing_reads_does_not_make_an_error_a_divergence(tmp_path: Path) -> None:
    """What prints the reason fails there; Python's own code for that is 1."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-P", *console_script(), "check", "nothing.json"]
    done = subprocess.run(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=writer, check=False)
    os.close(writer)
    assert done.returncode >= 128, done


PRINTS = """\
from eagletwin.harness.cli.main import app
@app.command()
def prints() -> int:
    for _ in range(100_000):
        print("line")
    return 0
"""


CLEANS_UP = """\
import signal
from eagletwin.harness.cli.main import app
@app.command()
def cleans() -> int:
    try:
        print("ready", flush=True)
        while True:
            signal.pause()
    finally:
        print("cleaning up", flush=True)
        input()
        print("what was found", flush=True)
    return 0
"""


@pytest.mark.parametrize("number", rows([signal.SIGTERM, signal.SIGINT, signal.SIGHUP]))
def test_a_signal_ends_every_command_in_130_and_a_second_one_loses_nothing(number: signal.Signals) -> None:
    process = subprocess.Popen(
        [sys.executable, "-P", *program(CLEANS_UP, "cleans")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: [signal.signal(one, signal.SIG_DFL) for one in (signal.SIGINT, number)] and None,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert process.stdout.readline() == "cleaning up\n"
    for second in (number, signal.SIGINT):
        process.send_signal(second)
        assert process.stderr.readline() == "it is ending already: what was found is being kept\n"
    told, said = process.communicate("go on\n")
    assert told == "what was found\n"
    assert said.startswith("interrupted: ")
    assert process.returncode == 130


DROPS = """\
import signal, time, weakref
from eagletwin.harness.cli.main import app
arm = signal.setitimer
def held_up(*args) -> None:
    signal.setitimer = arm
    arm(*args)
    time.sleep(SECONDS)
signal.setitimer = held_up
@app.command()
def drops() -> int:
    class Module: ...
    module = Module()
    seen = weakref.ref(module, lambda _: signal.raise_signal(signal.SIGINT))
    del module
    time.sleep(60)
    return 0
"""


@pytest.mark.parametrize("seconds", [0, 0.1])
def test_a_signal_that_comes_in_a_callback_is_not_lost(seconds: float) -> None:
    """Python drops what a callback raises. Each import has one, so that Ctrl-C in a command's first second could do nothing.

    Nor is it where the process is held up in the hook that Python calls then, until it is raised again.
    """
    command = [sys.executable, "-P", *program(DROPS.replace("SECONDS", str(seconds)), "drops")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=50, preexec_fn=ctrl_c_works)
    assert done.returncode == 130
    assert done.stderr.startswith("interrupted: ")


def test_a_reader_that_has_seen_enough_is_no_error_and_no_verdict() -> None:
    """As behind `| head -1`: the code is what a shell shows of any program that a closed pipe ended."""
    command = [sys.executable, "-P", *program(PRINTS, "prints")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == "line\n"
        process.stdout.close()
        assert process.stderr.read() == ""
    assert process.returncode == 141


def test_a_help_that_nothing_reads_is_no_error(tmp_path: Path) -> None:
    """As behind `| head`. rich prints it, and ends the process in its own way."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-P", *console_script(), "fuzz", "--help"]
    done = subprocess.run(command, cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_another_pipe_that_breaks_is_an_error(tmp_path: Path) -> None:
    command = (
        "from eagletwin.harness.cli.main import app\n@app.command()\ndef falls() -> int:\n    raise BrokenPipeError(32, 'x')\n"
    )
    done = opened(program(command, "falls"), tmp_path)
    assert done.returncode == 129, done
    assert "error: " in done.stderr


@pytest.mark.long
@pytest.mark.slow
def test_a_stdout_that_the_shell_closed_changes_no_verdict(tmp_path: Path) -> None:
    trace = recorded(tmp_path / "trace", FINISHED, 0.5)
    code = "import os, sys\nos.close(1)\nos.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
    done = opened(["-c", code, "-P", *console_script(), "judge", trace], tmp_path)
    assert done.returncode == 125, done  # the trace is not complete
    assert "this is a bug" not in done.stderr


OPERATING_SYSTEM = {
    "No space left": ("OSError(errno.ENOSPC, 'No space left', 'file')", "look at the permissions and the free space"),
    "a program that is missing": ("FileNotFoundError(errno.ENOENT, 'No such file', 'git')", "see that git exists"),
    "a connection": ("ConnectionRefusedError(errno.ECONNREFUSED, 'Connection refused')", "look at what the message names"),
}


@pytest.mark.parametrize("what", rows(OPERATING_SYSTEM))
def test_an_error_of_the_operating_system_gets_the_advice_that_fits_it(tmp_path: Path, what: str) -> None:
    error, advice = OPERATING_SYSTEM[what]
    command = (
        f"import errno\nfrom eagletwin.harness.cli.main import app\n@app.command()\ndef falls() -> int:\n    raise {error}\n"
    )
    done = opened(program(command, "falls"), tmp_path)
    assert done.returncode == 129, done
    assert advice in done.stderr


def test_a_release_that_cannot_be_fetched_is_an_error_of_the_machine(tmp_path: Path) -> None:
    done = opened([*console_script(), "check", "25015", "--sglang", "0.5.9"], tmp_path, **no_network(tmp_path))
    assert done.returncode == 129, done
    assert "0.5.9 could not be fetched" in done.stderr


def no_network(folder: Path) -> dict[str, str]:
    """An empty cache, and a pip that has nowhere to look."""
    return {"EAGLETWIN_CACHE": str(folder / "cache"), "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
