"""The text of an argument, whole: a change of a word here is a change of what users read."""

from msgspec.structs import replace

from eagletwin.harness.check.argument import argue
from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.core.records import Ending, EngineInfo, Header
from eagletwin.harness.core.trace import new_header
from eagletwin.harness.core.verdict import Divergence, Excuse, RequestShare, Verdict
from eagletwin.harness.families.weights import model_pair

DIGEST = model_pair("llama-tiny").digest
CASE = Case(name="pr-25015", model="llama-tiny", num_steps=2, requests=(Request(id="a", prompt=(7,), max_new_tokens=2),))


def header(ending: Ending, *patches: str) -> Header:
    engine = EngineInfo(name="sglang", version="0.5.23", device="cpu", kernels="", torch="", triton="", patches=patches)
    return new_header(CASE, DIGEST, engine, ending, ())


def test_a_divergence_names_request_round_stage_rule_index_both_values_and_the_broken_sentence() -> None:
    first = Divergence(
        rule="draft.positions",
        request="a",
        round=0,
        stage="draft.decode",
        step=1,
        iteration=1,
        index="row 1",
        expected="1",
        actual="2",
        why="M = 1 tokens are committed before the bonus token, and this is draft decode step 1.",
    )
    verdict = Verdict(status="diverged", rule="draft.positions", first=first, later={"draft.scratch_kv": 1, "draft.kv": 2})
    text = argue(header(Ending(kind="finished"), "revert-25015"), verdict, again="eagletwin check 25015 --revert 25015")
    assert (
        text
        == """\
DIVERGED  pr-25015 on SGLang 0.5.23 (cpu, with revert-25015)

  draft.positions
  at        request a, round 0, draft decode step 1 (scheduler iteration 1)
  index     row 1
  expected  1
  actual    2
  M = 1 tokens are committed before the bonus token, and this is draft decode step 1.
  Must hold (eagletwin's design, 3.1-3.3): Row i of the draft stands at position i; draft decode step j stands
  at position M + j - 1.

  After it 3 more comparisons diverged, which may follow from it: draft.kv 2, draft.scratch_kv 1.

  again: eagletwin check 25015 --revert 25015"""
    )


def test_the_report_of_a_run_that_diverged_says_who_ended_it() -> None:
    first = Divergence(
        rule="draft.kv", request="a", round=0, stage="prefill", step=0, iteration=0, index="row 1", expected="1", actual="2"
    )
    verdict = Verdict(status="diverged", rule="draft.kv", first=first)
    crashed = argue(header(Ending(kind="crashed", detail="ValueError: no")), verdict)
    assert "Then the worker crashed: ValueError: no." in crashed
    unseen = argue(header(Ending(kind="unseen", detail="eagletwin itself failed: KeyError: 'x'")), verdict)
    assert "Then eagletwin itself failed: KeyError: 'x'." in unseen


def test_unknown_says_why() -> None:
    ending = Ending(kind="crashed", detail="killed by SIGSEGV", where="verify, iteration 3")
    verdict = Verdict(status="unknown", rule="engine.crash", reason="killed by SIGSEGV (last seen: verify, iteration 3)")
    assert (
        argue(header(ending), verdict)
        == """\
UNKNOWN  pr-25015 on SGLang 0.5.23 (cpu)

  engine.crash: killed by SIGSEGV (last seen: verify, iteration 3)"""
    )


def test_equal_says_what_that_rests_on() -> None:
    verdict = Verdict(
        status="equal", choices=5, exercised=("draft_decode",), checked={"draft.kv": 3, "target.kv": 4}, headroom=0.01
    )
    assert (
        argue(header(Ending(kind="finished")), verdict)
        == """\
EQUAL  pr-25015 on SGLang 0.5.23 (cpu)

  7 comparisons in 2 rules; 5 choices, of them 0 ties; largest float error 0.01 of its bound. Exercised:
  draft_decode."""
    )


def test_of_a_request_that_asks_for_what_cannot_be_the_report_says_what_is_not_judged() -> None:
    verdict = Verdict(
        status="equal",
        checked={"draft.kv": 1},
        impossible={"b": 2, "c": 0},
        unjudged={"output.tokens": 2, "draft.kv": 3},
    )
    text = " ".join(argue(header(Ending(kind="finished")), verdict).split())
    where = "request b from its output token 2 on and request c from its output token 0 on"
    assert f"Not judged (what it asks for together allows no token there): {where}: draft.kv 3, output.tokens 2." in text


def test_the_report_says_of_which_request_how_much_was_compared() -> None:
    part = RequestShare(rounds=3, rounds_compared=1, rows=9, rows_compared=9, rules=20, never=("draft.proposal",))
    whole = RequestShare(rounds=2, rounds_compared=2, rows=4, rows_compared=4, rules=20)
    verdict = Verdict(status="equal", checked={"draft.kv": 1}, shares={"a": part, "b": whole, "c": part})
    text = argue(header(Ending(kind="finished")), verdict, columns=300)
    where = "request a, 1 of 3 rounds, 19 of 20 rules; request c, 1 of 3 rounds, 19 of 20 rules"
    assert f"\n  Compared in part: {where}." in text
    assert "in part" not in argue(header(Ending(kind="finished")), replace(verdict, shares={"b": whole}))


def test_the_report_names_the_first_excuses_and_counts_the_rest() -> None:
    nudge = Excuse(kind="nudge", part="target", expert=5, size=0.0002)
    tie = Excuse(kind="tie", rule="draft.proposal", request="a", round=2, stage="extend", index="d[1]")
    verdict = Verdict(status="equal", checked={"draft.kv": 1}, excused={"nudge": 1, "tie": 30}, excuses=(nudge, *[tie] * 19))
    text = argue(header(Ending(kind="finished")), verdict)
    tied = "tie adopted: draft.proposal, request a, round 2, extend, d[1]; "
    excused = f"Excused: nudge: the bias of expert 5 of the target is larger by 0.0002; {tied * 2}28 more, of which"
    assert f"{excused} verdict.json names the first 20." in " ".join(text.split())


def test_what_was_not_seen_has_the_reasons_of_its_mode() -> None:
    verdict = Verdict(status="equal", checked={"draft.kv": 1}, unseen={"draft.proposal": 2})
    plain = header(Ending(kind="finished"))
    told = {
        mode: " ".join(argue(replace(plain, engine=replace(plain.engine, mode=mode)), verdict).split())
        for mode in ("", "no graphs, no overlap, float32", "graphs 1 2, no overlap, float32")
    }
    assert all("the coins that were recorded do not tell): draft.proposal 2." in text for text in told.values())
    assert ["CUDA graph" in text for text in told.values()] == [False, False, True]
