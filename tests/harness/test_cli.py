"""The command line without an engine: usage errors, exit codes, diff and judge of recorded traces."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

from eagletwin.cases.entry import Entry
from eagletwin.cases.ledger import LEDGER, entries_of
from eagletwin.harness.check.confirm import Outcome
from eagletwin.harness.cli.main import run_command
from eagletwin.harness.commands import info
from eagletwin.harness.commands.compare import numbers
from eagletwin.harness.commands.compare.command import compare
from eagletwin.harness.commands.fuzz.command import fuzz
from eagletwin.harness.commands.matrix import Cell
from eagletwin.harness.commands.prove import proof as proving
from eagletwin.harness.commands.prove import report
from eagletwin.harness.commands.prove.command import prove
from eagletwin.harness.commands.result import ProveFacts
from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.core.errors import EXIT_INTERRUPTED, INTERRUPTED, AlreadyReported, InputError, run_guarded
from eagletwin.harness.core.files import keep_bytecode
from eagletwin.harness.core.records import Ending, EngineInfo
from eagletwin.harness.core.trace import Recorder, Trace, new_header, write_trace
from eagletwin.harness.core.verdict import Verdict
from eagletwin.harness.engines import host as process
from eagletwin.harness.engines import source, start
from eagletwin.harness.engines.host import WouldNotStart
from eagletwin.harness.engines.machine import missing_for_cuda
from eagletwin.harness.families.weights import model_pair

from ..rows import long
from .doors import opened

DIGEST = model_pair("llama-tiny").digest
ENGINE = EngineInfo(name="none", version="0", device="cpu", kernels="none", torch="0", triton="0")


def eagletwin(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return opened(["-m", "eagletwin", *arguments], cwd)


USAGE = {
    "no such command": ["frobnicate"],
    "no argument": ["check"],
    "an unknown option": ["check", "25015", "--frobnicate"],
    "an entry that does not exist": ["check", "25015", "--revert", "1"],
    "a case that does not exist": ["check", "nothing.json"],
    "a rule that does not exist": ["check", "25015", "--without", "draft.magic"],
    "a rule that does not exist, judge": ["judge", ".", "--without", "draft.magic"],
    "a proof that does not exist": ["prove", "1"],
    "a trace that does not exist": ["judge", "nothing"],
    "a patch that does not exist": ["check", "25015", "--patch", "nothing.json"],
    "a case on one SGLang": ["compare", "0.5.22", "--case", "25015"],
    "three SGLangs": ["compare", "0.5.21", "0.5.22", "0.5.23"],
    "a base of two SGLangs": ["compare", "0.5.22", "0.5.23", "--base", "0.5.21"],
    "lines of one SGLang": ["compare", "0.5.23", "--lines", "3"],
    "a ledger for a case": ["compare", "0.5.22", "0.5.23", "--case", "25015", "--ledger", "25015"],
    "the old diff of a case on one SGLang": ["diff", "25015", "--sglang", "0.5.22"],
    "an SGLang that does not exist": ["check", "25015", "--sglang", "0.4.1"],
    "a release to fetch that does not exist": ["info", "releases", "fetch", "0.4.1"],
    "a release to fetch of another engine": ["info", "releases", "fetch", "0.5.23", "--engine", "vllm"],
    "a release of one engine and another engine": ["check", "25015", "--vllm", "0.33.0", "--engine", "sglang"],
    "releases of two engines": ["check", "25015", "--vllm", "0.33.0", "--sglang", "0.5.23"],
    "releases of another engine": ["compare", "0.5.22", "0.5.23", "--engine", "vllm"],
    "a model runner of an engine that has none": ["check", "25015", "--model-runner", "v1", "--model-runner", "v2"],
    "a bisection over two things": ["bisect", "25015", "--features", "--from", "0.5.9"],
    "a bisection from newer to older": ["bisect", "25015", "--from", "0.5.12", "--to", "0.5.11"],
    "a bisection for no rule": ["bisect", "25015", "--rule", "draft.magic"],
    "ranks that no model's heads are shared by": ["check", "25015", "--tp", "3"],
    "a time limit of nothing": ["check", "25015", "--step-timeout", "0"],
}


@pytest.mark.parametrize("what", USAGE)
def test_a_usage_error_is_128_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    """Of what ends a process, test_exit_codes.py has examples."""
    monkeypatch.chdir(tmp_path)
    assert run_guarded(lambda: run_command(USAGE[what])) == 128
    said = capsys.readouterr().err
    assert said.strip()
    assert "Traceback" not in said
    assert not list(tmp_path.iterdir())


# What the ledger, a case, a patch, a rule or an option has no such thing of.
MISTYPED = [
    line.split()
    for line in """\
