"""Under which condition rounds are lost: what the losses share, unless chance would have them share it."""

from types import SimpleNamespace
from typing import Any

import pytest

from eagletwin.cases.entry import Condition
from eagletwin.harness.commands.acceptance.losses import Losing, losing_so, loss_remarks, suspects
from eagletwin.harness.deserved.conditions import AnswerCount, diagnose

STARTED: Any = SimpleNamespace(chunk=8, max_running=0)


def seen(length: int, way: str = "alone", *, lost: bool = False, cached: int = 0) -> Any:
    """An answer to a prompt of so many tokens."""
    answer = SimpleNamespace(prompt=[0] * length, cached=cached)
    compared = SimpleNamespace(equal=not lost, deserved=SimpleNamespace(rounds=10), used=11 if lost else 10)
    return SimpleNamespace(sent=SimpleNamespace(answer=answer, way=way, beside=7 * (way == "together")), compared=compared)


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


def names(condition: Condition, release: str, **server: Any) -> dict[str, str]:
    """The bugs that such a server may have, and whether its release has them."""
    plain = {"layers": False, "tree": False, "num_steps": 3}
    return {one.entry.id: one.state for one in losing_so(condition, Losing(release=release, **(plain | server)))}


def test_a_layout_that_the_comparison_follows_explains_no_loss() -> None:
    assert names("always", "0.5.23", tree=True) == {"25015": "fixed", "26997-hidden": "fixed"}
    assert "boundary-kv" not in names("always", "0.5.23", layers=True)


@pytest.mark.parametrize(
    ("release", "state"),
    [
        ("0.5.8", None),
        ("0.5.11", "in this release"),
        ("0.5.12", "fixed"),
        ("0.5.23+dirty", "fixed"),
        ("tree-5ad8", "not known"),
    ],
)
def test_a_bug_is_named_by_what_the_release_says_of_it(release: str, state: str | None) -> None:
    assert names("always", release).get("25015") == state


def test_bugs_of_the_release_come_first_and_what_the_server_never_did_is_not_named() -> None:
    assert list(names("prompts longer than a chunk", "0.5.23", layers=True)) == [
        "multi-layer-chunk-tail-2",
        "multi-layer-chunk-tail-3",
    ]
    old = {"release": "0.5.10", "num_steps": 3}
    assert list(names("always", **old)) == ["25015"]
    assert list(names("always", **old, does={"weight updates"})) == ["22088", "25015"]
    assert names("batches", "0.5.23") == {}
    assert names("batches", "0.5.23", does={"sampling"}) == {"retracted-chunk-tail": "in this release"}
    assert "host-layers" not in names("prefix hits", "0.5.23", layers=True)
    assert "host-layers" in names("prefix hits", "0.5.23", layers=True, does={"a host cache"})


def test_a_live_bug_of_the_release_comes_before_one_that_is_fixed() -> None:
    found = names("always", "0.5.13", layers=True)
    assert list(found.values()) == sorted(found.values(), key=["in this release", "fixed"].index)
    assert set(found.values()) == {"in this release", "fixed"}


def test_a_prompt_that_was_sent_alone_was_in_no_batch() -> None:
    """As where there is one prompt, or `--at-once 1`; or a server that runs one request at a time."""
    alone = [seen(20, "together")] * 3
    for one in alone:
        one.sent.beside = 0
    assert diagnose([*LONG, *alone], STARTED).shares["batches"][0].count == 0
    one_by_one: Any = SimpleNamespace(chunk=8, max_running=1)
    assert diagnose([seen(20, "together")], one_by_one).shares["batches"][0].count == 0


def test_where_the_server_says_no_chunk_no_answer_is_known_to_be_longer() -> None:
    silent: Any = SimpleNamespace(chunk=None, max_running=0)
    shares = diagnose([*LONG, *SHORT], silent).shares["prompts longer than a chunk"]
    assert [one.count for one in shares] == [0, 0]


def test_without_a_condition_no_bug_is_ruled_out() -> None:
    lost = SimpleNamespace(equal=False, wrong=(), open=0, used=11, deserved=SimpleNamespace(rounds=10, fewest=10, most=10))
    answer = SimpleNamespace(prompt=[0] * 20, cached=0)
    one: Any = SimpleNamespace(sent=SimpleNamespace(answer=answer, way="alone", number=0, beside=0), compared=lost)
    started: Any = SimpleNamespace(
        version="0.5.23", algorithm="EAGLE", num_steps=3, topk=1, chunk=8, max_running=0, dtype="float32"
    )
    draft: Any = SimpleNamespace(algorithm="EAGLE", layers=0)
    every = [*LONG, *SHORT, one]
    for other in every[:-1]:
        other.compared.open, other.compared.deserved.fewest, other.compared.deserved.most = 0, 10, 10
    diagnosis = diagnose(every, started)
    found = suspects(diagnosis, Losing(release="0.5.23", layers=False, tree=False, num_steps=3))
    said = " ".join(loss_remarks(every, diagnosis, started, draft, found))
    assert "more prompts may tell which" in said
    assert "25015" in said
    assert "26329" in said
    assert "10846" not in said  # no loss was behind a prefix hit
    assert "10 rounds deserved, 11 used." in said
    assert "No bug of the ledger" not in said
