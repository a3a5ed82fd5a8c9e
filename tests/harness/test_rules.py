"""Rules: the registry, a planted fault for each, bounds, and the least that `equal` takes."""

import ast
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from eagletwin.harness.check.confirm import agree, alike
from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.core.records import Record
from eagletwin.harness.core.verdict import MOST_EXCUSES, Divergence, Excuse, RequestShare, Verdict, View
from eagletwin.harness.families import RECIPES
from eagletwin.harness.judge import judge
from eagletwin.harness.judge.bounds import FLOAT32, bounds_of
from eagletwin.harness.judge.compare import Compare, Findings, Phase, Place
from eagletwin.harness.judge.experts import Nudge
from eagletwin.harness.judge.judge import excuses, gap, of_experts, shares
from eagletwin.harness.judge.rules import catalogue
from eagletwin.harness.judge.rules.multi_layer_draft import FedTokens

# The registry of rules: what is read of the source is what runs.


# Read from the source first, then from the functions themselves.
_TWICE = """
from eagletwin.harness.judge import rules
read = dict(rules.catalogue())
rules._DECLARED.clear()
from eagletwin.harness.judge.judge import methods
methods()
assert read == dict(sorted(rules._DECLARED.items())), read.keys() ^ rules._DECLARED.keys()
print(len(read))
"""


def test_the_source_declares_what_importing_it_does() -> None:
    done = subprocess.run([sys.executable, "-c", _TWICE], capture_output=True, text=True, check=False)
    assert (done.stderr, done.stdout.strip()) == ("", str(len(catalogue())))


def test_a_rule_has_the_stages_of_its_function_and_those_of_others() -> None:
    found = catalogue()
    assert found["target.inputs"].stages == ("target.extend",)
    assert found["output.tokens"].stages == ("prefill", "finished")
    assert {stage for one in found.values() for stage in one.stages} <= {stage for stage, _, _ in judge.methods()} | {"end"}


# A rule that cannot fail is not a rule: each has a planted fault, which a test of the judge or of the worker must see it
# name.
# Read from the tests' source, so that this needs neither SGLang nor their traces. A fault is a row of a table that a test is
# parametrized with, or an assertion that a verdict names the rule.


TESTS = Path(__file__).parents[1]
ROOMS = ("engine", "triton_cpu", "kernels")


def _strings(node: ast.AST) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


