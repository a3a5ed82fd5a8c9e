"""The commands that people type, on the real engine, with their exit codes; and a second judge that never sees SGLang."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from eagletwin.harness.core.patch import Edit, Patch

from ..harness.doors import ctrl_c_works, opened
from ..rows import long
from .warm import eagletwin


def in_a_process(*arguments: str, cwd: Path, path: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    return opened(["-m", "eagletwin", *arguments], cwd, path=path, **env)


@pytest.mark.parametrize(
    ("entry", "rule"),
    [*long(("25015", "draft.positions")), ("26329", "draft.input_ids")],
)
def test_check_is_0_with_the_fix_and_1_without_it(tmp_path: Path, entry: str, rule: str) -> None:
    assert eagletwin("check", entry, cwd=tmp_path).returncode == 0
    red = eagletwin("check", entry, "--revert", entry, cwd=tmp_path)
    assert red.returncode == 1
    assert rule in red.stdout
    folder = tmp_path / red.stdout.rpartition("folder: ")[2].strip()
    # the case file alone repeats it; its trace is judged the same again, by a process in which SGLang cannot be imported
    assert eagletwin("check", str(folder / "case.json"), "--revert", entry, cwd=tmp_path).returncode == 1
    (tmp_path / "sglang.py").write_text("raise ImportError('the judge must not import SGLang')")
    (tmp_path / "triton.py").write_text("raise ImportError('the judge must not import Triton')")
    again = in_a_process("judge", str(folder), cwd=tmp_path, path=tmp_path)
    assert again.returncode == 1, again
    assert red.stdout.split("\n\n")[1] == again.stdout.split("\n\n")[1]


def test_a_fix_whose_lines_a_case_does_not_run_says_nothing_of_it(tmp_path: Path) -> None:
    """A round of one draft step ends before the line that the fix of #25015 is about; its function is called."""
    done = eagletwin("check", "26329", "--revert", "25015", cwd=tmp_path)
    assert done.returncode == 125, done
    assert "none of its changed statements ran: sglang/srt/speculative/eagle_worker_v2.py:" in " ".join(done.stdout.split())


@pytest.mark.long
def test_prove_prints_both_proofs_and_exits_0(tmp_path: Path) -> None:
    done = eagletwin("prove", "25015", "26329", cwd=tmp_path)
    assert done.returncode == 0, done
    assert "2 of 2 proven" in done.stdout
    assert done.stdout.count("DIVERGED") == 2


def test_diff_of_two_runs_is_identical(tmp_path: Path) -> None:
    for _ in range(2):
        eagletwin("check", "26329", cwd=tmp_path)
    done = eagletwin("compare", "eagletwin-runs/pr-26329", "eagletwin-runs/pr-26329-2", cwd=tmp_path)
    assert done.returncode == 0, done
    assert "identical" in done.stdout


def test_a_configuration_that_sglang_refuses_is_unknown_with_its_message(tmp_path: Path) -> None:
    patch = tmp_path / "refuse.json"
    patch.write_text(
        '{"name": "refuse", "edits": [{"target": "sglang.srt.managers.scheduler.Scheduler.init_ipc_channels", '
        '"match": "is_rank_zero = (", "replacement": "raise ValueError(\'no such configuration\')\\nis_rank_zero = ("}]}'
    )
    done = eagletwin("check", "25015", "--patch", str(patch), cwd=tmp_path)
    assert done.returncode == 125, done
    assert "SGLang does not run this configuration: ValueError: no such configuration" in done.stdout


def test_a_configuration_that_sglang_changes_by_itself_is_unknown_and_says_what_it_changed(tmp_path: Path) -> None:
    request = {"id": "a", "prompt": [1, 2], "max_new_tokens": 4}
    case = {"name": "wide-chain", "model": "llama-tiny", "num_steps": 3, "num_draft_tokens": 10, "requests": [request]}
    (tmp_path / "case.json").write_text(json.dumps(case))
    done = eagletwin("check", "case.json", cwd=tmp_path)
    assert done.returncode == 125, done
    assert "it changes num_draft_tokens from 10 to 4 without being asked" in done.stdout


@pytest.mark.long
def test_a_number_stands_for_all_its_parts_where_several_can_be(tmp_path: Path) -> None:
    done = eagletwin("prove", "26997", cwd=tmp_path)
    assert done.returncode == 0, done
    assert "4 of 4 proven" in done.stdout
    done = eagletwin("check", "26997", cwd=tmp_path)
    assert done.returncode == 128, done
    assert "26997 has several entries" in done.stderr
    assert "use one of 26997-kv, 26997-tokens, 26997-hidden, 26997-bonus" in done.stderr


def test_a_live_bug_has_a_remedy_and_no_fix_to_undo(tmp_path: Path) -> None:
    assert eagletwin("check", "row-overflow", cwd=tmp_path).returncode == 1
    assert eagletwin("check", "row-overflow", "--remedy", "row-overflow", cwd=tmp_path).returncode == 0
    done = eagletwin("check", "row-overflow", "--revert", "row-overflow", cwd=tmp_path)
    assert done.returncode == 128, done
    assert "entry row-overflow has no fix that could be undone" in done.stderr


