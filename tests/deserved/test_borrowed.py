"""Which answers may rest on rows that another request had otherwise."""

from typing import Any

import pytest
from msgspec.structs import replace

from eagletwin.harness.deserved.conditions import Seen, why_untold
from eagletwin.harness.deserved.rounds import possible_cuts
from eagletwin.harness.deserved.server import Answer, Sent, Way

from .started import STARTED

Told = tuple[str, str, Way]  # prompt, tokens, and how it was sent
NOT_LOOKED_AT: Any = None


def causes(*those: Told, layers: int, chunk: int = 0, page_size: int = 1) -> list[str]:
    """Of each answer, why it cannot be told; "" where it can."""
    return [
        "" if why is None else why.cause
        for why in why_untold(
            [seen(*one, layers, chunk) for one in those], layers, replace(STARTED, chunk=chunk, page_size=page_size)
        )
    ]


def seen(prompt: str, tokens: str, way: Way, layers: int, chunk: int) -> Seen:
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
    [why] = why_untold([seen("abcdef", "ghij", "again", layers, 5)], layers, replace(STARTED, chunk=5))
    assert why is not None
    assert f"give prompts that are {longer} than a multiple of 5" in why.remedy
