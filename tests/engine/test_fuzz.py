"""The search: what it finds, how small it gets, which findings are one, and that an unmodified release has none."""

import json
import re
import runpy
import signal
import subprocess
import sys
from itertools import islice
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from eagletwin.cases.blocks import SearchConstraints
from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.check.known import KnownBugMatcher
from eagletwin.harness.check.trials import Trials
from eagletwin.harness.commands.fuzz.coverage import TOPICS, feature_filter
from eagletwin.harness.commands.fuzz.looking import CaseSeen
from eagletwin.harness.commands.fuzz.options import Plan
from eagletwin.harness.commands.fuzz.report import document_of, exit_code, finding_text, write_summary
from eagletwin.harness.commands.fuzz.search import Fuzz
from eagletwin.harness.commands.fuzz.shrinking import Finding, ShrinkCallbacks, Shrinking
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.core.verdict import Verdict
from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.source import INSTALLED
from eagletwin.harness.families.valid import decode_case, read_case
from eagletwin.harness.judge.judge import judge
from eagletwin.harness.page.render import text_of

from ..harness.doors import ctrl_c_works
from ..rows import long
from . import forked

# The search: what it finds, how small it gets, and what becomes of findings that do not hold still.


# A search that draws nothing that has to be asked for, where few known bugs show
_ALWAYS = ("chains", "trees", "eagle", "eagle3", "plain-draft", "layers", "latent", "experts", "windows", "states", "sampling")
PLAIN = feature_filter([], [topic.key for topic in TOPICS if topic.key not in _ALWAYS])
GREEDY = SearchConstraints(held={"model": "llama-tiny"}, sampling="", wanted=PLAIN)
FORWARD = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft_forward"
ARGMAX = "topk_index = torch.argmax("


def search(host: Host, folder: Path, patch: Patch, *, shrink_seconds: float = 120.0, asked: SearchConstraints = GREEDY) -> Fuzz:
    trials = Trials(host, RunSpec(patches=(patch,)))
    return Fuzz(
        trials,
        folder,
        Plan(seed=0, seconds=1e9, max_cases=200, shrink_seconds=shrink_seconds, command="eagletwin fuzz", asked=asked),
    )


def first(fuzz: Fuzz) -> Finding:
    return next(fuzz.search())


def shrunk(host: Host, folder: Path, case: Case, run: RunSpec) -> Finding:
    """What a search makes of a case that it has seen go wrong."""
    matcher = KnownBugMatcher(host, run)
    trial = matcher.trials().look_alone(case)
    assert trial.signature is not None
    seen = CaseSeen(block=0, case=case, verdict=trial.verdict, signature=trial.signature)
    teller = ShrinkCallbacks(aside=lambda *_: None, news=print, look=print)
    shrinking = Shrinking(seen, matcher, folder / "finding-1", seconds=120.0, seed=0, command="", teller=teller)
    shrinking.shrink(None)
    return shrinking.conclude(1, 0.0)


@pytest.mark.parametrize(
    ("entry", "smallest"),
    [
        # one request of one token and the fewest steps that decode; the bonus token and one more
        *long(("25015", {"num_steps": 2, "prompt": 1, "max_new_tokens": 2, "chunks": ()})),
        # one request in two chunks of one token
        ("26329", {"num_steps": 1, "prompt": 2, "max_new_tokens": 1, "chunks": (1,)}),
    ],
)
@pytest.mark.parametrize("searched", [*long(True), False])
def test_a_reverted_fix_is_found_and_gets_as_small_as_it_can(
    host: Host, tmp_path: Path, entry: str, smallest: dict[str, object], searched: bool
) -> None:
    """From a generated case; or from the entry's own, with more of everything, which takes a tenth of the looks."""
    if searched:
        finding = first(search(host, tmp_path, LEDGER[entry].revert))
    else:
        known = LEDGER[entry]
        [request] = known.case.requests
        more = replace(request, prompt=(*request.prompt, 5), max_new_tokens=request.max_new_tokens + 1)
        wide = {"num_steps": known.case.num_steps + 1, "chunked_prefill_size": 64, "chunks": (2,)}
        case = replace(known.case, requests=(more,), exercises=(), **wide)
        assert known.revert is not None
        finding = shrunk(host, tmp_path, case, RunSpec(patches=(known.revert,)))
    assert finding.signature.rule == LEDGER[entry].rule
    assert finding.outcome.verdict.status == "diverged"
    assert not finding.partial
    assert not finding.apart
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