def test_a_search_holds_the_fields_it_is_given(tmp_path: Path) -> None:
    done = eagletwin("fuzz", "--only", "topk=3", "--only", "llama-eagle3", "--cases", "2", "--out", "runs", cwd=tmp_path)
    assert done.returncode == 0, done
    assert "2 equal" in done.stdout
    done = eagletwin("fuzz", "--only", "topk=5", cwd=tmp_path)
    assert done.returncode == 128, done
    assert "there is no feature 'topk=5'" in done.stderr


def test_without_sglang_check_is_unknown_and_says_what_to_do(tmp_path: Path) -> None:
    broken = tmp_path / "path"
    broken.mkdir()
    (broken / "sglang.py").write_text("raise ImportError('broken on purpose')")
    done = in_a_process("check", "25015", cwd=tmp_path, path=broken)
    assert done.returncode == 125, done
    assert "SGLang cannot be imported" in done.stdout
    assert "eagletwin info doctor" in done.stdout


@pytest.mark.long
def test_doctor_says_that_the_cpu_engine_stands(tmp_path: Path) -> None:
    done = in_a_process("info", "doctor", cwd=tmp_path, COLUMNS="160")
    assert done.returncode == 0, done
    assert "scheduler and EAGLE worker stand" in done.stdout


def test_rules_that_are_switched_off_show_in_the_headline_and_the_command(tmp_path: Path) -> None:
    done = eagletwin("check", "26329", "--without", "draft.kv", "--step-timeout", "60", "--out", "a folder", cwd=tmp_path)
    assert done.returncode == 0
    assert "not checked: draft.kv" in done.stdout.splitlines()[0]
    assert "again: eagletwin check 26329 --without draft.kv --step-timeout 60" in done.stdout


def test_a_fault_that_comes_and_goes_is_unknown_when_it_is_looked_for_twice(tmp_path: Path) -> None:
    """The first run leaves a file behind, and the worker errs once there is one: equal, then diverged."""
    flags = tmp_path / "flag"
    edit = Edit(
        target="sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft_forward",
        match="topk_index = torch.argmax(",
        replacement=f"import glob, os; open('{flags}.' + str(os.getpid()), 'w').close()\n"
        f"topk_index = (torch.argmin if len(glob.glob('{flags}.*')) > 1 else torch.argmax)(",
    )
    (tmp_path / "flicker.json").write_bytes(msgspec.json.encode(Patch(name="flicker", edits=(edit,))))
    done = eagletwin("check", "25015", "--patch", "flicker.json", "--repeat", "2", cwd=tmp_path)
    assert done.returncode == 125, done
    assert "nondeterministic: first equal; in replay-1 draft.proposal" in done.stdout


def test_a_run_leaves_nothing_outside_its_folder_and_ignores_settings_of_sglang_in_the_environment(
    tmp_path: Path,
) -> None:
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    shared = Path("/dev/shm")
    before = set(shared.glob("sglang_loads_*"))
    done = in_a_process("check", "25015", cwd=tmp_path, TMPDIR=str(scratch), SGLANG_DEBUG_REVERT_PR="25015")
    assert done.returncode == 0, done
    assert list(scratch.iterdir()) == []
    # other test processes start engines too, whose files are there for a moment; one of ours would stay for ever
    left = set(shared.glob("sglang_loads_*")) - before
    for _ in range(600):
        if left:
            time.sleep(0.1)
            left &= set(shared.glob("sglang_loads_*"))
    assert not left


@pytest.mark.long
def test_a_closed_stdout_never_reads_as_a_divergence(tmp_path: Path) -> None:
    command = f"({shlex.quote(sys.executable)} -P -m eagletwin check 25015; echo code $? >&2) | true"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert int(done.stderr.rpartition("code ")[2]) in (0, 141), done


@pytest.mark.long
def test_a_trace_that_cannot_be_written_is_a_harness_error(tmp_path: Path) -> None:
    eagletwin("check", "25015", cwd=tmp_path)  # the cache is filled: the limit below is for the trace alone
    command = f"ulimit -f 4; exec {shlex.quote(sys.executable)} -P -m eagletwin check 26329"  # 4 KiB a file
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode in (125, 129), done  # SIGXFSZ may end the process before Python sees an error
    assert "Traceback" not in done.stderr


@pytest.mark.long
def test_an_interrupted_check_exits_130_says_so_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "eagletwin", "check", "25015"]
    env = {**os.environ, "TMPDIR": str(tmp_path), "EAGLETWIN_CACHE": str(tmp_path / "cache")}

    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        preexec_fn=ctrl_c_works,
    )
    while not list(tmp_path.glob("cache/logs/zygote-*")):  # from then on it waits for the engine processes
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    assert process.returncode == 130
    assert "interrupted: nothing more was judged" in errors
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
