"""Which findings are one: those of one rule, stage and layer or kernel; crashes of one exception and function."""

import json
import re
from itertools import islice
from pathlib import Path

import pytest

from eagletwin.harness.check.trials import Trials
from eagletwin.harness.commands.fuzz.options import Plan
from eagletwin.harness.commands.fuzz.report import document_of, finding_text, write_summary
from eagletwin.harness.commands.fuzz.search import Fuzz
from eagletwin.harness.commands.fuzz.shrinking import Finding
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.engines.host import Host
from eagletwin.harness.families.valid import read_case
from eagletwin.harness.page.text import text_of

from .plain import GREEDY

WORKER = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker"
PREFILL = "hidden_states=target_hidden_states,"
# The smallest case there is, one token in and one out, shows it: a search that looked at the rule alone would shrink to that.
ONE_TOKEN_PREFILL = Edit(
    target=f"{WORKER}._draft_extend_for_prefill",
    match=PREFILL,
    replacement="hidden_states=target_hidden_states * (2 if target_hidden_states.shape[0] == 1 else 1),",
)
DECODE = Edit(
    target=f"{WORKER}._draft_extend_for_decode",
    match="hidden_states=batch_result.logits_output.hidden_states,",
    replacement="hidden_states=batch_result.logits_output.hidden_states.roll(1, 0),",
)
RAISES_IN_PREFILL = Edit(
    target=f"{WORKER}._draft_extend_for_prefill",
    match=PREFILL,
    replacement="hidden_states=target_hidden_states if len(batch.reqs) == 1 else [][len(batch.reqs)],",
)
# Rarely drawn, and on the way to the smallest case that shows DECODE.
SMALLEST_RAISES = Edit(
    target=f"{WORKER}._draft_extend_for_prefill",
    match=PREFILL,
    replacement=(
        "hidden_states=[][0] if target_hidden_states.shape[0] == 1 and batch.reqs[0].sampling_params.max_new_tokens == 2 "
        "else target_hidden_states,"
    ),
)
RAISES_IN_DRAFT = Edit(
    target=f"{WORKER}.draft_forward",
    match="topk_index = torch.argmax(",
    replacement="[][out_cache_loc.numel()]\ntopk_index = torch.argmax(",
)


def search(
    host: Host, folder: Path, *edits: Edit, findings: int, cases: int = 120, shrink_seconds: float = 120.0
) -> tuple[Fuzz, list[Finding]]:
    plan = Plan(seed=0, seconds=1e9, max_cases=cases, shrink_seconds=shrink_seconds, command="eagletwin fuzz", asked=GREEDY)
    fuzz = Fuzz(Trials(host, RunSpec(patches=(Patch(name="planted", edits=edits),))), folder, plan)
    return fuzz, list(islice(fuzz.search(), findings))


@pytest.mark.long
def test_two_bugs_of_one_rule_in_two_stages_are_two_findings_and_each_shrinks_to_its_own(host: Host, tmp_path: Path) -> None:
    _, findings = search(host, tmp_path, ONE_TOKEN_PREFILL, DECODE, findings=2)
    assert {(one.signature.rule, one.signature.stage) for one in findings} == {
        ("draft.hidden_in", "draft.extend"),
        ("draft.hidden_in", "draft.extend_decode"),
    }
    for finding in findings:
        first = finding.outcome.verdict.first
        assert first is not None
        assert (first.rule, first.stage, first.layer) == ("draft.hidden_in", finding.signature.stage, finding.signature.layer)
        assert not finding.partial


@pytest.mark.long
def test_two_crashes_in_two_functions_are_two_findings(host: Host, tmp_path: Path) -> None:
    fuzz, findings = search(host, tmp_path, RAISES_IN_PREFILL, RAISES_IN_DRAFT, findings=2, shrink_seconds=0.0)
    assert {one.signature.rule for one in findings} == {"engine.crash"}
    assert {one.signature.cause for one in findings} == {
        f"IndexError in {WORKER}._draft_extend_for_prefill",
        f"IndexError in {WORKER}.draft_forward",
    }
    for finding in findings:
        assert finding.outcome.verdict.status == "unknown"
        assert finding.outcome.trace.header.ending.origin == finding.signature.cause
    assert len(fuzz.known) == 2


def test_what_is_seen_again_is_set_aside_with_an_example_that_shows_it(host: Host, tmp_path: Path) -> None:
    fuzz, findings = search(host, tmp_path, DECODE, findings=2, cases=8, shrink_seconds=0.0)
    [finding], [aside] = findings, list(fuzz.asides.values())
    assert any(line.startswith("Not minimal: time was up.") for line in finding_text(finding, 80).split("\n"))
    assert aside.signature == finding.signature
    assert aside.cases > 0
    assert fuzz.trials.look_alone(read_case(aside.example)).signature == aside.signature
    text = text_of(document_of(write_summary(tmp_path, fuzz, findings), tmp_path), 400, verbose=True)
    assert re.search(rf"{re.escape(str(finding.signature))} +│ {aside.cases} +│ as finding-1 +│ set-aside/1-", text)
    summary = json.loads((tmp_path / "summary.json").read_text())
    [one] = summary["set_aside"]
    assert (one["cases"], one["example"]) == (aside.cases, str(aside.example))
    assert summary["findings"][0]["signature"] == one["signature"]


@pytest.mark.long
def test_what_a_smaller_case_shows_in_place_of_what_is_shrunk_is_set_aside_too(host: Host, tmp_path: Path) -> None:
    fuzz, [finding] = search(host, tmp_path, SMALLEST_RAISES, DECODE, findings=1)
    assert finding.signature.rule == "draft.hidden_in"
    others = [aside for aside in fuzz.asides.values() if aside.signature != finding.signature]
    assert others
    for aside in others:
        assert read_case(aside.example).requests
    text = text_of(document_of(write_summary(tmp_path, fuzz, [finding]), tmp_path), 400, verbose=True)
    assert re.search(r"│ on the way to a finding +│ set-aside/1-", text)
