"""Known bugs in other models than their own, by the cases that docs/records/models.md was made of."""

import dataclasses
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from eagletwin.cases.entry import Entry
from eagletwin.cases.ledger import LEDGER
from eagletwin.cases.reach import Says
from eagletwin.harness.commands.prove import proof as in_model
from eagletwin.harness.commands.prove.proof import Proof, prove, prove_in_model, with_remedies
from eagletwin.harness.commands.prove.report import proof_facts
from eagletwin.harness.core.patch import Patch
from eagletwin.harness.core.run_spec import DEFAULT_RUN
from eagletwin.harness.engines.host import Host
from eagletwin.harness.families import RECIPES

from ..lab.models.survey import proven_in, read
from ..rows import spread

DOCS = Path(__file__).parents[2] / "docs/records"

# Of each family those that show most of it: a step's position, a chunk's tail, the accepted path, a branch, a prefix hit.
OF_ONE_HEAD = ("25015", "26329", "26997-kv", "8409", "10846")
OF_LAYERS = ("10846", "multi-layer-chunk-tail-2", "multi-layer-topk-path")
MODELS = ("deepseek-nextn", "qwen3-moe-eagle3", "qwen3-eagle3-deep", "gpt-oss-eagle3", "mimo-v2-window", "llama-mtp-chain")


def cells() -> list[tuple[str, str]]:
    return [(model, name) for model in MODELS for name in (OF_LAYERS if RECIPES[model].mtp_layers else OF_ONE_HEAD)]


@pytest.mark.parametrize(("model", "name"), spread(cells(), lambda cell: RECIPES[cell[0]].mtp_layers > 0))
def test_a_known_bug_shows_in_another_family(host: Host, tmp_path: Path, model: str, name: str) -> None:
    [entry] = [entry for entry in proven_in(DOCS, model) if entry.id == name]
    answer = read(DOCS)[model].answers[name]
    [proof] = prove(host, [entry], tmp_path, with_remedies(DEFAULT_RUN, answer.beside))
    assert isinstance(proof, Proof)
    assert proof.green.verdict.status == "equal", proof.green.verdict
    assert (proof.red.verdict.status, proof.red.verdict.rule) == ("diverged", answer.rule), proof.red.verdict


@pytest.mark.long
def test_other_prompts_are_tried_and_other_bugs_mended(host: Host, tmp_path: Path) -> None:
    """In several layers a row overflows only behind the live bug of their trees; an accepted path needs another prompt."""
    mended = prove_in_model(host, LEDGER["row-overflow"], "llama-mtp", tmp_path, DEFAULT_RUN)
    assert mended.own
    assert mended.beside
    other = prove_in_model(host, LEDGER["26997-kv"], "llama-gqa", tmp_path, DEFAULT_RUN)
    assert other.own
    assert other.proof.entry.case.requests != LEDGER["26997-kv"].case.requests


@pytest.mark.long
def test_a_live_bug_whose_candidate_fix_mends_another_one_is_not_proven_by_that(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By none of the prompts that are tried: three here, each of which shows the other bug."""
    every = in_model.port_entry
    tried = list[str]()

    def first_three(entry: Entry, model: str, says: Says) -> Iterator[Entry]:
        for one in islice(every(entry, model, says), 3):
            tried.append(one.id)
            yield one

    monkeypatch.setattr(in_model, "port_entry", first_three)
    own = LEDGER["multi-layer-chunk-tail-2"]
    assert own.remedy is not None
    planted = dataclasses.replace(own, id="planted", remedy=Patch(name="planted", edits=own.remedy.edits))
    for entry, another in ((own, ""), (planted, own.id)):
        [proof] = [prove_in_model(host, entry, "llama-mtp-chain", tmp_path, DEFAULT_RUN).proof]
        assert isinstance(proof, Proof)
        assert (proof.green.verdict.status, proof.red.verdict.status) == ("equal", "diverged")
        assert (proof.holds, proof.another, proof.exit_code) == (not another, another, 125 if another else 0)
    assert tried == [own.id, *["planted"] * 3]
    assert "equal with the candidate fix of multi-layer-chunk-tail-2 alone as well" in proof_facts(proof).why


def test_a_worker_that_never_calls_what_is_edited_gives_no_proof(host: Host, tmp_path: Path) -> None:
    result = prove_in_model(host, LEDGER["26997-kv"], "llama-mtp", tmp_path, DEFAULT_RUN)
    assert not result.proof.holds
    assert result.idle == ("sglang.srt.speculative.spec_utils.move_accept_tokens_to_target_kvcache",)
