"""The ledger on the real worker and on published wheels: red without each fix, green with it."""

import dataclasses
import os
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER, PROBES
from eagletwin.cases.reach import on_a_cpu, why_unreachable
from eagletwin.harness.check import confirm
from eagletwin.harness.check.argument import argue
from eagletwin.harness.check.confirm import check
from eagletwin.harness.check.trials import ask
from eagletwin.harness.commands.prove.proof import prove, prove_on_wheels, show_claim
from eagletwin.harness.core.case import Case, EngineSettings, Request, SGLangSettings
from eagletwin.harness.core.run_spec import DEFAULT_RUN, RunSpec
from eagletwin.harness.core.trace import INNER, Trace
from eagletwin.harness.engines.host import Host
from eagletwin.harness.judge.judge import judge

from ..rows import first_of_each, spread

# The ledger on the real worker: red without each fix, green with it; and what boundary records alone can see.


REACHED = sorted(name for name, entry in LEDGER.items() if not why_unreachable(entry, on_a_cpu(entry)))
# A divergence is confirmed by two more runs: here that of the first entry of each rule. The same code confirms each of them.
CONFIRMED = first_of_each(REACHED, lambda name: LEDGER[name].rule)


@pytest.mark.parametrize("name", REACHED)
def test_an_entry_is_red_without_its_fix_and_green_with_it(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    entry = LEDGER[name]
    if name not in CONFIRMED:
        monkeypatch.setattr(confirm, "REPLAYS", 0)
    mode = on_a_cpu(entry)
    [proof] = prove(host.beside(mode=mode), [entry], tmp_path, RunSpec(mode=mode))
    assert proof.holds, (proof.green.verdict, proof.red.verdict)
    assert [side.folder.name for side in (proof.green, proof.red)] == [f"{name}-green", f"{name}-red"]  # as words.md calls them
    for part in ("case.json", "trace.json", "trace.safetensors", "verdict.json", "report.txt", "report.html", "engine.log"):
        assert (proof.red.folder / part).is_file()
    if name in CONFIRMED and not entry.rule.startswith("engine."):
        assert (proof.red.folder / "replay-2" / "trace.json").is_file()  # seen alike three times


WHERE = {
    "25015": ("draft decode step 1", "index     row 1"),
    "26329": ("draft extend (prefill)", "index     row 1"),
    "26997-kv": ("after draft extend (decode)", "index     row 2"),
    "26997-tokens": ("when verify returned", "index     committed token 1"),
    "26997-hidden": ("when verify returned", "index     state of accepted node 1, moved to the front"),
    "26997-bonus": ("when verify returned", "index     token committed after accepted node 0"),
    "8409": ("draft decode step 2", "index     state that row 2, branch"),
    "multi-layer-chunk-tail-2": ("draft extend (prefill), layer 0", "index     row 1"),
    "multi-layer-chunk-tail-3": ("draft extend (prefill), layer 0", "its tail row 2 must consume x[3]"),
    "multi-layer-topk-windows": ("draft extend (prefill), layer 1", "index     row 0"),
    "boundary-kv": ("after draft extend (decode), layer 1", "index     row 0"),
    "row-overflow": ("when draft() returned", "index     row of req_to_token, column 0"),
}


@pytest.mark.parametrize("name", spread(sorted(WHERE), lambda name: LEDGER[name].rule))
def test_the_argument_says_where_and_why(host: Host, tmp_path: Path, name: str) -> None:
    entry = LEDGER[name]
    trace = host.engine(entry.case, entry.red.patches).run(entry.case, tmp_path)
    text = argue(trace.header, judge(trace, view=entry.red.view))
    for part in (entry.rule, "round 0", *WHERE[name], "expected", "actual", "Must hold"):
        assert part in text, text


@pytest.mark.long
@pytest.mark.parametrize(
    ("other", "most", "kernel"),
    [("indices-overflow", 7, "assign_req_to_token_pool"), ("row-overflow", 4, "generate_draft_decode_kv_indices")],
)
def test_how_many_steps_a_chain_needs_to_overflow(host: Host, tmp_path: Path, other: str, most: int, kernel: str) -> None:
    """What the entries and docs/findings say of chains. With the other's remedy `most` steps hold, and one more does not."""
    case = Case(
        name="to-the-end",
        model="llama-tiny",
        num_steps=most,
        requests=(Request(id="a", prompt=(7, 11, 10, 46, 21, 39, 32, 27, 4), max_new_tokens=5),),
        engine=EngineSettings(sglang=SGLangSettings(context_length=16)),
    )
    remedy = LEDGER[other].remedy
    assert remedy is not None
    trace = host.engine(case, (remedy,)).run(case, tmp_path)
    assert judge(trace).status == "equal"
    last = max(record.numbers["seq_len"] for record in trace.header.records if record.stage == "draft")
    assert last == 16 - 4  # as near to the end of the context as a round can begin
    (tmp_path / "longer").mkdir()
    longer = msgspec.structs.replace(case, num_steps=most + 1)
    first = judge(host.engine(longer, (remedy,)).run(longer, tmp_path / "longer")).first
    assert first is not None
    assert first.rule == "kernel.memory"
    assert kernel in first.actual


def test_a_live_bug_that_no_longer_shows_is_no_proof(host: Host, tmp_path: Path) -> None:
    """As if SGLang had fixed it: the red side is not red."""
    entry = dataclasses.replace(
        LEDGER["row-overflow"], case=msgspec.structs.replace(LEDGER["row-overflow"].case, engine=EngineSettings())
    )
    [proof] = prove(host, [entry], tmp_path)
    assert proof.red.verdict.status == "equal"
    assert not proof.holds
    assert proof.exit_code == 1


@pytest.mark.parametrize(("name", "rule"), [("25015", "draft.scratch_kv"), ("26329", "draft.kv")])
def test_stored_rows_show_the_fault_when_nothing_inside_a_forward_is_seen(
    host: Host, tmp_path: Path, name: str, rule: str
) -> None:
    entry = LEDGER[name]
    trace = host.engine(entry.case, entry.red.patches).run(entry.case, tmp_path)
    verdict = judge(trace, frozenset({"draft.input_ids", "draft.positions", "draft.hidden_in"}))
    assert (verdict.status, verdict.rule) == ("diverged", rule)
    # and with the inner records really absent, as under a replayed CUDA graph, and no rule switched off
    kept = [n for n, record in enumerate(trace.header.records) if record.stage not in INNER]
    records = tuple(trace.header.records[n] for n in kept)
    tensors = {f"{at}.{part}": trace.tensor(n, part) for at, n in enumerate(kept) for part in trace.header.records[n].tensors}
    header = msgspec.structs.replace(trace.header, records=records, inner=False)
    assert judge(Trace(header, tensors)).rule == rule


def test_a_finding_that_a_remedy_of_the_ledger_makes_equal_is_named(host: Host, tmp_path: Path) -> None:
    """Two bugs break the rule in this release: the name of the rule alone would not tell which it is."""
    case = replace(LEDGER["retracted-chunk-tail"].case, name="found")
    outcome = check(host.engine(case), case, tmp_path, host=host)
    assert outcome.verdict.status == "diverged"
    assert outcome.known == "retracted-chunk-tail"
    assert "It may be retracted-chunk-tail: with its remedy this case is equal" in outcome.report


@pytest.mark.long
def test_a_finding_that_no_remedy_makes_equal_is_named_by_none(host: Host, tmp_path: Path) -> None:
    entry = LEDGER["26329"]
    patches = entry.red.patches
    run = RunSpec(patches=patches)
    outcome = check(host.engine(entry.case, patches), entry.case, tmp_path, run, host=host)
    assert (outcome.verdict.rule, outcome.known) == ("draft.input_ids", "")
    assert "It may be" not in outcome.report


# The ledger's probes on this SGLang: green as it is where the bug is fixed, red without the fix; of a live one the reverse.


TOLD_APART = [name for name, probe in PROBES.items() if probe.revert is not None or probe.remedy is not None]


@pytest.mark.parametrize("name", TOLD_APART)
def test_a_probe_is_red_with_its_bug_and_green_without(host: Host, name: str) -> None:
    probe = PROBES[name]
    change = probe.revert or probe.remedy
    assert change is not None
    released, changed = ask(probe, host), ask(probe, host, (change,))
    green, red = (released, changed) if probe.fixed else (changed, released)
    assert green.status == "equal"
    assert (red.status, red.rule) == ("diverged", probe.rule)


def test_a_refused_plan_shows_what_the_step_was_handed(host: Host) -> None:
    """As on 0.5.12: the slots of both requests' three steps, and no plan."""
    probe = PROBES["26239"]
    assert probe.revert is not None
    first = ask(probe, host, (probe.revert,)).first
    assert first is not None
    assert first.actual == str(probe.call.given["slots"])


# The claim that `prove` shows first: the same tokens with a fix and without it, and fewer accepted drafts.


def test_tokens_are_the_same_and_accepted_drafts_are_not(host: Host) -> None:
    text = show_claim(host, LEDGER["26329"], DEFAULT_RUN)
    assert len(text.splitlines()) <= 12
    tokens = [line for line in text.splitlines() if line.startswith("  tokens ")]
    drafts = [line for line in text.splitlines() if line.startswith("  accepted drafts ")]
    assert tokens[0] == tokens[1]
    assert drafts[0].endswith(" = 26 in 14 rounds")
    assert drafts[1].endswith(" = 23 in 17 rounds")


def test_an_entry_without_such_a_case_shows_nothing(host: Host) -> None:
    assert show_claim(host, LEDGER["25015"], DEFAULT_RUN) == ""


# Where published wheels cannot be had. tests/engine/test_releases.py proves fixes on them.


@pytest.mark.long  # tests/harness/test_exit_codes.py has a release that cannot be fetched
def test_without_the_wheels_nothing_is_proven_and_the_reason_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAGLETWIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    [proof] = prove_on_wheels([LEDGER["25015"]], tmp_path)
    assert not proof.holds
    assert proof.exit_code == 125
    assert "0.5.11: 0.5.11 could not be fetched" in proof.why
    assert "0.5.12: 0.5.12 could not be fetched" in proof.why
