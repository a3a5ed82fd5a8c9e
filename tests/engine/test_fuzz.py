"""The search: what it finds, how small it gets, and what becomes of findings that do not hold still."""

import json
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from eagletwin.cases.blocks import Asked
from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.check.known import Mends
from eagletwin.harness.check.trials import Trials
from eagletwin.harness.commands.fuzz.looking import CaseSeen
from eagletwin.harness.commands.fuzz.options import Plan
from eagletwin.harness.commands.fuzz.search import Fuzz
from eagletwin.harness.commands.fuzz.shrinking import Finding, Shrinking, Teller
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.source import INSTALLED
from eagletwin.harness.families.valid import decode_case, read_case

from ..harness.doors import ctrl_c_works
from . import forked
from .plain import GREEDY

FORWARD = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft_forward"
ARGMAX = "topk_index = torch.argmax("


def search(host: Host, folder: Path, patch: Patch, *, shrink_seconds: float = 120.0, asked: Asked = GREEDY) -> Fuzz:
    trials = Trials(host, RunSpec(patches=(patch,)))
    return Fuzz(
        trials,
        folder,
        Plan(seed=0, seconds=1e9, max_cases=200, shrink_seconds=shrink_seconds, command="eagletwin fuzz", asked=asked),
    )


def first(fuzz: Fuzz) -> Finding:
    return next(fuzz.search())


@pytest.mark.parametrize(
    ("entry", "smallest"),
    [
        # one request of one token and the fewest steps that decode; the bonus token and one more
        pytest.param("25015", {"num_steps": 2, "prompt": 1, "max_new_tokens": 2, "chunks": ()}, marks=pytest.mark.long),
        # one request in two chunks of one token
        ("26329", {"num_steps": 1, "prompt": 2, "max_new_tokens": 1, "chunks": (1,)}),
    ],
)
def test_a_reverted_fix_is_found_and_gets_as_small_as_it_can(
    host: Host, tmp_path: Path, entry: str, smallest: dict[str, object]
) -> None:
    finding = first(search(host, tmp_path, LEDGER[entry].revert))
    assert finding.signature.rule == LEDGER[entry].rule
    assert finding.outcome.verdict.status == "diverged"
    assert not finding.partial
    case = finding.outcome.case
    [request] = case.requests
    seen = {"num_steps": case.num_steps, "prompt": len(request.prompt), "max_new_tokens": request.max_new_tokens}
    assert seen | {"chunks": case.chunks} == smallest
    assert (case.model, case.page_size, case.events, request.arrive, request.stop) == ("llama-tiny", 1, (), 0, ())
    folder = finding.outcome.folder
    assert read_case(folder / "case.json") == case
    for part in ("trace.json", "trace.safetensors", "verdict.json", "report.txt", "report.html", "repro.py"):
        assert (folder / part).is_file()
    assert (folder.parent / "found.json").is_file()
    scripted = runpy.run_path(str(folder / "repro.py"))["CASE"]
    assert decode_case(json.dumps(scripted).encode(), "repro.py") == case


@pytest.mark.long
def test_when_time_is_up_the_smallest_so_far_counts_and_says_so(host: Host, tmp_path: Path) -> None:
    finding = first(search(host, tmp_path, LEDGER["25015"].revert, shrink_seconds=0.0))
    assert finding.partial
    assert finding.outcome.verdict.status == "diverged"
    assert finding.shrink_looks == 0


def test_what_hangs_on_the_cases_before_it_is_a_state_leak_and_keeps_them(host: Host, tmp_path: Path) -> None:
    """A worker that goes wrong from its thirtieth draft on, whatever the case."""
    counted = "self._drafts = getattr(self, '_drafts', 0) + 1\n"
    leak = Patch(
        name="leak",
        edits=(
            Edit(
                target=FORWARD,
                match=ARGMAX,
                replacement=f"{counted}topk_index = (torch.argmax if self._drafts < 30 else torch.argmin)(",
            ),
        ),
    )
    one_draft_a_round = Asked(held={"model": "llama-tiny", "topk": 1, "num_steps": 2}, sampling="")
    finding = first(search(host, tmp_path, leak, asked=one_draft_a_round))
    verdict, outcome = finding.outcome.verdict, finding.outcome
    assert verdict.status == "unknown"
    assert "state leak" in verdict.reason
    assert outcome.before
    assert [read_case(path) for path in sorted((outcome.folder / "before").iterdir())] == list(outcome.before)
    assert "--after" in outcome.report


