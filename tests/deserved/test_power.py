"""How small a loss an equal verdict would have shown: drafts at stake, and what of a server's answers has none."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from eagletwin.harness.commands.acceptance.losses import Losing, hidden_bugs, power_remarks, power_rows
from eagletwin.harness.deserved.follow import Shape
from eagletwin.harness.deserved.precision import Pair, load_pair
from eagletwin.harness.deserved.rounds import ONCE, Compared, compare
from eagletwin.harness.deserved.server import Answer
from eagletwin.harness.deserved.statistics import Power, power_of
from eagletwin.harness.families.store import checkpoints

from .fake_server import MODEL, STEPS, text_of

SHAPE = Shape(STEPS, 1, STEPS + 1)


def started(chunk: int | None = 8, max_running: int = 0) -> Any:
    return SimpleNamespace(chunk=chunk, max_running=max_running)


def seen(number: int, length: int, at_stake: int, way: str = "alone", **more: Any) -> Any:
    """An answer to prompt `number`, of so many tokens."""
    answer = SimpleNamespace(prompt=(number,) * length, tokens=(1, 2), cached=more.get("cached", 0))
    compared = SimpleNamespace(
        at_stake=at_stake, told=more.get("told", True), deserved=SimpleNamespace(fewest=10, most=more.get("most", 10))
    )
    sent = SimpleNamespace(number=number, answer=answer, way=way, beside=more.get("beside", 0))
    return SimpleNamespace(sent=sent, compared=compared, ways=more.get("ways", ONCE))


def each_way(number: int, length: int, at_stake: int) -> list[Any]:
    hit = seen(number, length, at_stake, "again", cached=length - 1)
    return [seen(number, length, at_stake), hit, seen(number, length, at_stake, "together", beside=7)]


def test_each_text_counts_once_and_under_each_condition_that_an_answer_to_it_has() -> None:
    power = power_of([*each_way(0, 20, 30), *each_way(1, 5, 12)], started())
    assert (power.every.prompts, power.every.drafts) == (2, 42)
    found = {name: (stake.prompts, stake.drafts) for name, stake in power.conditions.items()}
    assert found == {"prompts longer than a chunk": (1, 30), "prefix hits": (2, 42), "batches": (2, 42)}


@pytest.mark.parametrize("drafts", [1, 2, 10, 57, 700, 9001])
def test_the_smallest_loss_is_missed_in_one_of_twenty_runs(drafts: int) -> None:
    one_in = power_of([seen(0, 5, drafts)], started()).every.one_in
    assert (1 - 1 / one_in) ** drafts <= 0.05 < (1 - 1 / (one_in + 1)) ** drafts


def test_where_nothing_is_at_stake_no_loss_would_show() -> None:
    power = power_of([seen(0, 5, 0), seen(1, 20, 0)], started())
    assert not power.any_loss
    assert power_rows(power)[0] == ("all", "2", "0", "-")


def test_what_is_not_known_round_by_round_puts_no_draft_at_stake() -> None:
    merged = [seen(0, 5, 9, told=False, most=10), seen(1, 5, 9, told=False, most=13)]
    power = power_of([*merged, seen(2, 5, 9, ways=((), (4,)))], started())
    assert power.any_loss
    assert (power.every.prompts, power.every.drafts, power.merged, power.slack) == (3, 0, 2, 3)
    said = "The stream of 2 answers does not tell where rounds began: a loss shows there only if it takes more than 3"
    assert said in "\n".join(power_remarks(power, {}))


def remarks(power: Power) -> str:
    hidden: dict[Any, list[str]] = {"prompts longer than a chunk": ["26329 (in this release)"], "prefix hits": []}
    return "\n".join(power_remarks(power, {name: bugs for name, bugs in hidden.items() if not power.conditions[name].prompts}))


def test_a_condition_that_no_answer_has_is_named_with_the_bugs_that_could_not_show() -> None:
    said = remarks(power_of([seen(0, 5, 9)], started()))
    assert "No answer has this condition: prompts longer than a chunk. These bugs could not show: 26329 (in this rel" in said
    assert "No answer has this condition: prefix hits. No bug that this server can have needs it." in said
    assert "at once" not in said
    assert remarks(power_of(each_way(0, 20, 9), started())).endswith(
        "The server does not say which of the prompts that were sent at once ran in one batch."
    )


def test_bugs_of_requests_that_sample_do_not_show_in_greedy_ones() -> None:
    power = power_of(each_way(0, 20, 9), started())
    server = Losing(release="0.5.23", layers=False, tree=False, num_steps=3)
    assert {name: [str(one) for one in bugs] for name, bugs in hidden_bugs(power, server).items()} == {
        "sampling": ["retracted-chunk-tail (in this release)"]
    }
    assert hidden_bugs(power, replace(server, does=frozenset({"sampling"}))) == {}
    assert "No answer has this condition: sampling. " in "\n".join(power_remarks(power, {"sampling": ["a"]}))


def test_power_is_low_where_a_known_bug_might_not_show() -> None:
    """1 draft in 2,000 is the smallest known loss: of 6,000 drafts it leaves all right once in twenty times."""
    power = power_of([seen(0, 20, 5000), seen(1, 5, 1000)], started())
    assert power_remarks(power, {})[0].startswith("Low power: prompts longer than a chunk. ")
    assert power_remarks(power_of([seen(0, 20, 6000)], started()), {}) == []


def test_a_condition_that_nobody_knows_of_is_not_known() -> None:
    power = power_of([seen(0, 20, 9)], started(chunk=None))
    assert power_rows(power)[1] == ("prompts longer than a chunk", "not known", "0", "-")
    assert "Whether any answer has this is not known: prompts longer than a chunk. These bugs could not show: 26329" in (
        remarks(power)
    )


@pytest.fixture(scope="module")
def pair() -> Pair:
    target, draft = map(str, checkpoints(MODEL))
    return load_pair(target, draft, "float32", "cpu")


@pytest.mark.slow  # transformers is imported
class TestAtStake:
    """Drafts at stake are those whose loss is seen."""

    text, begin = text_of((3, 4, 5, 6, 7), 40)[0], 5

    def compared(self, pair: Pair, starts: list[int] | None) -> Compared:
        rounds = len(starts or ())
        answer = Answer(
            prompt=self.text[: self.begin],
            tokens=self.text[self.begin :],
            rounds=rounds,
            starts=None if starts is None else tuple(starts),
            accepted=None,
            cached=0,
            finish="length",
        )
        return compare(pair, SHAPE, answer, pair.read(self.text))

    def right(self, pair: Pair) -> list[int]:
        return list(self.compared(pair, None).deserved.starts)

    def test_losing_any_one_of_them_is_seen(self, pair: Pair) -> None:
        starts = self.right(pair)
        healthy = self.compared(pair, starts)
        assert healthy.equal
        ends = [*starts[1:], len(self.text) - 1]
        lost = 0
        for start, end in zip(starts, ends, strict=True):
            for cut in range(start + 1, end):  # the round stops in front of a draft that it should accept
                assert not self.compared(pair, sorted({*starts, cut})).equal
                lost += 1
        assert healthy.at_stake == lost > 0

    def test_what_near_ties_leave_open_is_none_of_them(self, pair: Pair) -> None:
        starts = self.right(pair)
        assert self.compared(replace(pair, tie=2.0), starts).at_stake == 0  # each choice is too close to tell

    def test_of_merged_rounds_they_are_what_the_number_of_rounds_shows(self, pair: Pair) -> None:
        merged = self.compared(pair, None)
        tokens = len(self.text) - 1 - self.begin
        assert 0 < merged.at_stake == tokens - merged.deserved.most
