"""Which situation ends in which exit code, where the worker has to run: the other half of tests/harness/test_exit_codes.py."""

import subprocess
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.case import pretty_case
from eagletwin.harness.core.mode import CPU
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.page.render import NAME

from ..lab.__main__ import run
from ..lab.gpu.job import Job
from . import forked

ROOT = Path(__file__).parents[2]


def eagletwin(*arguments: str, cwd: Path, setup: str = "", **env: str) -> subprocess.CompletedProcess[str]:
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
from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.patch import Edit, Patch
known = LEDGER["25015"]
stop = Edit(
    target="sglang.srt.managers.scheduler.Scheduler.__init__",
    match="self.forward_ct: int = 0",
    replacement="raise RuntimeError('it does not start')",
)
LEDGER["other-rule"] = replace(known, id="other-rule", rule="draft.input_ids")
LEDGER["no-start"] = replace(known, id="no-start", revert=Patch(name="stop", edits=(stop,)))
"""


def test_an_engine_that_will_not_start_hides_no_proof_that_fails(tmp_path: Path) -> None:
    """Neither one before it nor one after it."""
    done = eagletwin("prove", "other-rule", "no-start", "25015", cwd=tmp_path, setup=TWO_THAT_FAIL)
    assert done.returncode == 1, done
    assert "it does not start" in done.stdout
    assert "1 of 3 proven" in done.stdout
    done = eagletwin("prove", "no-start", "25015", cwd=tmp_path, setup=TWO_THAT_FAIL)
    assert done.returncode == 125, done
    assert "1 of 2 proven" in done.stdout


@pytest.mark.parametrize(("declares", "code"), [((), 125), (("impossible",), 0)], ids=["undeclared", "declared"])
def test_a_case_whose_only_request_asks_for_what_cannot_be_is_125_unless_it_says_so(
    tmp_path: Path, declares: tuple[str, ...], code: int
) -> None:
    case = replace(LEDGER["guidance-refused"].case, name="asks", exercises=declares)
    (tmp_path / "case.json").write_text(pretty_case(case), encoding="utf-8")
    done = eagletwin("check", "case.json", "--remedy", "guidance-refused", "--json", cwd=tmp_path)
    assert done.returncode == code, done
    verdict = msgspec.json.decode(done.stdout)["verdict"]
    assert verdict["shares"]["a"].items() >= {"rounds": 1, "rounds_compared": 0, "rows": 2, "rows_compared": 1}.items()
    assert ("output.* of request a was never compared" in verdict["reason"]) == bool(code)
    assert "Compared in part: request a, 0 of 1 rounds, 1 of 2 rows, 10 of 20 rules." in " ".join(done.stderr.split())
