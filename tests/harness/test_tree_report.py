"""The text of an argument and the drawing of a tree, whole: a change of a word here is a change of what users read."""

import random

import pytest
import torch
from msgspec.structs import replace

from eagletwin.harness.check.argument import MOST_LINES, argue, draw
from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.core.records import Ending, EngineInfo, Header
from eagletwin.harness.core.trace import Recorder, Trace, new_header
from eagletwin.harness.core.verdict import Divergence, Excuse, RequestShare, Verdict
from eagletwin.harness.families.weights import model_pair
from eagletwin.harness.judge.rules import catalogue

# The drawing of a tree, whole: what it shows, what it marks, and that nothing a trace may hold breaks it.


DIGEST = model_pair("llama-tiny").digest
ENGINE = EngineInfo(name="sglang", version="0.5.23", device="cpu", kernels="", torch="", triton="")

# The tree of tests/reference/test_growth.py: nodes 1.. are candidates 0, 1, 2, 4, 6; the frontiers 0, 1 and 4, 2.
SELECTED, TOKENS, EXPANDED, CONSUMED = [0, 1, 2, 4, 6], [50, 10, 11, 12, 12, 13], [0, 1, 4, 2], [10, 11, 12, 12]


def traced(
    selected: list[int], tokens: list[int], expanded: list[int], consumed: list[int], path: list[int] | None, topk: int = 2
) -> Trace:
    """One round of request a, at M = 7."""
    steps = len(expanded) // topk + 1
    request = Request(id="a", prompt=(7,), max_new_tokens=2)
    case = Case(name="tree", model="llama-tiny", num_steps=steps, topk=topk, num_draft_tokens=len(tokens), requests=(request,))
    recorder = Recorder()
    for step in range(1, steps):
        ids = torch.tensor(consumed[(step - 1) * topk : step * topk])
        recorder.add("a", 0, "draft.decode", step=step, tensors={"input_ids": ids})
    tree = {"selected": selected, "tokens": tokens, "expanded": expanded}
    tensors = {name: torch.tensor(numbers, dtype=torch.int64) for name, numbers in tree.items()}
    recorder.add("a", 0, "draft", numbers={"seq_len": 7}, tensors=tensors)
    if path is not None:
        recorder.add("a", 0, "verify", tensors={"accept_index": torch.tensor(path)})
    return Trace(new_header(case, DIGEST, ENGINE, Ending(kind="finished"), recorder.records), recorder.tensors)


def found(rule: str, index: str, expected: str = "1", actual: str = "2", stage: str = "draft", step: int = 3) -> Divergence:
    return Divergence(
        rule=rule, request="a", round=0, stage=stage, step=step, iteration=1, index=index, expected=expected, actual=actual
    )


def marked(divergence: Divergence, trace: Trace) -> list[str]:
    """The lines with a mark, without what draws the branches, and one space for many."""
    return [" ".join(line.strip(" │├└─").split()) for line in draw(trace, divergence) if "<──" in line]


WORKED = traced(SELECTED, TOKENS, EXPANDED, CONSUMED, [0, 2, 4])


def test_an_argument_about_a_tree_comes_with_a_drawing_of_it() -> None:
    first = found("tree.positions", "position of node 4", "9", "10")
    verdict = Verdict(status="diverged", rule="tree.positions", first=first)
    assert (
        argue(WORKED.header, verdict, trace=WORKED)
        == """\
DIVERGED  tree on SGLang 0.5.23 (cpu)

  tree.positions
  at        request a, round 0, when draft() returned (scheduler iteration 1)
  index     position of node 4
  expected  9
  actual    10
  whose     unknown: the judge failed when it looked at the trace again: KeyError: '3.predicted'
  Must hold (eagletwin's design, 3.4): Node n of the verify tree stands at position M + its depth.

  The tree of request a, round 0: 5 nodes behind the bonus token at position 7.

  0: 50          *  root
  ├─ 1: 10          candidate 0, step 1 branch 0
  │  └─ 3: 12       candidate 2, step 2 branch 1
  └─ 2: 11       *  candidate 1, step 1 branch 1
     └─ 4: 12    *  candidate 4, step 2 branch 0   <── here
        └─ 5: 13    candidate 6

  node: token, · for a candidate that was not selected; * accepted"""
    )