def test_a_finding_that_the_base_has_says_that_it_is_not_the_change(host: Host, tmp_path: Path) -> None:
    live = LEDGER["multi-layer-chunk-tail-2"]
    worker = "sglang.srt.speculative.multi_layer_eagle_worker_v2.MultiLayerEagleDraftWorker._draft_extend_for_prefill"
    call = "self._seed_boundary_kv_stash("
    harmless = Patch(name="harmless", edits=(Edit(target=worker, match=call, replacement=f"pass; {call}"),))
    finding = shrunk(host, tmp_path, replace(live.case, exercises=()), RunSpec(patches=(harmless,)))
    assert finding.signature.rule == live.rule
    said = f"SGLang {INSTALLED.called} records the same in this case: it is not the change."
    assert finding.apart == said
    assert said in " ".join(finding_text(finding, 100).split())


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
    one_draft_a_round = SearchConstraints(held={"model": "llama-tiny", "topk": 1, "num_steps": 2}, sampling="")
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
    finding = first(search(host, tmp_path, dies, shrink_seconds=0.0))  # test_fuzz.py has crashes get small
    assert (finding.signature.rule, finding.outcome.verdict.status) == ("engine.crash", "unknown")
    assert "exited with status 3" in finding.outcome.verdict.reason


@pytest.mark.long
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
    finding = shrunk(host, tmp_path, case, RunSpec())
    case = finding.outcome.case
    assert (finding.signature.rule, finding.partial) == ("kernel.memory", False)
    assert finding.signature.kernel
    assert (case.chunks, case.events) == ((), ())
    assert max(len(one.prompt) + one.max_new_tokens for one in case.requests) == 14  # up to the end of the context


# Which findings are one: those of one rule, stage and layer or kernel; crashes of one exception and function.


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


def findings_search(
    host: Host, folder: Path, *edits: Edit, findings: int, cases: int = 120, shrink_seconds: float = 120.0
) -> tuple[Fuzz, list[Finding]]:
    plan = Plan(seed=0, seconds=1e9, max_cases=cases, shrink_seconds=shrink_seconds, command="eagletwin fuzz", asked=GREEDY)
    fuzz = Fuzz(Trials(host, RunSpec(patches=(Patch(name="planted", edits=edits),))), folder, plan)
    return fuzz, list(islice(fuzz.search(), findings))


@pytest.mark.long
def test_two_bugs_of_one_rule_in_two_stages_are_two_findings_and_each_shrinks_to_its_own(host: Host, tmp_path: Path) -> None:
    _, findings = findings_search(host, tmp_path, ONE_TOKEN_PREFILL, DECODE, findings=2)
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
    fuzz, findings = findings_search(host, tmp_path, RAISES_IN_PREFILL, RAISES_IN_DRAFT, findings=2, shrink_seconds=0.0)
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
    fuzz, findings = findings_search(host, tmp_path, DECODE, findings=2, cases=8, shrink_seconds=0.0)
    [finding], [aside] = findings, list(fuzz.asides.values())
    assert any(line.startswith("Not minimal: time was up.") for line in finding_text(finding, 80).split("\n"))
    assert aside.signature == finding.signature
    assert aside.cases > 0
    assert fuzz.trials.look_alone(read_case(Path(aside.example))).signature == aside.signature
    text = text_of(document_of(write_summary(tmp_path, fuzz, [one.facts for one in findings]), tmp_path), 400, verbose=True)
    assert re.search(rf"{re.escape(str(finding.signature))} +│ {aside.cases} +│ as finding-1 +│ set-aside/1-", text)
    summary = json.loads((tmp_path / "summary.json").read_text())
    [one] = summary["set_aside"]
    assert (one["cases"], one["example"]) == (aside.cases, str(aside.example))
    assert summary["findings"][0]["signature"] == one["signature"]


@pytest.mark.long
def test_what_a_smaller_case_shows_in_place_of_what_is_shrunk_is_set_aside_too(host: Host, tmp_path: Path) -> None:
    fuzz, [finding] = findings_search(host, tmp_path, SMALLEST_RAISES, DECODE, findings=1)
    assert finding.signature.rule == "draft.hidden_in"
    others = [aside for aside in fuzz.asides.values() if aside.signature != finding.signature]
    assert others
    for aside in others:
        assert read_case(Path(aside.example)).requests
    text = text_of(document_of(write_summary(tmp_path, fuzz, [finding.facts]), tmp_path), 400, verbose=True)
    assert re.search(r"│ on the way to a finding +│ set-aside/1-", text)


# Cases that the reference cannot decide end no search: they are set aside, counted and said.


