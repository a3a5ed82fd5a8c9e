"""The commands that people type, on the real engine: exit codes, JSON, full disks, and a judge that never sees SGLang."""

import errno
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest
from msgspec.structs import replace

import eagletwin as api_eagletwin
from eagletwin.cases.ledger import LEDGER
from eagletwin.cases.strategies import cases
from eagletwin.harness.check import trials as api
from eagletwin.harness.commands.fuzz.command import search
from eagletwin.harness.commands.fuzz.options import SearchOptions
from eagletwin.harness.commands.result import CheckFacts, ProveFacts, ResultFacts, SaidFacts, SearchFacts
from eagletwin.harness.core.case import Case, pretty_case
from eagletwin.harness.core.errors import HarnessError, Unwritable
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.run_spec import CPU, RunSpec
from eagletwin.harness.engines.host import Host
from eagletwin.harness.families.valid import read_case
from eagletwin.harness.judge.judge import judge
from eagletwin.harness.page.render import NAME

from ..harness.doors import ctrl_c_works, opened
from ..lab.__main__ import run
from ..lab.gpu.job import Job
from ..rows import long
from . import forked
from .warm import eagletwin

# The commands that people type, on the real engine, with their exit codes; and a second judge that never sees SGLang.


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
    # another test process starts engines too, whose files are in use; one of ours would stay for ever
    left = set(shared.glob("sglang_loads_*")) - before
    used = "".join(text for maps in Path("/proc").glob("[0-9]*/maps") if (text := _text(maps)))
    left = {file for file in left if file.exists() and str(file) not in used}
    assert not left


def _text(maps: Path) -> str:
    """Of a process that may have ended."""
    try:
        return maps.read_text()
    except OSError:
        return ""


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


# `--json` of commands that run an engine: one JSON value alone on stdout, of the schema of harness/commands/result.py.


R = TypeVar("R", bound=ResultFacts)


def printed(shape: type[R], *words: str, cwd: Path, code: int) -> R:
    done = eagletwin(*words, "--json", cwd=cwd)
    assert done.returncode == code, done
    result = msgspec.json.decode(done.stdout, type=shape)
    assert result.exit_code == code
    return result


def test_a_check_that_diverged(tmp_path: Path) -> None:
    result = printed(CheckFacts, "check", "26329", "--revert", "26329", cwd=tmp_path, code=1)
    assert (result.verdict.status, result.verdict.rule) == ("diverged", "draft.input_ids")
    assert (tmp_path / result.folder / "verdict.json").is_file()
    assert result.again == "eagletwin check 26329 --revert 26329"


def test_a_proof(tmp_path: Path) -> None:
    result = printed(ProveFacts, "prove", "25015", cwd=tmp_path, code=0)
    [proof] = result.proofs
    assert (proof.holds, proof.green, proof.red) == (True, "equal", "diverged draft.positions")
    page = (tmp_path / result.folder / NAME).read_text(encoding="utf-8")
    for side in ("green", "red"):
        assert f'href="../25015-{side}/{NAME}"' in page


def test_a_search(tmp_path: Path) -> None:
    result = printed(SearchFacts, "fuzz", "--cases", "1", "--only", "llama-tiny", "--not", "sampling", cwd=tmp_path, code=0)
    assert (result.summary["tally"]["cases"], result.interrupted) == (1, False)


def test_an_sglang_that_cannot_be_imported(tmp_path: Path) -> None:
    file = tmp_path / "tree" / "sglang" / "__init__.py"
    file.parent.mkdir(parents=True)
    file.write_text("def (:\n")
    result = printed(SaidFacts, "check", "25015", "--sglang", "tree", cwd=tmp_path, code=125)
    assert result.said.startswith("UNKNOWN  pr-25015\n\n  SGLang cannot be imported: SyntaxError")


# `from eagletwin import Case, cases, check, judge`.


