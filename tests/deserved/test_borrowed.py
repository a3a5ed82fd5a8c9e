"""Which answers may rest on rows that another request had otherwise."""

import pytest

from eagletwin.harness.deserved.borrowed import cannot_be_told
from eagletwin.harness.deserved.sending import Sent, Way
from eagletwin.harness.deserved.server import Answer, Started


def sent(prompt: str, tokens: str, cached: int, way: Way = "together") -> Sent:
    answer = Answer(
        prompt=tuple(map(ord, prompt)),
        tokens=tuple(map(ord, tokens)),
        rounds=1,
        starts=None,
        accepted=None,
        cached=cached,
        finish="length",
    )
    return Sent(0, way, answer)


FIRST = sent("abcdef", "ghij", 0)


def started(chunk: int = 0, page_size: int = 1) -> Started:
    return Started(
        version="0.5.23",
        algorithm="EAGLE",
        num_steps=3,
        topk=1,
        num_draft_tokens=4,
        chunk=chunk,
        page_size=page_size,
        dtype="float32",
        target="",
        draft="",
        overlap=True,
        graphs=False,
    )


@pytest.mark.parametrize(
    ("second", "layers", "page", "cannot"),
    [
        (sent("abcdefghX", "Y", 7), 3, 1, True),
        (sent("abcdefghX", "Y", 7), 1, 1, False),  # a head that feeds itself stores no drafts
        (sent("abcdefghX", "Y", 7, "again"), 3, 1, False),  # the cache held nothing but its own
        (sent("abcdefghX", "Y", 0), 3, 1, True),  # no hit, but its rows may be exchanged when its prefill is over
        (sent("abcXYZ", "Y", 3), 3, 1, True),  # the second layer's row of "b" was fed what each goes on with
        (sent("abcXYZ", "Y", 3), 2, 1, True),
        (sent("abcdXYZ", "Y", 4), 3, 4, False),  # no whole page is shared: the last row of one is found by the next token
        (sent("abcdeXYZ", "Y", 4), 3, 4, True),
        (sent("abcdeXYZ", "Y", 4), 1, 4, False),
        (sent("abcdef", "ghij", 5), 3, 1, False),  # the same prompt stores the same rows
        (sent("Xbcdef", "Y", 5), 3, 1, False),
        (sent("aX", "Y", 1), 3, 1, False),  # the first row is found by its token and the next one
        (sent("X", "Y", 0), 7, 1, False),
    ],
)
def test_rows_that_another_answer_may_have_otherwise(second: Sent, layers: int, page: int, cannot: bool) -> None:
    assert cannot_be_told([FIRST, second], layers, started(page_size=page))[1] == cannot
    assert cannot_be_told([second, FIRST], layers, started(page_size=page))[0] == cannot
    assert cannot_be_told([second], layers, started(page_size=page)) == [False]


def test_an_answer_that_came_first_may_have_been_given_rows_of_a_later_one() -> None:
    assert cannot_be_told([FIRST, sent("abcXYZ", "Y", 0)], 3, started()) == [True, True]


def test_the_same_prompt_may_have_been_read_in_other_chunks() -> None:
    twice = [sent("abcdef", "ghij", 0), sent("abcdef", "ghij", 5)]
    assert cannot_be_told(twice, 3, started(chunk=4)) == [True, True]
    assert cannot_be_told(twice, 1, started(chunk=4)) == [False, False]
    for chunk, cannot in ((5, True), (4, True), (3, False), (6, False)):
        again = [sent("abcdef", "ghij", 0, "alone"), sent("abcdef", "ghij", 5, "again")]
        assert cannot_be_told(again, 3, started(chunk=chunk)) == [False, cannot]
