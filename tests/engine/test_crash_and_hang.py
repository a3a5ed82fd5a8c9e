"""A worker that dies costs one case: it gets a verdict that says what happened and where, and the next case runs."""

from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.records import Ending
from eagletwin.harness.core.run_spec import Limits
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.engines.host import Host
from eagletwin.harness.judge.judge import judge

from ..rows import spread
from .conftest import Runner

VERIFY = "sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.verify"


def _at_verify(statement: str) -> Edit:
    """Run a statement when the third verify of the case begins."""
    counted = "self._verified = getattr(self, '_verified', 0) + 1"
    return Edit(
        target=VERIFY,
        match="return run_eagle_verify(",
        replacement=f"{counted}\nif self._verified == 3:\n    {statement}\nreturn run_eagle_verify(",
    )


# A step of the busy case takes 0.2 s at the most; thirty times as long tells a hang from a busy machine.
STEP = 6.0
DEATHS = {
    "SIGSEGV": ("import os; os.kill(os.getpid(), 11)", "engine.crash", "killed by SIGSEGV"),
    "SIGKILL": ("import os; os.kill(os.getpid(), 9)", "engine.crash", "killed by SIGKILL"),
    "exit": ("import os; os._exit(0)", "engine.crash", "without a trace"),
    "exception": ("raise ValueError('the worker raised')", "engine.crash", "ValueError: the worker raised"),
    "sleep": ("import time; time.sleep(10**6)", "engine.hang", "no end of the step within 6 s"),
    "busy loop": ("while True: pass", "engine.hang", "no end of the step within 6 s"),
}


@pytest.mark.parametrize(
    "death", spread(sorted(DEATHS), lambda death: DEATHS[death][1], lambda death: DEATHS[death][1] == "engine.crash" and death)
)
def test_a_death_in_the_middle_of_a_case_is_a_verdict_and_the_next_case_runs(run: Runner, busy_case: Case, death: str) -> None:
    statement, rule, detail = DEATHS[death]
    trace, verdict = run(busy_case, _at_verify(statement), limits=Limits(step=STEP))
    assert (verdict.status, verdict.rule) == ("unknown", rule)
    assert detail in verdict.reason
    assert "verify" in trace.header.ending.where
    _, after = run(busy_case)
    assert after.status == "equal"


def test_a_death_is_not_put_off_by_a_library_that_prints_frames(run: Runner, busy_case: Case, tmp_path: Path) -> None:
    """tvm_ffi does, for SIGSEGV, once it has read the symbols of torch."""
    run(busy_case, _at_verify("import tvm_ffi, os; os.kill(os.getpid(), 11)"))
    (log,) = tmp_path.rglob("engine.log")
    assert "Fatal Python error: Segmentation fault" in log.read_text()
    assert "Segfault encountered" not in log.read_text()


@pytest.mark.long
def test_a_case_that_takes_too_long_as_a_whole_is_a_hang(run: Runner, busy_case: Case) -> None:
    slow = Edit(
        target=VERIFY, match="return run_eagle_verify(", replacement="import time; time.sleep(1)\nreturn run_eagle_verify("
    )
    _, verdict = run(busy_case, slow, limits=Limits(step=60.0, case=3.0))
    assert verdict.rule == "engine.hang"
    assert "no end of the case within 3 s" in verdict.reason


def test_a_result_that_the_taps_cannot_read_is_no_crash_of_the_worker(run: Runner, busy_case: Case) -> None:
    """As of a release that calls things otherwise: a cell of such a release must not read as one whose worker crashes."""
    renamed = Edit(
        target=VERIFY,
        match="return run_eagle_verify(",
        replacement="import types\nreturn (lambda *a, **k: types.SimpleNamespace(result=run_eagle_verify(*a, **k)))(",
    )
    trace, verdict = run(busy_case, renamed)
    assert (verdict.status, verdict.rule, trace.header.ending.kind) == ("unknown", "", "unseen")
    assert "eagletwin itself failed: AttributeError" in verdict.reason
    assert "(verify.py:" in verdict.reason


def test_arguments_that_the_worker_does_not_take_are_its_own_crash(run: Runner, busy_case: Case) -> None:
    fewer = Edit(
        target="sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.verify", match="def verify(", replacement="def verify(*, "
    )
    _, verdict = run(busy_case, fewer)
    assert (verdict.status, verdict.rule) == ("unknown", "engine.crash")


def test_arguments_that_are_missing_are_the_crash_of_who_calls(run: Runner, busy_case: Case) -> None:
    _, verdict = run(busy_case, _verify_called_with("pp_proxy_tensors=None"))
    assert (verdict.status, verdict.rule) == ("unknown", "engine.crash"), verdict
    assert "TypeError: missing a required argument: 'batch'" in verdict.reason


def test_arguments_that_a_tap_alone_does_not_take_are_no_crash_of_the_worker(run: Runner, busy_case: Case) -> None:
    """`call` is how the taps name what they stand around."""
    first = "def verify(self, batch: ScheduleBatch, pp_proxy_tensors=None, grammar_barrier=None):\n"
    renamed = Edit(
        target=VERIFY,
        match=f"{first}    return run_eagle_verify(\n        batch,",
        replacement=f"{first.replace('batch: ScheduleBatch', 'call')}    return run_eagle_verify(\n        call,",
    )
    trace, verdict = run(busy_case, renamed, _verify_called_with("call=batch"))
    assert (verdict.status, verdict.rule, trace.header.ending.kind) == ("unknown", "", "unseen"), verdict


