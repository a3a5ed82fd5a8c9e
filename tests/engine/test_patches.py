"""Patches apply as a whole or not at all, and never to files on disk."""

import re
from pathlib import Path

import msgspec
import pytest
from msgspec import UNSET
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.errors import HarnessError
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.engines.host import Host
from eagletwin.harness.judge.judge import judge
from eagletwin.harness.judge.trace_diff import diff

from ..lab.bench.speed import BARE, rate_case
from .conftest import Runner
from .warm import eagletwin

FORWARD = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft_forward"

UNFIT = {
    "a text that does not occur": (
        Patch(name="p", edits=(Edit(target=FORWARD, match="no such text", replacement=""),)),
        "occurs 0 times",
    ),
    "a text that occurs twice": (
        Patch(name="p", edits=(Edit(target=FORWARD, match="forward_batch", replacement=""),)),
        "times, not once",
    ),
    "a function that does not exist": (
        Patch(name="p", edits=(Edit(target=FORWARD + "_x", match="a", replacement=""),)),
        "does not exist",
    ),
    "a module of kernels that this machine lacks": (
        Patch(
            name="p", edits=(Edit(target="sglang.srt.models.qwen3_5.Qwen3_5ForCausalLM.forward", match="a", replacement=""),)
        ),
        "its module cannot be imported here: AttributeError",
    ),
    "a class": (Patch(name="p", edits=(Edit(target=FORWARD.rpartition(".")[0], match="a", replacement=""),)), "not a function"),
    "source that does not parse": (
        Patch(name="p", edits=(Edit(target=FORWARD, match="topk_index = torch.argmax(", replacement="topk_index = (("),)),
        "does not parse",
    ),
    "source that does not compile": (
        Patch(
            name="p",
            edits=(Edit(target=FORWARD, match="topk_index = torch.argmax(", replacement="topk_index = await torch.argmax("),),
        ),
        "does not compile: 'await' outside async function",
    ),
    "a change that is there": (
        Patch(name="p", edits=(Edit(target=FORWARD, match="torch.argmax(", replacement="topk_index = torch.argmax("),)),
        "has 'topk_index = torch.argmax(' already",
    ),
    "a pull request that SGLang cannot revert": (Patch(name="p", sglang_toggle=1), "cannot revert PR #1"),
    "a toggle whose text has moved on": (Patch(name="p", sglang_toggle=27338), "cannot revert PR #27338"),
}


@pytest.mark.parametrize("what", sorted(UNFIT))
def test_a_patch_that_does_not_fit_is_an_error_and_never_a_skip(host: Host, busy_case: Case, what: str) -> None:
    patch, cause = UNFIT[what]
    with pytest.raises(HarnessError, match="nothing is proven either way") as error:
        host.engine(busy_case, (patch,))
    assert cause in str(error.value)
    assert error.value.exit_code == 129


@pytest.mark.long
def test_a_patch_may_say_what_else_fits(host: Host, busy_case: Case, tmp_path: Path) -> None:
    """Edits of the first list that fit are taken back where another of it does not."""
    most = Edit(target=FORWARD, match="topk_index = torch.argmax(", replacement="topk_index = torch.argmin(")
    absent = Edit(target=FORWARD, match="no such text", replacement="")
    other = Edit(target=FORWARD, match="topk_index = torch.argmax(", replacement="topk_index = 0 * torch.argmax(")
    traces = {}
    patches = {"both": ((most, absent), (other,)), "other": ((other,), ()), "most": ((most,), (other,))}
    for name, (edits, otherwise) in patches.items():
        (tmp_path / name).mkdir()
        patch = Patch(name=name, edits=edits, otherwise=otherwise)
        traces[name] = host.engine(busy_case, (patch,)).run(busy_case, tmp_path / name)
    assert diff(traces["both"], traces["other"]).differences == []
    assert diff(traces["both"], traces["most"]).differences
    assert not traces["both"].header.idle_edits