@pytest.mark.long
def test_what_happens_once_is_nondeterministic_and_kept(host: Host, tmp_path: Path) -> None:
    """A worker that goes wrong while a file is there, and takes it away."""
    file = tmp_path / "once"
    file.touch()
    once = f"__import__('os').path.exists({str(file)!r}) and (__import__('os').unlink({str(file)!r}) or True)"
    patch = Patch(
        name="once",
        edits=(Edit(target=FORWARD, match=ARGMAX, replacement=f"topk_index = (torch.argmin if {once} else torch.argmax)("),),
    )
    (tmp_path / "runs").mkdir()
    finding = first(search(host, tmp_path / "runs", patch))
    assert finding.outcome.verdict.status == "unknown"
    assert "nondeterministic" in finding.outcome.verdict.reason
    assert (finding.outcome.folder / "repro.py").is_file()


@pytest.mark.long
def test_a_worker_that_dies_is_found_as_well(host: Host, tmp_path: Path) -> None:
    dies = Patch(
        name="dies",
        edits=(
            Edit(target=FORWARD, match=ARGMAX, replacement="if out_cache_loc.numel() > 3: import os; os._exit(3)\n" + ARGMAX),
        ),
    )
    finding = first(search(host, tmp_path, dies, shrink_seconds=0.0))  # test_findings.py has crashes get small
    assert (finding.signature.rule, finding.outcome.verdict.status) == ("engine.crash", "unknown")
    assert "exited with status 3" in finding.outcome.verdict.reason


def test_ctrl_c_while_shrinking_keeps_what_was_found_and_says_where(tmp_path: Path) -> None:
    held = ["--only", "llama-tiny", "--not", "sampling", "-n", "1"]  # what is found first is soon found
    command = [sys.executable, "-P", "-m", "eagletwin", "fuzz", "--revert", "25015", *held]
    process = subprocess.Popen(
        command,
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=ctrl_c_works,
    )
    assert process.stderr is not None
    assert any("importing SGLang" in line for line in process.stderr)
    assert any("shrinking" in line for line in process.stderr)  # behind news of the search, where the machine is busy
    process.send_signal(signal.SIGINT)
    told, _ = process.communicate()
    assert process.returncode == 130
    minimal = tmp_path / "eagletwin-runs" / "fuzz-0" / "finding-1" / "minimal"
    assert told.startswith("INTERRUPTED, 1 FOUND")
    assert f"Stopped while shrinking: the smallest case so far is in {minimal.relative_to(tmp_path)}" in " ".join(told.split())
    assert read_case(minimal / "case.json").requests
    assert json.loads((tmp_path / "eagletwin-runs" / "fuzz-0" / "summary.json").read_text())["tally"]["cases"] > 0
    assert forked.script(minimal / "repro.py", cwd=tmp_path, source=INSTALLED).returncode == 1


@pytest.mark.long
def test_what_a_kernel_shows_gets_small_as_well(host: Host, tmp_path: Path) -> None:
    """A live bug near the end of a context. A kernel's violations have no iteration: smaller cases are run to their end."""
    case = LEDGER["indices-overflow"].case
    [request] = case.requests
    case = replace(case, requests=(replace(request, prompt=(*request.prompt, 5, 7), max_new_tokens=10),))
    mends = Mends(host, RunSpec())
    trial = mends.trials().look_alone(case)
    assert trial.signature is not None
    seen = CaseSeen(block=0, case=case, verdict=trial.verdict, signature=trial.signature)
    teller = Teller(aside=lambda *_: None, news=print, look=print)
    shrinking = Shrinking(seen, mends, tmp_path, seconds=120.0, seed=0, command="", teller=teller)
    shrinking.shrink(None)
    finding = shrinking.conclude(1, 0.0)
    case = finding.outcome.case
    assert (finding.signature.rule, finding.partial) == ("kernel.memory", False)
    assert finding.signature.kernel
    assert (case.chunks, case.events) == ((), ())
    assert max(len(one.prompt) + one.max_new_tokens for one in case.requests) == 14  # up to the end of the context