@pytest.mark.parametrize(
    ("divergence", "lines"),
    [
        (found("tree.mask", "mask of node 3, node 0, and 1 more"), ["3: 12 candidate 2, step 2 branch 1 <── here"]),
        (found("tree.retrieve", "next sibling of node 0"), ["0: 50 * root <── here"]),
        (found("verify.inputs", "position of node 5", stage="target.verify"), ["5: 13 candidate 6 <── here"]),
        (
            found("tree.parents", "frontier 2, place 0", "candidate 3", "candidate 4"),
            ["·: ? candidate 3 <── expected", "4: 12 * candidate 4, step 2 branch 0 <── actual"],
        ),
        (
            found("tree.tokens", "the final selection, best first, place 4", "candidate 8", "candidate 6"),
            ["·: ? candidate 8 <── expected", "5: 13 candidate 6 <── actual"],
        ),
        (
            found("verify.accept", "accepted node 1", "1", "2", "verify", 0),
            [
                "1: 10 candidate 0, step 1 branch 0 <── expected",
                "2: 11 * candidate 1, step 1 branch 1 <── actual",
            ],
        ),
        (
            found("verify.accept", "token committed after accepted node 2", stage="verify", step=0),
            ["4: 12 * candidate 4, step 2 branch 0 <── here"],
        ),
        (
            found("commit.path", "row 8, element 3, and 2 more rows", stage="extend", step=0),
            ["2: 11 * candidate 1, step 1 branch 1 <── here"],
        ),
        (
            found("commit.path", "state of accepted node 1, moved to the front, element 2", stage="verify", step=0),
            ["2: 11 * candidate 1, step 1 branch 1 <── here"],
        ),
        (
            found("draft.proposal", "child 0 of branch 0 of draft decode step 2", step=2),
            ["5: 13 candidate 6 <── here"],
        ),
        (found("draft.proposal", "child 1 of the root", step=0), ["2: 11 * candidate 1, step 1 branch 1 <── here"]),
        (
            found("draft.hidden_in", "row 8, branch 1, element 2", stage="draft.decode", step=2),
            ["3: 12 candidate 2, step 2 branch 1 <── here"],
        ),
    ],
    ids=lambda value: value.index if isinstance(value, Divergence) else "",
)
def test_what_the_divergence_names_is_marked(divergence: Divergence, lines: list[str]) -> None:
    assert marked(divergence, WORKED) == lines


@pytest.mark.parametrize(
    ("rule", "stage"),
    [
        ("draft.kv", "extend"),
        ("output.tokens", "finished"),
        ("target.hidden", "target.verify"),
        ("pool.accounting", "iteration"),
    ],
)
def test_what_is_about_no_tree_has_no_drawing(rule: str, stage: str) -> None:
    assert draw(WORKED, found(rule, "row 1", stage=stage)) == []


def test_a_chain_and_a_round_without_a_tree_have_no_drawing() -> None:
    chain = traced([0, 1], [5, 6, 7], [0], [6], [0], topk=1)
    assert draw(chain, found("verify.accept", "accepted node 1", stage="verify")) == []
    later = Divergence(
        **{name: getattr(found("tree.mask", "node 1"), name) for name in Divergence.__struct_fields__} | {"round": 3}
    )
    assert draw(WORKED, later) == []


def test_a_tree_that_was_never_verified_has_nothing_accepted() -> None:
    lines = draw(traced(SELECTED, TOKENS, EXPANDED, CONSUMED, None), found("tree.mask", "mask of node 1, node 2"))
    assert "*" not in "".join(lines)


def test_a_large_tree_is_cut_down_to_what_is_marked_and_its_siblings() -> None:
    """topk 8: 8 + 64 + 64 candidates, all of them selected."""
    first, second = list(range(8)), list(range(8, 16))
    large = traced(list(range(136)), list(range(137)), first + second, [0] * 16, [0, 1], topk=8)
    lines = draw(large, found("tree.positions", "position of node 136"))
    assert len(lines) <= MOST_LINES + 6  # the title, the root, the key, and blank lines
    assert "more are not drawn" in lines[-1]
    assert any("candidate 135 " in line and "<── here" in line for line in lines)


@pytest.mark.parametrize("seed", range(50))
def test_no_trace_breaks_it(seed: int) -> None:
    """Candidates out of range, twice, of another depth, of no depth; and any rule about any of them."""
    generator = random.Random(seed)

    def numbers(count: int) -> list[int]:
        return [generator.choice((generator.randint(-3, 40), generator.randint(0, 9))) for _ in range(count)]

    trace = traced(numbers(5), numbers(6), numbers(6), numbers(6), numbers(3), topk=3)
    for rule in catalogue():
        for index in (
            "mask of node 9, node 2",
            "row 99, branch 7",
            "child 9 of branch 9 of draft decode step 9",
            "accepted node 4",
        ):
            draw(trace, found(rule, index, f"candidate {generator.randint(-3, 99)}", "7"))


# The text of an argument, whole: a change of a word here is a change of what users read.


ARGUMENT_DIGEST = model_pair("llama-tiny").digest
CASE = Case(name="pr-25015", model="llama-tiny", num_steps=2, requests=(Request(id="a", prompt=(7,), max_new_tokens=2),))


def header(ending: Ending, *patches: str) -> Header:
    engine = EngineInfo(name="sglang", version="0.5.23", device="cpu", kernels="", torch="", triton="", patches=patches)
    return new_header(CASE, ARGUMENT_DIGEST, engine, ending, ())


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
        mode: " ".join(argue(replace(plain, engine=replace(plain.engine, mode=mode, device="cuda")), verdict).split())
        for mode in ("", "no graphs, no overlap, float32", "graphs 1 2, no overlap, float32")
    }
    assert all("the coins that were recorded do not tell): draft.proposal 2." in text for text in told.values())
    assert ["CUDA graph" in text for text in told.values()] == [False, False, True]