def test_a_patched_engine_leaves_the_others_alone(host: Host, busy_case: Case, tmp_path: Path) -> None:
    edit = Edit(target=FORWARD, match="topk_index = torch.argmax(", replacement="topk_index = torch.argmin(")
    for name in ("patched", "plain"):
        (tmp_path / name).mkdir()
    patched = host.engine(busy_case, (Patch(name="least", edits=(edit,)),)).run(busy_case, tmp_path / "patched")
    plain = host.engine(busy_case).run(busy_case, tmp_path / "plain")
    assert patched.header.engine.patches == ("least",)
    assert plain.header.engine.patches == ()
    assert patched.header.records != plain.header.records


def test_a_patch_file_is_applied_by_the_command_line(tmp_path: Path) -> None:
    edit = Edit(target=FORWARD, match="topk_index = torch.argmax(", replacement="topk_index = torch.argmin(")
    (tmp_path / "least.json").write_bytes(msgspec.json.encode(Patch(name="least", edits=(edit,))))
    done = eagletwin("check", "25015", "--patch", "least.json", cwd=tmp_path)
    assert done.returncode == 1, done
    assert "with least" in done.stdout
    assert "draft.proposal" in done.stdout


def test_an_edit_that_was_never_called_is_unknown(run: Runner, busy_case: Case) -> None:
    """A patch that does not act would otherwise read as a fault that does not matter."""
    edit = Edit(
        target="sglang.srt.mem_cache.radix_cache.RadixCache.dec_lock_ref", match="if self.disable:", replacement="if True:"
    )
    _, verdict = run(busy_case, edit)
    assert verdict.status == "unknown"
    assert "RadixCache.dec_lock_ref, and none of its changed statements ran: sglang/srt/mem_cache/" in verdict.reason


def test_an_edit_in_a_branch_that_does_not_run_is_unknown(host: Host, tmp_path: Path) -> None:
    """Its function is called, and the edited statement does not run. Of several edits of a function one is enough."""
    entry = LEDGER["25015"]
    dead = Edit(target=FORWARD, match="draft_probs_list.append(probs)", replacement="draft_probs_list.append(0)")
    runs = Edit(target=FORWARD, match="topk_index = torch.argmax(", replacement="topk_index = 1 * torch.argmax(")
    for edits, status, seen in (((dead,), "unknown", False), ((dead, runs), "equal", False), ((runs,), "equal", True)):
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        trace = host.engine(entry.case, (Patch(name="some", edits=edits),)).run(entry.case, folder)
        verdict = judge(trace)
        assert (verdict.status, verdict.vacuous) == (status, status == "unknown")
        assert trace.header.idle_edits == ((FORWARD,) if status == "unknown" else ())
        assert trace.header.unreached_edits is UNSET
        assert bool(verdict.not_seen) == (status == "equal" and not seen)


def test_a_patch_of_two_functions_of_which_one_does_not_run_is_no_proof(host: Host, tmp_path: Path) -> None:
    """The case is equal, and says which statement did not run; `prove` asks for each function."""
    runs = Edit(target=FORWARD, match="topk_index = torch.argmax(", replacement="topk_index = 1 * torch.argmax(")
    lock = "sglang.srt.mem_cache.radix_cache.RadixCache.dec_lock_ref"
    idle = Edit(target=lock, match="if self.disable:", replacement="if True:")
    case = LEDGER["25015"].case
    trace = host.engine(case, (Patch(name="some", edits=(runs, idle)),)).run(case, tmp_path)
    verdict = judge(trace)
    assert verdict.status == "equal"
    assert re.fullmatch(
        r"1 of 2 changed statements did not run: sglang/srt/mem_cache/radix_cache.py:\d+ \(some\)", verdict.not_seen
    )
    assert [change.idle for change in trace.changes] == [(lock,)]


def test_two_patches_of_one_function_note_their_own_statements(host: Host, tmp_path: Path) -> None:
    """The second edit moves the lines of the first."""
    first = Edit(target=FORWARD, match="topk_index = torch.argmax(", replacement="topk_index = 1 * torch.argmax(")
    more = Edit(target=FORWARD, match="spec_info: EagleDraftInput = ", replacement="one = 1\nspec_info: EagleDraftInput = ")
    case = LEDGER["25015"].case
    patches = Patch(name="first", edits=(first,)), Patch(name="more", edits=(more,))
    changes = host.engine(case, patches).run(case, tmp_path).changes
    assert [(one.patch, len(one.places), len(one.executed)) for one in changes] == [("first", 1, 1), ("more", 1, 1)]