@pytest.mark.parametrize(("every", "word", "code"), [*long((10, "NOTHING NEW", 0)), (5, "CANNOT TELL", 125)])
def test_a_search_goes_on_and_says_how_many_it_could_not_decide(
    host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, word: str, code: int
) -> None:
    ran = 0

    def sometimes(trace: Trace, *how: object) -> Verdict:
        nonlocal ran
        ran += 1
        verdict = judge(trace, *how)  # type: ignore[arg-type]
        reason = f"{ran} of 30 choices are ties"
        return verdict if ran % every else msgspec.structs.replace(verdict, status="unknown", undecided=True, reason=reason)

    monkeypatch.setattr("eagletwin.harness.check.trials.judge", sometimes)
    plan = Plan(seed=2, seconds=1e9, max_cases=10, shrink_seconds=0.0, command="eagletwin fuzz", asked=GREEDY)
    looking = Fuzz(Trials(host), tmp_path, plan)
    found = list(looking.search())
    assert not found
    assert (looking.tally.cases, looking.tally.undecided) == (10, 10 // every)
    [aside] = looking.asides.values()
    assert (aside.undecided, aside.cases) == (True, 10 // every)
    assert read_case(Path(aside.example)).requests
    text = text_of(document_of(write_summary(tmp_path, looking, found), tmp_path), 400, verbose=True)
    assert text.startswith(word)
    share = f"The reference could not decide {10 // every} of them ({100 // every}%)"
    assert share + ("." if code == 0 else ", more than the 10% that may be.") in text
    assert re.search(rf"unknown \(# of # choices are ties\) +│ {10 // every} +│ undecided +│ set-aside/1-", text)
    assert exit_code(looking, found) == code
    assert msgspec.json.decode((tmp_path / "summary.json").read_bytes())["tally"]["undecided"] == 10 // every


# Generated cases on the unmodified release: nothing is found, few ties, and they reach what they should.
# `make test` runs a few dozen; `make sweep` runs 1,000 (docs/records/detection.md).


CASES = Path(__file__).parent / "cases"

# Feature -> at least this share of the cases that exercise it, over the searches below.
ENOUGH = {
    "chunked_prefill": 0.3,
    "chunk_tail_differs": 0.3,
    "shared_chunk": 0.05,
    "one_token_tail": 0.05,
    "draft_decode": 0.3,
    "rejection": 0.4,
    "accept_all": 0.35,
    "accept_some": 0.25,
    "look_ahead_rejected": 0.05,
    "tree": 0.3,
    "path_not_in_front": 0.15,
    "branch_changes_parent": 0.1,
    "branch_holes": 0.1,
    "batch": 0.3,
    "batch_grows": 0.08,
    "batch_shrinks": 0.15,
    "early_stop": 0.05,
    "prompt_ends_in_page": 0.1,
    "page_crossed_in_draft": 0.1,
    "radix_hit": 0.08,
    "radix_hit_in_page": 0.01,
    "retraction": 0.08,
    "retraction_in_decode": 0.03,
    "abort_in_prefill": 0.01,
    "abort_in_decode": 0.04,
    "sampled_verify": 0.15,
    "coin_refuses": 0.05,
    "mixed_sampling": 0.03,
}


def test_nothing_is_found_in_the_unmodified_release(host: Host, tmp_path: Path) -> None:
    search = Fuzz(Trials(host), tmp_path, Plan(seed=6, seconds=1e9, max_cases=10, shrink_seconds=0.0, command=""))
    assert [(finding.signature, finding.outcome.report) for finding in search.search()] == []
    assert search.tally.cases == search.tally.statuses["equal"] + search.tally.statuses["known"] + search.tally.undecided == 10
    assert search.tally.undecided <= 1
    assert search.tally.statuses["equal"] >= 6


@pytest.mark.long
def test_nothing_is_found_in_the_unmodified_release_and_much_is_reached(host: Host, tmp_path: Path) -> None:
    plan = Plan(seed=5, seconds=1e9, max_cases=100, shrink_seconds=0.0, command="")
    search = Fuzz(Trials(host), tmp_path, plan)
    assert [(finding.signature, finding.outcome.report) for finding in search.search()] == []
    tally = search.tally
    assert tally.cases == tally.statuses["equal"] + tally.statuses["known"] + tally.undecided == 100
    assert tally.undecided <= 2  # sampling: where top_k and top_p cut
    assert sum(bug.mended > 0 for bug in tally.known.values()) >= 3
    assert not search.unstarted
    assert tally.ties < 0.02 * tally.choices  # a tree ranks tokens of small probability, which lie close to each other
    assert {name: tally.exercised[name] for name, share in ENOUGH.items() if tally.exercised[name] < share * tally.cases} == {}
    # every accept length 1..num_steps+1, for every num_steps that more than a handful of cases had
    often = {width for length, cases in tally.accept_lens.items() if cases > 10 for width in [int(length.split()[-1])]}
    assert len(often) >= 3
    assert {f"{length} of {width}" for width in often for length in range(1, width + 1)} <= set(tally.accept_lens)


# Cases on which the judge once cried wolf: another request's prefix was cached first, so SGLang gave a request's duplicate
# slots away between two batches; the scheduler stood still between two chunks, whose state it hands over when it goes on.
@pytest.mark.parametrize("name", sorted(path.stem for path in CASES.glob("*.json")))
def test_a_case_that_once_raised_a_false_alarm_is_equal(host: Host, tmp_path: Path, name: str) -> None:
    case = read_case(CASES / f"{name}.json")
    assert judge(host.engine(case).run(case, tmp_path)).status == "equal"
