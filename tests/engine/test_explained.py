"""Jobs of a plan on SGLang's own worker: known bugs are mended beforehand, or named afterwards, as a search does it."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.mode import CPU
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.run_spec import Limits

from ..lab.gpu.explained import explained
from ..lab.gpu.job import CaseResult, Job
from ..lab.gpu.jobs import run_job
from ..lab.gpu.tally import statuses_of
from ..rows import long


def _job(name: str, *, known: str = "", mend: bool = False) -> Job:
    remedies: dict[str, Patch] = {known: remedy} if (remedy := LEDGER[known or name].remedy) is not None else {}
    return Job(name=name, mode=CPU, cases=(LEDGER[name].case,), known=remedies, mend=mend)


@pytest.mark.long
def test_a_bug_that_was_not_foreseen_is_named_by_the_case(tmp_path: Path) -> None:
    done = run_job(_job("input-logprob-id", known="certain-node"), tmp_path)
    assert [(one.status, one.rule, one.known) for one in done.seen] == [("diverged", "output.logprobs", "input-logprob-id")]
    assert statuses_of(done) == {"known": 1}


@pytest.mark.long
def test_a_crash_that_is_a_known_bug_is_known(tmp_path: Path) -> None:
    done = run_job(_job("adaptive-rejection", known="certain-node"), tmp_path)
    assert [(one.rule, one.known) for one in done.seen] == [("engine.crash", "adaptive-rejection")]
    assert statuses_of(done) == {"known": 1}


@pytest.mark.long
def test_bugs_that_are_mended_do_not_show(tmp_path: Path) -> None:
    done = run_job(_job("input-logprob-id", known="input-logprob-id", mend=True), tmp_path)
    assert "input-logprob-id" in done.mended
    assert [(one.status, one.known) for one in done.seen] == [("equal", "")]


@pytest.mark.long
def test_a_patch_of_the_job_that_nothing_calls_is_no_remedy(tmp_path: Path) -> None:
    """A case says nothing of it, whatever was mended beside it."""
    never = "sglang.srt.speculative.spec_utils.load_token_map"
    idle = Patch(name="idle", edits=(Edit(target=never, match="weights_only=True", replacement="weights_only=False"),))
    job = replace(_job("input-logprob-id", known="input-logprob-id", mend=True), patches=(idle,))
    done = run_job(job, tmp_path)
    assert done.error == ""
    [seen] = done.seen
    assert seen.status == "unknown"
    assert seen.reason.startswith(f"the patch edits {never}, and none of its changed statements ran: sglang/srt/speculative/")


@pytest.mark.long
def test_what_no_known_bug_explains_stays_new(tmp_path: Path) -> None:
    undone = LEDGER["25015"]
    job = Job(name="undone", mode=CPU, cases=(undone.case,), patches=undone.red.patches, known=_job("certain-node").known)
    [seen] = run_job(job, tmp_path).seen
    assert (seen.status, seen.rule, seen.known) == ("diverged", undone.rule, "")


@pytest.mark.parametrize("several", [*long(False), True])
def test_a_case_that_is_right_without_a_remedy_is_not_known(several: bool) -> None:
    """What was seen of it took the cases before it, or the pauses of a race. It calls what each of these remedies changes."""
    names = ("tree-window", "certain-node") if several else ("tree-window",)
    known = {name: remedy for name in names if (remedy := LEDGER[name].remedy) is not None}
    job = Job(name="right", mode=CPU, cases=(LEDGER["25015"].case,), known=known)
    [seen] = explained(job, [CaseResult(case="right", status="diverged", rule="race")], Limits())
    assert (seen.status, seen.known) == ("diverged", "")


@pytest.mark.long
def test_a_case_that_is_wrong_in_another_way_again_is_not_known() -> None:
    job = _job("certain-node", known="certain-node")
    [seen] = explained(job, [CaseResult(case="other", status="diverged", rule="draft.kv")], Limits())
    assert (seen.status, seen.known) == ("diverged", "")