check 1
check nothing.json
check 25015 --after nothing.json
check 25015 --revert 1
check 25015 --remedy 1
check 25015 --patch nothing.json
check 25015 --without draft.magic
check 25015 --tp 3
check 25015 --sglang 0.4.1
prove 1
prove 25015 --tp 3
fuzz --revert 1
fuzz --only topk=5
bisect 1
bisect 25015 --rule draft.magic
judge . --without draft.magic
compare 0.5.23 0.4.1 --case 1""".splitlines()
]


def test_what_is_mistyped_is_reported_before_torch_is_imported_and_sglang(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom eagletwin.harness.cli.main import run_command as entered\n"
        "from eagletwin.harness.core.errors import run_guarded as guarded\n"
        f"for typed in {MISTYPED}:\n"
        "    code = guarded(lambda: entered(typed))\n"
        "    print(code, 'torch' in sys.modules, 'eagletwin.harness.engines.host' in sys.modules, *typed)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"128 False False {' '.join(typed)}" for typed in MISTYPED]
    assert not list(tmp_path.iterdir())


@pytest.mark.long
def test_a_search_that_is_interrupted_before_its_first_case_says_that_nothing_was_looked_at(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(process.Host, "engine", interrupted)
    with pytest.raises(AlreadyReported) as end:
        fuzz(out=tmp_path)
    assert end.value.exit_code == EXIT_INTERRUPTED
    said = capsys.readouterr()
    assert said.err.startswith("importing SGLang ")
    assert said.out.startswith("INTERRUPTED, NOTHING LOOKED AT  seed 0\n\n  No case finished")
    assert "FOUND" not in said.out


@pytest.mark.parametrize(("command", "name"), [("check", "multi-layer-plan"), ("bisect", "26997")])
def test_the_beginning_of_several_ids_is_no_case_and_they_are_named(tmp_path: Path, command: str, name: str) -> None:
    """`prove`, --revert and --remedy take all of them."""
    done = eagletwin(command, name, cwd=tmp_path)
    assert done.returncode == 128
    assert f"{name} has several entries" in done.stderr
    entries = entries_of(name)
    assert len(entries) > 1
    assert all(entry.id in done.stderr for entry in entries)


@pytest.mark.skipif(missing_for_cuda() is None, reason="there is a GPU here")
@pytest.mark.parametrize(
    "command",
    [("check", "25015", "--sglang"), ("prove", "25015", "--sglang"), ("fuzz", "--sglang"), ("compare",)],
)
@pytest.mark.slow
def test_a_gpu_that_is_missing_is_reported_before_an_sglang_is_fetched(tmp_path: Path, command: tuple[str, ...]) -> None:
    done = eagletwin(*command, "0.4.1", "--device", "cuda", cwd=tmp_path)
    assert done.returncode == 128
    assert "a CUDA engine needs it" in done.stderr
    assert "0.4.1" not in done.stderr


NEEDS = (
    "context-end-stores is not reached in this mode: it needs --device cuda --dtype bfloat16 --attention fa3 and CUDA graphs"
)


@pytest.mark.parametrize("command", [*long("prove"), "bisect"])
@pytest.mark.slow
def test_an_entry_that_this_mode_does_not_reach_is_unknown_and_says_what_it_needs(tmp_path: Path, command: str) -> None:
    done = eagletwin(command, "context-end-stores", cwd=tmp_path)
    assert done.returncode == 125, done
    assert f"UNKNOWN  {NEEDS}\n  so:  neither side was run" in done.stdout
    assert "try: eagletwin prove context-end-stores --device cuda --dtype bfloat16 --attention fa3" in done.stdout
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("names", "code"), [(["all"], 0), (["25015", "context-end-stores"], 125)])
def test_of_all_entries_those_that_this_mode_does_not_reach_are_listed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], names: list[str], code: int
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(start, "Zygote", lambda *_: nullcontext(SimpleNamespace(start=lambda: None)))
    monkeypatch.setattr(process, "Host", nullcontext)
    monkeypatch.setattr(source, "resolve", lambda *_: source.INSTALLED)
    monkeypatch.setattr(report, "show_claim", lambda *_: "")

    def proofs(_host: object, entries: list[Entry], *_: object) -> Iterator[proving.Proof]:
        for entry in entries:
            asked.append(entry.id)
            ends = entry.rule.startswith("engine.")
            sides = Verdict(status="equal"), Verdict(status="unknown" if ends else "diverged", rule=entry.rule)
            yield proving.Proof(entry, *(Cell(side, Outcome(entry.case, side, trace, tmp_path, "")) for side in sides))

    trace = Trace(new_header(LEDGER["25015"].case, DIGEST, ENGINE, Ending(kind="finished"), ()), {})
    monkeypatch.setattr(report, "prove", proofs)
    assert prove(names, out=tmp_path) == code
    wanted = list(LEDGER) if names == ["all"] else names
    elsewhere = ("context-end-stores", "retracted-logprobs", "retracted-stream", "draft-plan", "26239-worker", "dsv4")
    elsewhere += ("multi-layer-topk-parents", "grammar-stride", "pipeline", "adaptive-bonus")
    elsewhere += ("mixed-grammar", "overlap-context-end")
    out_of_reach = [name for name in wanted if name.startswith(elsewhere)]
    assert asked == [name for name in wanted if name not in out_of_reach]
    said = capsys.readouterr()
    assert NEEDS in said.out
    assert f"no release has their fix: {', '.join(out_of_reach)}.".replace(" ", "") in "".join(said.out.split())
    assert said.err.startswith("importing SGLang ")


def test_proofs_that_are_interrupted_are_told_and_kept_as_far_as_they_came(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start, "Zygote", lambda *_: nullcontext(SimpleNamespace(start=lambda: None)))
    monkeypatch.setattr(process, "Host", nullcontext)
    monkeypatch.setattr(source, "resolve", lambda *_: source.INSTALLED)
    monkeypatch.setattr(report, "show_claim", lambda *_: "")
    trace = Trace(new_header(LEDGER["25015"].case, DIGEST, ENGINE, Ending(kind="finished"), ()), {})

    def proofs(_host: object, entries: list[Entry], *_: object) -> Iterator[proving.Proof]:
        entry = entries[0]
        sides = Verdict(status="equal"), Verdict(status="diverged", rule=entry.rule)
        yield proving.Proof(entry, *(Cell(side, Outcome(entry.case, side, trace, tmp_path, "")) for side in sides))
        raise KeyboardInterrupt

    monkeypatch.setattr(report, "prove", proofs)
    with pytest.raises(AlreadyReported) as ended:
        prove(["25015", "26329"], out=tmp_path)
    assert ended.value.exit_code == EXIT_INTERRUPTED
    assert "\nUNKNOWN  ended early, 1 of 1 of 2 asked proven in " in capsys.readouterr().out
    facts = msgspec.json.decode((tmp_path / "prove" / "proofs.json").read_bytes(), type=ProveFacts)
    assert (facts.interrupted, [one.entry for one in facts.proofs]) == (True, ["25015"])


def test_what_ended_after_it_said_why_says_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    def reported() -> int:
        raise AlreadyReported(EXIT_INTERRUPTED)

    def interrupted() -> int:
        raise KeyboardInterrupt

    assert run_guarded(reported) == run_guarded(interrupted) == EXIT_INTERRUPTED
    assert capsys.readouterr().err == f"{INTERRUPTED}\n"


def test_of_two_sglangs_the_one_that_does_not_start_is_named_with_the_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Fake:
        def __init__(self, name: str) -> None:
            self.name, self.version = name, name

        def engine(self, *_: object) -> object:
            raise WouldNotStart("it does not run this", consequence="c", remedy="r")

    monkeypatch.setattr(numbers, "hosts_of", lambda sources, *_: nullcontext([Fake(name) for name in sources]))
    monkeypatch.setattr(numbers, "watches", lambda _: (None, None))
    monkeypatch.setattr(source, "resolve", lambda name, _: name)
    assert compare(["0.5.22", "0.5.23"], case="25015", out=tmp_path) == 125
    said = capsys.readouterr()
    ran = "pr-25015 runs on SGLang 0.5.22 (left) and on 0.5.23 (right); both are imported first"
    assert said.err == f"{ran}\nfolder: {tmp_path / 'pr-25015-compare'}\n"
    assert said.out.startswith("UNKNOWN  pr-25015 on SGLang 0.5.22\n\n  it does not run this\n")
    assert said.out.endswith(f"folder: {tmp_path / 'pr-25015-compare'}\n")


def test_releases_that_are_not_fetched_are_nothing_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(info, "here", lambda _: ("0.5.23",))
    found = info._releases("sglang")
    assert found.good
    assert found.found.startswith("1 of 19 are here: 0.5.23; `--sglang` fetches the one that it names")


def test_help_exits_0_and_names_the_exit_codes(tmp_path: Path) -> None:
    done = eagletwin("--help", cwd=tmp_path)
    assert done.returncode == 0
    assert "125 cannot tell" in done.stdout
    for command in ("check", "prove", "judge", "compare", "info"):
        assert command in done.stdout


def recorded(folder: Path, value: float, *, token: int = 1) -> Path:
    case = Case(name="x", model="llama-tiny", num_steps=1, requests=(Request(id="a", prompt=(token,), max_new_tokens=1),))
    recorder = Recorder()
    recorder.add("a", 0, "prefill", numbers={"end": 1}, tensors={"proposal_hidden": torch.tensor([1.0, value])})
    folder.mkdir()
    write_trace(
        folder,
        new_header(case, DIGEST, ENGINE, Ending(kind="finished"), recorder.records),
        recorder.tensors,
    )
    return folder


@pytest.mark.slow
def test_diff_of_a_trace_with_itself_is_0(tmp_path: Path) -> None:
    done = eagletwin("compare", str(recorded(tmp_path / "a", 0.5)), str(tmp_path / "a"), cwd=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith(f"left:  {tmp_path / 'a'}\nright: {tmp_path / 'a'}\n")
    assert "identical" in done.stdout


def test_diff_says_what_is_wrong_before_anything_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="nothing"):
        compare([str(recorded(tmp_path / "a", 0.5)), str(tmp_path / "nothing")])
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_diff_within_the_bound_is_0_and_says_so(tmp_path: Path) -> None:
    done = eagletwin("compare", str(recorded(tmp_path / "a", 0.5)), str(recorded(tmp_path / "b", 0.500001)), cwd=tmp_path)
    assert done.returncode == 0
    assert "within the bound" in done.stdout


@pytest.mark.slow
def test_diff_beyond_the_bound_is_1_and_names_the_number(tmp_path: Path) -> None:
    done = eagletwin("compare", str(recorded(tmp_path / "a", 0.5)), str(recorded(tmp_path / "b", 0.6)), cwd=tmp_path)
    assert done.returncode == 1
    assert "prefill step 0 of request a, round 0, proposal_hidden, element 1: 0.5 | 0.6" in done.stdout


@pytest.mark.slow
def test_diff_of_two_different_cases_is_an_error(tmp_path: Path) -> None:
    done = eagletwin("compare", str(recorded(tmp_path / "a", 0.5)), str(recorded(tmp_path / "b", 0.5, token=2)), cwd=tmp_path)
    assert done.returncode == 128
    assert "not of the same requests" in done.stderr


@pytest.mark.slow
def test_diff_sees_a_record_that_one_side_lacks(tmp_path: Path) -> None:
    left = recorded(tmp_path / "a", 0.5)
    case = Case(name="x", model="llama-tiny", num_steps=1, requests=(Request(id="a", prompt=(1,), max_new_tokens=1),))
    (tmp_path / "b").mkdir()
    write_trace(tmp_path / "b", new_header(case, DIGEST, ENGINE, Ending(kind="finished"), ()), {})
    done = eagletwin("compare", str(left), str(tmp_path / "b"), cwd=tmp_path)
    assert done.returncode == 1
    assert "recorded | absent" in done.stdout


@pytest.mark.slow
def test_a_truncated_trace_is_refused_by_name(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "a", 0.5)
    shutil.copy(folder / "trace.json", folder / "trace.safetensors")
    done = eagletwin("judge", str(folder), cwd=tmp_path)
    assert done.returncode == 128
    assert "trace.safetensors" in done.stderr


def test_an_old_name_of_a_command_still_works_and_says_the_new_one(tmp_path: Path) -> None:
    old, new = (eagletwin(*words, "--json", cwd=tmp_path) for words in (["models", "list"], ["info", "models"]))
    assert (old.returncode, old.stdout) == (0, new.stdout)
    assert old.stderr == "note: `eagletwin models list` is now `eagletwin info models`\n"


@pytest.mark.parametrize("command", ["check 25015", "fuzz", "prove 25015", "bisect 25015", "compare 0.5.23 0.5.20"])
def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_imported(command: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    done = eagletwin(*command.split(), "--out", str(tmp_path / "file" / "runs"), cwd=tmp_path)
    assert done.returncode == 128, done
    assert "Not a directory\n  so:  nothing was run\n  try: give --out a folder that you may write" in done.stderr
    assert "importing" not in done.stderr


def test_where_python_writes_no_bytecode_it_is_kept_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", "")
    monkeypatch.setenv("EAGLETWIN_CACHE", str(tmp_path))
    keep_bytecode()
    code = "import sys; print(sys.dont_write_bytecode, sys.pycache_prefix)"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert child.stdout.split() == ["False", sys.pycache_prefix] == ["False", str(tmp_path / "bytecode")]