def _verify_called_with(argument: str) -> Edit:
    call = "batch_output = self.verify(\n            "
    return Edit(
        target="sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2.forward_batch_generation",
        match=f"{call}batch,\n            pp_proxy_tensors=pp_proxy_tensors,",
        replacement=f"{call}{argument},",
    )


@pytest.mark.parametrize("made", ["torch.zeros(-1)", "torch.zeros(1, 2, sizes=3)"])
def test_what_torch_refuses_to_make_is_the_crash_of_who_asks(run: Runner, busy_case: Case, made: str) -> None:
    """torch's own functions have functions of eagletwin around them."""
    _, verdict = run(busy_case, _at_verify(f"import torch; {made}"))
    assert (verdict.status, verdict.rule) == ("unknown", "engine.crash"), verdict


def test_a_scheduler_that_never_finishes_its_requests_is_a_hang(run: Runner, busy_case: Case) -> None:
    deaf = Edit(
        target="sglang.srt.managers.schedule_batch.Req.finished",
        match="return self.finished_reason is not None",
        replacement="return False",
    )
    short = msgspec.structs.replace(busy_case, requests=(Request(id="a", prompt=(1,), max_new_tokens=2),))
    _, verdict = run(short, deaf)
    assert (verdict.status, verdict.rule) == ("unknown", "engine.hang")
    assert "iterations, and these are not finished: a" in verdict.reason


def test_a_divergence_before_a_crash_is_what_counts(run: Runner, busy_case: Case) -> None:
    wrong = Edit(
        target="sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft_forward",
        match="topk_index = torch.argmax(",
        replacement="topk_index = torch.argmin(",
    )
    trace, verdict = run(busy_case, wrong, _at_verify("raise ValueError('later')"))
    assert (verdict.status, verdict.rule) == ("diverged", "draft.proposal")
    assert trace.header.ending.kind == "crashed"


@pytest.mark.long
def test_a_divergence_before_a_hang_is_what_counts(run: Runner, busy_case: Case) -> None:
    wrong = Edit(
        target="sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft_forward",
        match="topk_index = torch.argmax(",
        replacement="topk_index = torch.argmin(",
    )
    trace, verdict = run(busy_case, wrong, _at_verify("import time; time.sleep(10**6)"), limits=Limits(step=STEP))
    assert (verdict.status, verdict.rule) == ("diverged", "draft.proposal")
    assert (trace.header.ending.kind, trace.header.ending.detail) == ("hung", "no end of the step within 6 s")


def test_an_engine_process_that_is_gone_is_a_verdict_and_is_built_again(
    host: Host, busy_case: Case, tmp_path_factory: pytest.TempPathFactory
) -> None:
    dying = Patch(name="dying", edits=(_at_verify("import os; os.kill(os.getppid(), 9)"),))
    trace = host.engine(busy_case, (dying,)).run(busy_case, tmp_path_factory.mktemp("gone"))
    assert trace.header.ending.kind == "crashed"
    assert "engine process itself is gone" in trace.header.ending.detail
    assert host.engine(busy_case).run(busy_case, tmp_path_factory.mktemp("after")).header.ending.kind == "finished"


@pytest.mark.long
def test_a_zygote_that_was_killed_costs_the_next_case_nothing(
    busy_case: Case, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with Host() as host:
        host.engine(busy_case)
        assert host._zygote is not None
        host._zygote.kill()
        trace = host.engine(busy_case).run(busy_case, tmp_path_factory.mktemp("after"))
    assert trace.header.ending.kind == "finished"


def test_a_stub_that_is_called_names_itself(run: Runner, busy_case: Case) -> None:
    call = Edit(
        target=VERIFY,
        match="return run_eagle_verify(",
        replacement="import sgl_kernel; sgl_kernel.some_op(1)\nreturn run_eagle_verify(",
    )
    _, verdict = run(busy_case, call)
    assert verdict.rule == "engine.crash"
    assert "sgl_kernel.some_op was called" in verdict.reason


def test_a_stub_whose_exception_is_swallowed_is_not_silent(run: Runner, busy_case: Case) -> None:
    call = Edit(
        target=VERIFY,
        match="return run_eagle_verify(",
        replacement="import sgl_kernel\ntry:\n    sgl_kernel.some_op(1)\nexcept Exception:\n    pass\nreturn run_eagle_verify(",
    )
    _, verdict = run(busy_case, call)
    assert verdict.status == "unknown"
    assert "sgl_kernel.some_op" in verdict.reason


@pytest.mark.parametrize("of", ["busy_trace", "tree_trace"])
def test_a_run_that_ended_anywhere_did_nothing_wrong_before(request: pytest.FixtureRequest, of: str) -> None:
    """Of the last rows some things are unknown then: which token comes next, which nodes were accepted."""
    trace: Trace = request.getfixturevalue(of)
    ending = Ending(kind="crashed", detail="it fell")
    for number in range(1, 60):
        header = replace(trace.header, records=trace.header.records[:number], ending=ending)
        tensors = {name: tensor for name, tensor in trace.tensors.items() if int(name.partition(".")[0]) < number}
        verdict = judge(Trace(header, tensors))
        assert (verdict.status, verdict.rule) == ("unknown", "engine.crash"), (trace.header.records[number - 1], verdict)
