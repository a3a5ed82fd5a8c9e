"""A worker of a campaign, on SGLang's own worker: it goes on in a block that another one left, and what it makes small is told
as the driver names it."""

import os
from pathlib import Path

import pytest

from eagletwin.cases.blocks import BLOCK
from eagletwin.harness.commands.campaign.command import begun
from eagletwin.harness.commands.campaign.messages import BlockJob, InquiryJob, Packed, packed, read_answer
from eagletwin.harness.commands.campaign.worker import Worker
from eagletwin.harness.commands.fuzz.looking import CaseSeen
from eagletwin.harness.commands.fuzz.options import SearchOptions
from eagletwin.harness.commands.run_options import spec_of
from eagletwin.harness.engines.host import Host


def test_a_worker_goes_on_in_a_block_and_makes_a_finding_small_elsewhere(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a worker moves to a scratch folder
    run = spec_of({"revert": ["25015"]})
    options = SearchOptions(model="llama-tiny", topk=1, sampling="none", shrink_minutes=0.0, run=run)
    worker = Worker(packed(begun(options, [""], None)), host)
    assert Path.cwd() != tmp_path

    def seen(job: BlockJob) -> list[CaseSeen]:
        told = [read_answer(answer) for answer in worker.run(packed(job))]
        assert all(isinstance(one, CaseSeen) for one in told)
        return [one for one in told if isinstance(one, CaseSeen)]

    whole = seen(BlockJob(0, 1))
    assert len(whole) == BLOCK
    rest = seen(BlockJob(0, 1, tuple(whole[:2])))
    assert [(one.case, one.signature) for one in rest] == [(one.case, one.signature) for one in whole[2:]]

    first = next(one for one in whole if one.signature is not None)
    job = InquiryJob(leg=0, number=3, seen=first, folder="../there/campaign-0/finding-3", cases=2, seconds=1.0, columns=80)
    [found] = [read_answer(answer) for answer in worker.run(packed(job))]
    assert isinstance(found, Packed)
    assert (found.status, found.name, found.signature.rule) == ("diverged", "finding-3", "draft.positions")
    assert "folder: ../there/campaign-0/finding-3/minimal" in found.text
    assert {"found.json", "minimal/case.json", "minimal/repro.py", "minimal/report.html", "minimal/verdict.json"} <= set(
        found.files
    )
    scratch = os.getcwd().encode()
    assert not [name for name, data in found.files.items() if scratch in data and not name.endswith("engine.log")]
    assert not list(Path("..").glob("there/campaign-0/*"))
    worker.close()
    assert not Path(os.fsdecode(scratch)).exists()