def planted(source: str) -> set[str]:
    """Names of rules that the tests of a file must see named."""
    module = ast.parse(source)
    tables = {
        target.id: node.value
        for node in module.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    found = set[str]()
    for node in ast.walk(module):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            for mark in node.decorator_list:
                found.update(_strings(mark))
                for name in ast.walk(mark):
                    if isinstance(name, ast.Name) and name.id in tables:
                        found.update(_strings(tables[name.id]))
        elif (
            isinstance(node, ast.Compare)
            and any(isinstance(part, ast.Attribute) and part.attr == "rule" for part in ast.walk(node.left))
            and isinstance(node.ops[0], ast.Eq)
        ):
            found.update(_strings(node))
    return found & catalogue().keys()


def test_each_rule_has_a_planted_fault() -> None:
    found = set[str]()
    for room in ROOMS:
        for path in sorted((TESTS / room).rglob("test_*.py")):
            found |= planted(path.read_text(encoding="utf-8"))
    assert catalogue().keys() - found == set(), "plant a fault for it: CONTRIBUTING.md, Add a rule"


def test_a_rule_that_is_merely_named_has_no_fault() -> None:
    idle = 'def test_a(verdict):\n    idle = ("draft.kv",)\n    assert set(verdict.checked) == {"draft.kv"}\n'
    assert planted(idle) == set()
    assert planted('ROWS = ["draft.kv"]\n') == set()
    assert planted('ROWS = [("x", "draft.kv")]\n@pytest.mark.parametrize("a", ROWS)\ndef test_a(a): ...\n') == {"draft.kv"}
    assert planted('def test_a(v):\n    assert (v.status, v.rule) == ("diverged", "draft.kv")\n') == {"draft.kv"}


# When floats are equal, and when a choice is a tie.


def ties(logits: Array) -> list[object]:
    found: list[object] = FLOAT32.best(logits, 1)[1].tolist()
    return found


def test_the_bound_scales_with_each_row() -> None:
    expected = np.array([[1.0, 0.0], [1000.0, 0.0]])
    actual = expected + np.array([[0.0, 0.5 * FLOAT32.relative], [0.0, 500 * FLOAT32.relative]])
    assert FLOAT32.error_of(expected, actual.astype(np.float32)).tolist() == pytest.approx([0.5, 0.5], rel=0.01)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_never_equal(value: float) -> None:
    assert FLOAT32.error_of(np.ones((1, 2)), np.array([[1.0, value]])).tolist() == [np.inf]


def test_two_logits_closer_than_twice_the_bound_are_a_tie() -> None:
    logits = np.array([0.0, 10.0, 10.0 - 1.9 * FLOAT32.relative * 10, 5.0])
    assert ties(logits) == [True]
    assert FLOAT32.undecided(logits, 1, 2)
    assert not FLOAT32.undecided(logits, 1, 3)
    apart = np.array([0.0, 10.0, 10.0 - 2.1 * FLOAT32.relative * 10, 5.0])
    assert ties(apart) == [False]
    assert ties(np.stack([apart, logits, apart])) == [[False], [True], [False]]


def test_a_token_that_cannot_be_proposed_is_no_magnitude_and_never_undecided() -> None:
    logits = np.array([-np.inf, 10.0, 10.0 - 1.9 * FLOAT32.relative * 10, 5.0, -np.inf])
    assert ties(logits) == [True]
    assert FLOAT32.undecided(logits, 1, 2)
    assert not FLOAT32.undecided(logits, 1, 3)
    assert not FLOAT32.undecided(logits, 1, 0)
    alone = np.array([-np.inf, 2.0, -np.inf])
    assert ties(alone) == [False]


def test_the_bounds_of_bfloat16_are_a_recipes_own() -> None:
    unit = 2.0**-8
    relative = {name: round(bounds_of("bfloat16", name).relative / unit, 1) for name in ("llama-tiny", "llama-gqa", "step-3.5")}
    assert relative == {"llama-tiny": 10.6, "llama-gqa": 9.0, "step-3.5": 24.5}
    for name in RECIPES:
        bounds = bounds_of("bfloat16", name)
        assert bounds_of("float32", name) is FLOAT32
        assert bounds.tie < bounds.relative < 0.1


# The least that `equal` takes: of each request something was compared in each stage and by each family of rules, or that is
# declared. And what a verdict names that excused a difference.


CASE = Case(
    name="floor",
    model="llama-tiny",
    num_steps=2,
    requests=(Request(id="a", prompt=(1, 2), max_new_tokens=4), Request(id="b", prompt=(3,), max_new_tokens=4)),
)
ALONE = replace(CASE, requests=CASE.requests[:1])
INPUTS = ("draft.input_ids", "draft.slots")


class Looks:
    """A judge's looks at the records of a case."""

    def __init__(self, case: Case = ALONE, without: frozenset[str] = frozenset()) -> None:
        self.case, self.without = case, without
        self.compare = Compare([request.id for request in case.requests], without, FLOAT32)

    def at(self, stage: str, *rules: str, request: str = "a", unseen: tuple[str, ...] = (), away: bool = False) -> "Looks":
        """A record of two rows, with a comparison by each rule."""
        record = Record(request=request, round=0, stage=stage)
        with self.compare.looking_at(record, 2 if stage in ("target.extend", "extend") else 0, away=away):
            for rule in rules:
                self.compare.on(rule)
            self.compare.not_seen(unseen, 3)
        return self

    def impossible(self, request: str) -> "Looks":
        self.compare.asks_the_impossible(request, 0)
        return self

    @property
    def findings(self) -> Findings:
        return self.compare.finish()

    @property
    def gap(self) -> str:
        return gap(self.case, self.findings, every=not self.without)


def both(looks: Looks) -> Looks:
    return looks.at("verify", "verify.accept", request="b")


ALLOWS = "what the request asks for allows no token"
SITUATIONS: dict[str, tuple[Callable[[], Looks], str]] = {
    "everything": (lambda: Looks().at("draft", *INPUTS).at("verify", "verify.accept"), ""),
    "a rule that another stands in for": (lambda: Looks().at("draft", "draft.scratch_kv", unseen=INPUTS), ""),
    "a family that was not seen": (
        lambda: Looks().at("draft", "verify.inputs", unseen=INPUTS),
        "draft.* of request a was never compared: draft.input_ids, draft.slots could not be seen",
    ),
    "a stage that was not seen": (
        lambda: Looks().at("prefill", "draft.kv").at("draft", unseen=INPUTS),
        "stage draft of request a was never compared: draft.input_ids, draft.slots could not be seen",
    ),
    "of one of two requests": (
        lambda: Looks(CASE).at("draft", "draft.kv").at("draft", unseen=INPUTS, request="b"),
        "stage draft of request b was never compared: draft.input_ids, draft.slots could not be seen",
    ),
    "a stage that no rule looked at": (
        lambda: Looks().at("prefill", "draft.kv").at("verify"),
        "stage verify of request a was never compared: its numbers could not be seen",
    ),
    "the same, with a rule switched off": (
        lambda: Looks(without=frozenset({"verify.accept"})).at("prefill", "draft.kv").at("verify", "verify.accept"),
        "",
    ),
    "what serves rules that look at several records": (lambda: Looks().at("batch").at("iteration", request=""), ""),
    "the scheduler's own": (
        lambda: Looks().at("iteration", request="", unseen=("state.slots",)),
        "state.* of the scheduler was never compared: state.slots could not be seen",
    ),
    "an impossible request alone": (
        lambda: Looks().impossible("a").at("prefill", "draft.kv").at("verify", "verify.accept", away=True),
        f"stage verify of request a was never compared (verify.accept): {ALLOWS}, and the case does not name 'impossible' in "
        "`exercises`",
    ),
    "an impossible request alone, declared": (
        lambda: Looks(replace(ALONE, exercises=("impossible",))).impossible("a").at("verify", "verify.accept", away=True),
        "",
    ),
    "an impossible request beside another": (
        lambda: both(Looks(CASE)).impossible("a").at("verify", "verify.accept", away=True),
        "",
    ),
    "two impossible requests": (
        lambda: Looks(CASE).impossible("a").impossible("b").at("verify", "verify.accept", away=True),
        f"stage verify of request a was never compared (verify.accept): {ALLOWS}, and the case does not name 'impossible' in "
        "`exercises`",
    ),
    "an impossible request whose first round was judged": (
        lambda: Looks().impossible("a").at("verify", "verify.accept").at("verify", "verify.accept", away=True),
        "",
    ),
    "an impossible request of which more was not seen": (
        lambda: (
            both(Looks(CASE)).impossible("a").at("verify", "verify.accept", away=True, request="a").at("draft", unseen=INPUTS)
        ),
        "stage draft of request a was never compared: draft.input_ids, draft.slots could not be seen",
    ),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_what_was_never_compared_is_a_gap_unless_it_is_declared(name: str) -> None:
    looks, expected = SITUATIONS[name]
    assert looks().gap == expected


def test_a_share_counts_rounds_rows_and_rules() -> None:
    looks = Looks(CASE).at("target.extend", "draft.kv").at("verify", "verify.accept").at("extend", "draft.kv")
    looks.at("verify", "verify.accept", "output.grammar", away=True).at("extend", "draft.kv", away=True)
    whole = RequestShare(rounds=0, rounds_compared=0, rows=2, rows_compared=2, rules=1)
    part = RequestShare(rounds=2, rounds_compared=1, rows=6, rows_compared=4, rules=3, never=("output.grammar",))
    assert shares(CASE, looks.at("target.extend", "draft.kv", request="b").findings) == {"a": part, "b": whole}
    assert (str(part), str(whole)) == ("1 of 2 rounds, 4 of 6 rows, 2 of 3 rules", "")


def test_a_tie_that_is_adopted_is_named_where_it_is() -> None:
    compare = Compare(["a"], frozenset(), FLOAT32)
    logits = np.array([0.0, 1.0, 1.0 - FLOAT32.tie / 2])
    for round, chosen in ((4, 2), (3, 2), (5, 1)):
        compare.choice(_place(round), "verify.accept", logits, chosen, "token committed after node 0")
    counted, named = excuses(compare.finish(), (), "slot_layout")
    tie = Excuse(kind="tie", rule="verify.accept", request="a", round=3, stage="verify", index="token committed after node 0")
    assert named == (tie, replace(tie, round=4)), "in the order in which data flows; the third chose what the reference does"
    assert counted == {"tie": 2}
    assert str(tie) == "tie adopted: verify.accept, request a, round 3, verify, token committed after node 0"


def _place(round: int, phase: Phase = "verify") -> Place:
    return Place(Record(request="a", round=round, stage="verify", iteration=round), phase)


@pytest.mark.parametrize(
    ("reached", "view", "used"),
    [
        (("branch_changes_parent",), "slot_layout", ("slot_layout",)),
        (("branch_changes_parent",), "true_tree", ()),
        (("look_ahead_rejected",), "slot_layout", ("last_fed",)),
        (("look_ahead_rejected",), "committed", ()),
        ((), "shifted", ("shifted",)),
        (("tree",), "slot_layout", ()),
    ],
)
def test_a_view_is_named_where_the_case_reached_what_it_is_of(
    reached: tuple[str, ...], view: View, used: tuple[str, ...]
) -> None:
    counted, named = excuses(Findings(), reached, view)
    assert tuple(excuse.view for excuse in named) == used
    assert counted == ({"view": len(used)} if used else {})


def test_all_excuses_are_counted_and_the_first_are_named() -> None:
    findings = Findings(excuses=[((n,), Excuse(kind="tie", round=n)) for n in range(MOST_EXCUSES + 5)])
    findings.excuses.append(((), of_experts(Nudge("draft", 3, 1.5e-05))))
    counted, named = excuses(findings, (), "slot_layout")
    assert counted == {"nudge": 1, "tie": MOST_EXCUSES + 5}
    assert len(named) == MOST_EXCUSES
    assert str(named[0]) == "nudge: the bias of expert 3 of the draft is larger by 1.5e-05"
    assert str(of_experts("as the trace")) == "experts: rows go to those that the trace names"


# What the rows of a prefix hit consumed, of a draft of several layers.


A, B = [7, 19, 5, 4, 60], [7, 19, 3, 8, 9]


def fed_by_a(layers: int = 2) -> FedTokens:
    """Request a's rows 0 to 3 in slots 10 to 13, when all of its tokens were known."""
    fed = FedTokens(layers)
    for layer in range(layers):
        rows = range(4)
        fed.write("a", layer, rows, [10, 11, 12, 13], [(*A, 0)[row + 1 + layer] for row in rows], known=4)
    return fed


def wrong(fed: FedTokens, table: list[int], count: int, tokens: list[int]) -> list[tuple[int, int]]:
    """(layer, row) of what consumed another token than it must have."""
    return [
        (layer, row)
        for layer, of_layer in enumerate(fed.reused_rows(table, count, tokens))
        for row, (expected, consumed) in enumerate(zip(*of_layer, strict=True))
        if expected != consumed
    ]


def test_a_hit_as_long_as_pairs_of_tokens_agree_is_right() -> None:
    assert wrong(fed_by_a(), [10, 20, 21], 1, B) == []


def test_a_hit_that_is_one_row_too_long_is_wrong_in_the_first_layer() -> None:
    assert wrong(fed_by_a(), [10, 11, 20], 2, B) == [(0, 1), (1, 0)]


def test_what_lies_beyond_the_key_is_accepted_in_the_layers_above() -> None:
    """x[0..1] is known to be the same; row 0 of layer 1 consumed x[2]."""
    fed = fed_by_a()
    fed.write("b", 0, range(1, 3), [20, 21], B[2:4], known=4)
    fed.write("b", 1, range(1, 3), [20, 21], B[3:5], known=4)
    assert wrong(fed, [10, 20, 21], 3, B) == []
    # a request with b's tokens takes over what both of them fed
    assert wrong(fed, [10, 20, 21], 3, [*B[:4], 1]) == []
    assert wrong(fed, [10, 20, 21], 3, [*B[:3], 1, 1]) == [(0, 2), (1, 1)]


def test_a_row_that_was_fed_a_draft_and_one_that_was_never_fed_are_left_out() -> None:
    fed = FedTokens(2)
    fed.write("a", 0, range(2), [10, 11], [19, 77], known=1)  # row 1 consumed a draft of x[2]
    assert wrong(fed, [10, 11, 12], 3, B) == []
    fed.write("a", 0, range(1, 2), [11], [5], known=2)
    assert wrong(fed, [10, 11, 12], 3, B) == [(0, 1)]


def test_a_layer_that_looks_behind_the_reused_rows_answers_for_none_of_them() -> None:
    """As many layers as a chunk has rows, and more: the last ones look behind the chunk with each of its rows."""
    fed = FedTokens(4)
    tokens = [7, 8, 9]
    for layer in range(4):
        fed.write("a", layer, range(2), [21, 22], [8 + layer, 9 + layer], 5)
    found = fed.reused_rows([21, 22], 2, tokens)
    assert [len(expected) for expected, _ in found] == [2, 1, 0, 0]


# The verdict of two runs of one case.


FIRST = Divergence(
    rule="draft.kv",
    request="a",
    round=1,
    stage="extend",
    step=0,
    iteration=3,
    index="row 5, element 28",
    expected="-1.32",
    actual="-1.73 (1.82e+03 times the bound)",
)


def diverged(**changes: object) -> Verdict:
    first = msgspec.structs.replace(FIRST, **changes)
    return Verdict(status="diverged", rule=first.rule, first=first)


def test_the_same_twice_is_a_divergence_as_it_was() -> None:
    assert agree(diverged(), diverged(iteration=4), "in replay-1") == diverged()


def test_other_wrong_numbers_in_the_same_record_are_a_divergence_that_says_so() -> None:
    other = diverged(index="row 5, element 4", actual="1.32 (2e+03 times the bound)", expected="1.85")
    both = agree(diverged(), other, "in replay-1")
    assert both.status == "diverged"
    assert both.first == FIRST
    assert "differ in replay-1" in both.reason
    assert "row 5, element 4: 1.32" in both.reason
    assert agree(both, diverged(), "in replay-2") == both  # a third run does not take back what the second showed


def test_another_rule_record_or_status_is_nondeterministic() -> None:
    for second in (
        *(
            diverged(**change)
            for change in ({"rule": "draft.proposal"}, {"round": 2}, {"request": "b"}, {"layer": 1}, {"rank": 1})
        ),
        Verdict(status="equal"),
        Verdict(status="unknown", reason="stopped"),
    ):
        assert not alike(diverged(), second)
        both = agree(diverged(), second, "in replay-1")
        assert both.status == "unknown"
        assert both.reason.startswith("nondeterministic: first draft.kv at extend, round 1, row 5, element 28")
        assert agree(Verdict(status="equal"), diverged(), "once more").status == "unknown"
