"""Under which condition rounds are lost, where chunks may have ended, and how small a loss is still shown."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from eagletwin.cases.entry import Condition
from eagletwin.harness.commands.acceptance.losses import (
    Losing,
    hidden_bugs,
    losing_so,
    loss_remarks,
    power_remarks,
    power_rows,
    suspects,
)
from eagletwin.harness.deserved.conditions import AnswerCount, Seen, diagnose, why_untold
from eagletwin.harness.deserved.follow import Followed, Shape
from eagletwin.harness.deserved.precision import Pair, load_pair
from eagletwin.harness.deserved.rounds import ONCE, Compared, compare, possible_cuts
from eagletwin.harness.deserved.server import Answer, Sent, Way
from eagletwin.harness.deserved.statistics import Power, Text, figures, power_of
from eagletwin.harness.families.store import checkpoints

from .fake_server import MODEL, STEPS, text_of
from .fake_server import STARTED as BORROWED_STARTED

# Under which condition rounds are lost: what the losses share, unless chance would have them share it.


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


# Where the chunks of a prompt may have ended, as far as a draft of several layers is fed otherwise by it.


@pytest.mark.parametrize(
    ("size", "chunk", "layers", "cuts"),
    [
        (17, 16, 3, (16,)),
        (18, 16, 3, (16,)),
        (19, 16, 3, ()),  # row 15 of layer 2 is fed x[18], the last of the prompt
        (16, 16, 3, ()),  # one chunk, which is the last
        (33, 16, 2, (32,)),
        (34, 16, 2, ()),
        (9, 1, 4, (6, 7, 8)),
        (2, 1, 4, (1,)),
        (1, 1, 4, ()),
        (17, 0, 3, ()),  # chunks are switched off
        (17, 16, 1, ()),
        (17, 16, 0, ()),
    ],
)
def test_a_prompt_by_itself_is_cut_at_each_full_chunk(size: int, chunk: int, layers: int, cuts: tuple[int, ...]) -> None:
    assert possible_cuts("alone", size, chunk, layers) == possible_cuts("again", size, chunk, layers) == (cuts,)


def test_one_among_others_may_have_been_cut_anywhere() -> None:
    assert possible_cuts("together", 5, 16, 3) == ((), (3,), (4,), (3, 4))
    assert possible_cuts("together", 1, 16, 3) == ((),)
    assert possible_cuts("together", 5, 0, 3) == possible_cuts("together", 5, 16, 1) == ((),)


# Shares by depth, by length and by place, worked out by hand.


def text(*accepted: int, begin: int = 1, steps: int = 2) -> Text:
    """A text at whose positions M = begin, begin + 1, .. so many drafts are accepted; the last one is its last token."""
    rows = [[0] * steps] * begin + [[1] * count + [0] * (steps - count) for count in accepted]
    return Text(range(len(rows)), begin, Followed(np.array(rows), np.array(rows)))


def test_shares_are_over_all_positions_that_go_on() -> None:
    """Position 1 accepts 2, 2 accepts 1 of its 2, 3 none of its 1; 4 is the last token."""
    found = figures([text(2, 1, 0, 0)], 2)
    first, second = found.depths
    assert (first.reached, first.conditional.value, first.cumulative.value) == (3, pytest.approx(2 / 3), pytest.approx(2 / 3))
    assert (second.reached, second.conditional.value, second.cumulative.value) == (2, 0.5, 0.5)
    assert (found.rounds, found.tokens, found.accept_length.value) == (1, 4, 4.0)


def test_an_interval_is_a_point_where_all_texts_are_alike_and_wide_where_they_differ() -> None:
    alike = figures([text(1, 0, 1, 0, 0)] * 8, 2).accept_length
    assert alike.low == alike.value == alike.high
    differ = figures([text(0, 0, 0, 0, 0), text(2, 2, 2, 1, 0)] * 4, 2).accept_length
    assert differ.low < differ.value < differ.high


def test_parts_are_ranges_that_double() -> None:
    found = figures([text(1, 0, 0), text(2, 0, 0, begin=5)], 2)
    assert [(part.begin, part.end, part.count, part.accepted) for part in found.by_prompt_length] == [
        (1, 2, 2, 0.5),
        (4, 8, 2, 1.0),
    ]
    assert [(part.begin, part.count, part.accepted) for part in found.by_place] == [(0, 2, 1.5), (1, 2, 0.0)]


# How small a loss an equal verdict would have shown: drafts at stake, and what of a server's answers has none.


SHAPE = Shape(STEPS, 1, STEPS + 1)


def started(chunk: int | None = 8, max_running: int = 0) -> Any:
    return SimpleNamespace(chunk=chunk, max_running=max_running)


def power_seen(number: int, length: int, at_stake: int, way: str = "alone", **more: Any) -> Any:
    """An answer to prompt `number`, of so many tokens."""
    answer = SimpleNamespace(prompt=(number,) * length, tokens=(1, 2), cached=more.get("cached", 0))
    compared = SimpleNamespace(
        at_stake=at_stake, told=more.get("told", True), deserved=SimpleNamespace(fewest=10, most=more.get("most", 10))
    )
    sent = SimpleNamespace(number=number, answer=answer, way=way, beside=more.get("beside", 0))
    return SimpleNamespace(sent=sent, compared=compared, ways=more.get("ways", ONCE))


def each_way(number: int, length: int, at_stake: int) -> list[Any]:
    hit = power_seen(number, length, at_stake, "again", cached=length - 1)
    return [power_seen(number, length, at_stake), hit, power_seen(number, length, at_stake, "together", beside=7)]


def test_each_text_counts_once_and_under_each_condition_that_an_answer_to_it_has() -> None:
    power = power_of([*each_way(0, 20, 30), *each_way(1, 5, 12)], started())
    assert (power.every.prompts, power.every.drafts) == (2, 42)
    found = {name: (stake.prompts, stake.drafts) for name, stake in power.conditions.items()}
    assert found == {"prompts longer than a chunk": (1, 30), "prefix hits": (2, 42), "batches": (2, 42)}


@pytest.mark.parametrize("drafts", [1, 2, 10, 57, 700, 9001])
def test_the_smallest_loss_is_missed_in_one_of_twenty_runs(drafts: int) -> None:
    one_in = power_of([power_seen(0, 5, drafts)], started()).every.one_in
    assert (1 - 1 / one_in) ** drafts <= 0.05 < (1 - 1 / (one_in + 1)) ** drafts


def test_where_nothing_is_at_stake_no_loss_would_show() -> None:
    power = power_of([power_seen(0, 5, 0), power_seen(1, 20, 0)], started())
    assert not power.any_loss
    assert power_rows(power)[0] == ("all", "2", "0", "-")


def test_what_is_not_known_round_by_round_puts_no_draft_at_stake() -> None:
    merged = [power_seen(0, 5, 9, told=False, most=10), power_seen(1, 5, 9, told=False, most=13)]
    power = power_of([*merged, power_seen(2, 5, 9, ways=((), (4,)))], started())
    assert power.any_loss
    assert (power.every.prompts, power.every.drafts, power.merged, power.slack) == (3, 0, 2, 3)
    said = "The stream of 2 answers does not tell where rounds began: a loss shows there only if it takes more than 3"
    assert said in "\n".join(power_remarks(power, {}))


def remarks(power: Power) -> str:
    hidden: dict[Any, list[str]] = {"prompts longer than a chunk": ["26329 (in this release)"], "prefix hits": []}
    return "\n".join(power_remarks(power, {name: bugs for name, bugs in hidden.items() if not power.conditions[name].prompts}))


def test_a_condition_that_no_answer_has_is_named_with_the_bugs_that_could_not_show() -> None:
    said = remarks(power_of([power_seen(0, 5, 9)], started()))
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
    power = power_of([power_seen(0, 20, 5000), power_seen(1, 5, 1000)], started())
    assert power_remarks(power, {})[0].startswith("Low power: prompts longer than a chunk. ")
    assert power_remarks(power_of([power_seen(0, 20, 6000)], started()), {}) == []


def test_a_condition_that_nobody_knows_of_is_not_known() -> None:
    power = power_of([power_seen(0, 20, 9)], started(chunk=None))
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


# Which answers may rest on rows that another request had otherwise.


Told = tuple[str, str, Way]  # prompt, tokens, and how it was sent
NOT_LOOKED_AT: Any = None


def causes(*those: Told, layers: int, chunk: int = 0, page_size: int = 1) -> list[str]:
    """Of each answer, why it cannot be told; "" where it can."""
    return [
        "" if why is None else why.cause
        for why in why_untold(
            [borrowed_seen(*one, layers, chunk) for one in those],
            layers,
            msgspec.structs.replace(BORROWED_STARTED, chunk=chunk, page_size=page_size),
        )
    ]


def borrowed_seen(prompt: str, tokens: str, way: Way, layers: int, chunk: int) -> Seen:
    answer = Answer(
        prompt=tuple(map(ord, prompt)),
        tokens=tuple(map(ord, tokens)),
        rounds=1,
        starts=None,
        accepted=None,
        cached=0,
        finish="length",
    )
    return Seen(Sent(0, way, answer), NOT_LOOKED_AT, possible_cuts(way, len(prompt), chunk, layers))


FIRST: Told = ("abcdef", "ghij", "together")
SHARED, CUT = "rows of another answer", "a chunk near the prompt's end"


@pytest.mark.parametrize(
    ("second", "layers", "page", "cause"),
    [
        (("abcdefghX", "Y", "together"), 3, 1, SHARED),
        (("abcdefghX", "Y", "together"), 1, 1, ""),  # a head that feeds itself stores no drafts
        (("abcdefghX", "Y", "again"), 3, 1, ""),  # the cache held nothing but its own
        (("abcXYZ", "Y", "together"), 3, 1, SHARED),  # the second layer's row of "b" was fed what each goes on with
        (("abcXYZ", "Y", "together"), 2, 1, SHARED),
        (("abcdXYZ", "Y", "together"), 3, 4, ""),  # no whole page is shared: the last row of one is found by the next token
        (("abcdeXYZ", "Y", "together"), 3, 4, SHARED),
        (("abcdeXYZ", "Y", "together"), 1, 4, ""),
        (("abcdef", "ghij", "together"), 3, 1, ""),  # the same prompt stores the same rows
        (("Xbcdef", "Y", "together"), 3, 1, ""),
        (("aX", "Y", "together"), 3, 1, ""),  # the first row is found by its token and the next one
        (("X", "Y", "together"), 7, 1, ""),
    ],
)
def test_rows_that_another_answer_may_have_otherwise(second: Told, layers: int, page: int, cause: str) -> None:
    assert causes(FIRST, second, layers=layers, page_size=page)[1] == cause
    assert causes(second, FIRST, layers=layers, page_size=page)[0] == cause
    assert causes(second, layers=layers, page_size=page) == [""]


def test_an_answer_that_came_first_may_have_been_given_rows_of_a_later_one() -> None:
    assert causes(FIRST, ("abcXYZ", "Y", "together"), layers=3) == [SHARED, SHARED]


def test_the_same_prompt_may_have_been_read_in_other_chunks() -> None:
    assert causes(FIRST, FIRST, layers=3, chunk=4) == [SHARED, SHARED]
    assert causes(FIRST, FIRST, layers=1, chunk=4) == ["", ""]


@pytest.mark.parametrize(("chunk", "cause"), [(5, CUT), (4, CUT), (3, ""), (6, "")])
def test_a_prompt_that_comes_once_more_computes_rows_behind_a_cut_again(chunk: int, cause: str) -> None:
    assert causes(("abcdef", "ghij", "alone"), ("abcdef", "ghij", "again"), layers=3, chunk=chunk) == ["", cause]


@pytest.mark.parametrize(("layers", "longer"), [(2, "not 1 token longer"), (4, "not 1 to 3 tokens longer")])
def test_the_remedy_of_a_cut_is_another_length(layers: int, longer: str) -> None:
    [why] = why_untold(
        [borrowed_seen("abcdef", "ghij", "again", layers, 5)], layers, msgspec.structs.replace(BORROWED_STARTED, chunk=5)
    )
    assert why is not None
    assert f"give prompts that are {longer} than a multiple of 5" in why.remedy
