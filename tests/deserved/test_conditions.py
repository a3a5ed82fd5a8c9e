"""Under which condition rounds are lost: what the losses share, unless chance would have them share it."""

from types import SimpleNamespace
from typing import Any

import pytest

from eagletwin.cases.losses import Losing, losing_so
from eagletwin.harness.commands.acceptance.findings import print_findings
from eagletwin.harness.deserved.conditions import AnswerCount, diagnose

STARTED: Any = SimpleNamespace(chunk=8)


def seen(length: int, way: str = "alone", *, lost: bool = False, cached: int = 0) -> Any:
    """An answer to a prompt of so many tokens."""
    answer = SimpleNamespace(prompt=[0] * length, cached=cached)
    compared = SimpleNamespace(equal=not lost, deserved=SimpleNamespace(rounds=10), used=11 if lost else 10)
    return SimpleNamespace(sent=SimpleNamespace(answer=answer, way=way), compared=compared)


LONG, SHORT = [seen(20)] * 12, [seen(5)] * 20
LOST = [seen(20, lost=True)] * 6


def test_nothing_is_named_where_nothing_is_lost() -> None:
    assert diagnose([*LONG, *SHORT], STARTED).condition == ""


def test_the_condition_that_all_losses_share_is_named_with_its_counts() -> None:
    found = diagnose([*LONG, *SHORT, *LOST], STARTED)
    assert found.condition == "prompts longer than a chunk"
    assert found.shares["prompts longer than a chunk"] == (AnswerCount(18, 6, 180, 186), AnswerCount(20, 0, 200, 200))


def test_too_few_losses_are_chance() -> None:
    assert diagnose([*LONG, *SHORT, LOST[0]], STARTED).condition == "mixed"


def test_a_short_prompt_that_came_with_others_may_have_been_cut_and_is_counted_for_neither() -> None:
    beside = [seen(5, "together", lost=True), seen(5, "together")]
    found = diagnose([*LONG, *SHORT, *LOST, *beside], STARTED)
    assert found.condition == "prompts longer than a chunk"
    assert found.shares["prompts longer than a chunk"] == (AnswerCount(18, 6, 180, 186), AnswerCount(20, 0, 200, 200))
    assert diagnose([*LONG, *SHORT, *beside], STARTED).condition == "mixed"


@pytest.mark.parametrize("way", ["alone", "again"])
def test_a_short_prompt_by_itself_that_loses_takes_the_condition_away(way: str) -> None:
    every = [seen(20, "together", lost=True, cached=3), seen(5, "again", cached=3, lost=True), *SHORT]
    found = diagnose([*LONG, *SHORT, *LOST, *every, seen(5, way, lost=True)], STARTED)
    assert found.condition == "always"


def test_prefix_hits_and_batches_are_known_of_every_answer() -> None:
    hits = [seen(5, "again", lost=True, cached=4)] * 5
    assert diagnose([*SHORT, *hits], STARTED).condition == "prefix hits"
    together = [seen(20, "together", lost=True)] * 5
    assert diagnose([*LONG, *together], STARTED).condition == "batches"


def test_a_layout_that_the_comparison_follows_explains_no_loss() -> None:
    trees = Losing(condition="always", release="0.5.23", layers=False, tree=True, num_steps=3)
    assert [entry.id for entry, _ in losing_so(trees)] == ["22088", "25015", "26997-hidden"]
    layers = Losing(condition="always", release="0.5.23", layers=True, tree=False, num_steps=3)
    assert "boundary-kv" not in {entry.id for entry, _ in losing_so(layers)}


def test_without_a_condition_no_bug_is_ruled_out(capsys: pytest.CaptureFixture[str]) -> None:
    lost = SimpleNamespace(equal=False, wrong=(), open=0, used=11, deserved=SimpleNamespace(rounds=10, fewest=10, most=10))
    answer = SimpleNamespace(prompt=[0] * 20, cached=0)
    one: Any = SimpleNamespace(sent=SimpleNamespace(answer=answer, way="alone", number=0), compared=lost)
    started: Any = SimpleNamespace(version="0.5.23", algorithm="EAGLE", num_steps=3, topk=1, chunk=8, dtype="float32")
    draft: Any = SimpleNamespace(algorithm="EAGLE", layers=0)
    every = [*LONG, *SHORT, one]
    for other in every[:-1]:
        other.compared.open, other.compared.deserved.fewest, other.compared.deserved.most = 0, 10, 10
    print_findings(every, diagnose(every, started), started, 1, draft=draft)
    said = capsys.readouterr().out
    assert "more prompts may tell it" in said
    assert "No bug of the ledger" not in said