def test_the_public_names_are_these() -> None:
    assert api_eagletwin.__all__ == ["Case", "cases", "check", "judge"]
    assert (api_eagletwin.Case, api_eagletwin.check, api_eagletwin.judge) == (Case, api.check, judge)
    assert repr(api_eagletwin.cases(max_requests=1)) == repr(cases(max_requests=1))
    with pytest.raises(AttributeError, match="'nothing'"):
        api_eagletwin.nothing  # noqa: B018


def test_importing_eagletwin_imports_no_torch() -> None:
    code = "import eagletwin, sys; assert 'torch' not in sys.modules and 'hypothesis' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_check_is_equal_with_a_fix_and_diverged_without_it(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_host", lambda sglang, mode: host)
    entry = LEDGER["25015"]
    assert api_eagletwin.check(entry.case).status == "equal"
    assert api_eagletwin.check(entry.case, patches=entry.red.patches).rule == "draft.positions"


# A full disk, or a limit on the size of files, is the machine's fault: a harness error, which says nothing of SGLang.


FULL = "raise OSError(28, 'No space left on device', '/somewhere/file')"
DRAFT = Edit(
    target="sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft_forward",
    match="topk_index = torch.argmax(",
    replacement=f"{FULL}\ntopk_index = torch.argmax(",
)
BUILD = Edit(
    target="sglang.srt.managers.scheduler.Scheduler.__init__",
    match="self.forward_ct: int = 0",
    replacement=f"""try:
    {FULL}
except OSError as error:
    raise RuntimeError("it does not start") from error""",
)
CASE = LEDGER["25015"].case


def test_a_worker_that_cannot_write_did_not_crash(host: Host, tmp_path: Path) -> None:
    engine = host.engine(CASE, (Patch(name="full", edits=(DRAFT,)),))
    with pytest.raises(HarnessError, match="a file could not be written, since the disk or a quota is full"):
        engine.run(CASE, tmp_path)


def test_an_engine_that_cannot_write_while_it_is_built_says_nothing_of_sglang(host: Host) -> None:
    with pytest.raises(Unwritable, match=r"no space is left on the disk \(/somewhere/file\)\n.*nothing is known of the engine"):
        host.engine(CASE, (Patch(name="full", edits=(BUILD,)),))


# A run folder that becomes full while a finding is shrunk: what was found is kept elsewhere, and told all the same.


@pytest.mark.long
@pytest.mark.slow
def test_what_was_found_is_kept_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, writes = tmp_path / "runs", 0
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    write_text, write_bytes = Path.write_text, Path.write_bytes

    def full(file: Path) -> bool:
        nonlocal writes
        writes += file.name == "case.json"
        return runs in file.parents and writes > 1

    def text(file: Path, *given: Any, **how: Any) -> int:
        if full(file):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        return write_text(file, *given, **how)

    def data(file: Path, *given: Any) -> int:
        if full(file):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        return write_bytes(file, *given)

    monkeypatch.setattr(Path, "write_text", text)
    monkeypatch.setattr(Path, "write_bytes", data)
    undone = RunSpec(patches=(LEDGER["25015"].revert,))
    options = SearchOptions(only=("llama-tiny",), left_out=("sampling",), processes=1, run=undone, out=runs)
    with pytest.raises(OSError, match="No space left"):
        search(options)
    told, said = capsys.readouterr()
    assert told.startswith("1 FOUND")
    [other] = re.findall(r"cannot be written \(No space left on device\); what was found last is in (\S+)", said)
    assert read_case(Path(other, "minimal", "case.json")).requests
    for part in ("found.json", "summary.json", "minimal/repro.py"):
        assert Path(other, part).is_file()


# Which situation ends in which exit code, where the worker has to run: the other half of tests/harness/test_exit_codes.py.


ROOT = Path(__file__).parents[2]