def test_a_reversal_by_sglangs_own_switch_that_was_never_called_is_unknown(host: Host, tmp_path: Path) -> None:
    """Layers of a multi-layer draft have a worker of their own: the switch of #25015 replaces nothing that it calls. Where it
    does replace what is called, one function is enough: the other is of CUDA graphs."""
    revert = LEDGER["25015"].revert
    assert revert is not None
    case = replace(LEDGER["25015"].case, model="llama-mtp", exercises=())
    (tmp_path / "layers").mkdir()
    trace = host.engine(case, (revert,)).run(case, tmp_path / "layers")
    assert trace.header.idle_edits == (
        FORWARD,
        "sglang.srt.speculative.eagle_draft_cuda_graph_runner.EAGLEDraftCudaGraphRunner.capture_one_shape",
    )
    verdict = judge(trace)
    assert (verdict.status, verdict.vacuous) == ("unknown", True)
    (tmp_path / "chain").mkdir()
    case = LEDGER["25015"].case
    assert not host.engine(case, (revert,)).run(case, tmp_path / "chain").header.idle_edits


@pytest.mark.long
def test_a_search_under_a_reversal_that_no_case_calls_cannot_tell(tmp_path: Path) -> None:
    done = eagletwin("fuzz", "--only", "llama-mtp", "--only", "topk=1", "--revert", "25015", "--cases", "2", cwd=tmp_path)
    assert done.returncode == 125, done
    assert done.stdout.startswith("CANNOT TELL")
    assert "2 unknown (or ran nothing of the change)" in " ".join(done.stdout.split())


def test_a_switch_of_sglang_is_taken_back_where_an_edit_of_the_patch_does_not_fit(host: Host, tmp_path: Path) -> None:
    """What is tried otherwise finds the release as it is."""
    entry = LEDGER["25015"]
    absent = Edit(target=FORWARD, match="no such text", replacement="")
    same = Edit(target=FORWARD, match="topk_index = torch.argmax(", replacement="topk_index = torch.argmax(")
    patch = Patch(name="switch", sglang_toggle=25015, edits=(absent,), otherwise=(same,))
    trace = host.engine(entry.case, (patch,)).run(entry.case, tmp_path)
    assert judge(trace).status == "equal"
    assert not trace.header.idle_edits


def test_an_edit_finds_what_a_switch_of_sglang_left(host: Host, tmp_path: Path) -> None:
    """Edits of a function that a switch replaced quote its new text."""
    entry = LEDGER["25015"]
    old, new = "forward_batch.positions.sub_(1)", "forward_batch.positions.sub_(0)"
    patch = Patch(name="both", sglang_toggle=25015, edits=(Edit(target=FORWARD, match=old, replacement=new),))
    trace = host.engine(entry.case, (patch,)).run(entry.case, tmp_path)
    assert judge(trace).status == "diverged"


def test_the_engine_that_the_benchmark_compares_with_records_nothing_of_a_case(host: Host, tmp_path: Path) -> None:
    """What trace and judge cost is measured against it, which is a switch of the adapter."""
    case = rate_case(0)
    trace = host.engine(case, (BARE,)).run(case, tmp_path)
    assert trace.header.ending.kind == "finished", trace.header.ending
    assert {record.stage for record in trace.header.records} <= {"finished", "cached"}
    assert not trace.header.idle_edits


def test_a_patch_changes_what_its_edits_name_in_one_release_or_another() -> None:
    newer, older = (Edit(target=f"a.{name}", match="x", replacement="y") for name in ("newer", "older"))
    assert Patch(name="both", edits=(newer, newer), otherwise=(older,)).targets == {"a.newer", "a.older"}
    assert Patch(name="toggle", sglang_toggle=1).targets == set()
