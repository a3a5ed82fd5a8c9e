"""The least that `equal` takes: of each request something was compared in each stage and by each family of rules, or that is
declared. And what a verdict names that excused a difference."""

from collections.abc import Callable

import numpy as np
import pytest
from msgspec.structs import replace

from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.core.records import Record
from eagletwin.harness.core.verdict import MOST_EXCUSES, Excuse, RequestShare, View
from eagletwin.harness.judge.bounds import FLOAT32
from eagletwin.harness.judge.compare import Compare, Findings, Phase, Place
from eagletwin.harness.judge.experts import Nudge
from eagletwin.harness.judge.judge import excuses, gap, of_experts, shares

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
        return self.compare.settled()

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
    counted, named = excuses(compare.settled(), (), "slot_layout")
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