def exits_eagletwin(*arguments: str, cwd: Path, setup: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """The command line, after these statements have run in its process."""
    typed = f"import sys\nsys.argv = {['eagletwin', *arguments]!r}"
    program = f"{typed}\n{setup}\nfrom eagletwin.harness.cli.main import main\nsys.exit(main())"
    return forked.program(program, cwd, **env)


def leaking(file: Path) -> Patch:
    """Draft decode's hidden states grow by a rounding error with every step that was ever run: equal, and never the same."""
    return Patch(
        name="leak",
        edits=(
            Edit(
                target="sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft_forward",
                match="hidden_states = logits_output.hidden_states",
                replacement=f"leak = open({str(file)!r}, 'a')\nleak.write('.')\nleak.flush()\n"
                "hidden_states = logits_output.hidden_states * (1 + 1e-6 * leak.tell())",
            ),
        ),
    )


@pytest.mark.long
@pytest.mark.parametrize(("leaks", "code"), [(True, 125), (False, 0)])
def test_gpu_run_of_a_job_that_leaks_state_is_125(
    tmp_path: Path, leaks: bool, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The campaign's own path, on a CPU engine."""
    patches = (leaking(tmp_path / "state"),) if leaks else ()
    job = Job(name="one", mode=CPU, cases=(replace(LEDGER["25015"].case, num_steps=4),), patches=patches, again=True)
    plan, out = tmp_path / "plan.json", tmp_path / "out"
    plan.write_bytes(msgspec.json.encode([job]))
    assert run(["gpu", "run", str(plan), str(out)]) == code
    said = capsys.readouterr().out
    assert "{'equal': 1}" in said.splitlines()[0], said
    assert ("again DIFFERENT" in said) == leaks
    assert "Campaign out" in (out / NAME).read_text(encoding="utf-8")


TWO_THAT_FAIL = """\
from dataclasses import replace
from eagletwin.cases.ledger import ENTRIES, LEDGER
from eagletwin.harness.core.patch import Edit, Patch
known = LEDGER["25015"]
stop = Edit(
    target="sglang.srt.managers.scheduler.Scheduler.__init__",
    match="self.forward_ct: int = 0",
    replacement="raise RuntimeError('it does not start')",
)
ENTRIES["other-rule"] = replace(known, id="other-rule", rule="draft.input_ids")
ENTRIES["no-start"] = replace(known, id="no-start", revert=Patch(name="stop", edits=(stop,)))
"""


def test_an_engine_that_will_not_start_hides_no_proof_that_fails(tmp_path: Path) -> None:
    """Neither one before it nor one after it."""
    done = exits_eagletwin("prove", "other-rule", "no-start", "25015", cwd=tmp_path, setup=TWO_THAT_FAIL)
    assert done.returncode == 1, done
    assert "it does not start" in done.stdout
    assert "1 of 3 proven" in done.stdout
    done = exits_eagletwin("prove", "no-start", "25015", cwd=tmp_path, setup=TWO_THAT_FAIL)
    assert done.returncode == 125, done
    assert "1 of 2 proven" in done.stdout


@pytest.mark.parametrize(("declares", "code"), [((), 125), (("impossible",), 0)], ids=["undeclared", "declared"])
def test_a_case_whose_only_request_asks_for_what_cannot_be_is_125_unless_it_says_so(
    tmp_path: Path, declares: tuple[str, ...], code: int
) -> None:
    case = replace(LEDGER["guidance-refused"].case, name="asks", exercises=declares)
    (tmp_path / "case.json").write_text(pretty_case(case), encoding="utf-8")
    done = exits_eagletwin("check", "case.json", "--remedy", "guidance-refused", "--json", cwd=tmp_path)
    assert done.returncode == code, done
    verdict = msgspec.json.decode(done.stdout)["verdict"]
    assert verdict["shares"]["a"].items() >= {"rounds": 1, "rounds_compared": 0, "rows": 2, "rows_compared": 1}.items()
    assert ("output.* of request a was never compared" in verdict["reason"]) == bool(code)
    assert "Compared in part: request a, 0 of 1 rounds, 1 of 2 rows, 10 of 20 rules." in " ".join(done.stderr.split())
