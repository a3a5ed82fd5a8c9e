"""Which answers may have begun on drafts of another request."""

import pytest

from eagletwin.harness.deserved.borrowed import began_on_drafts
from eagletwin.harness.deserved.sending import Sent, Way
from eagletwin.harness.deserved.server import Answer


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


@pytest.mark.parametrize(
    ("second", "layers", "cannot"),
    [
        (sent("abcdefghX", "Y", 7), 3, True),
        (sent("abcdefghX", "Y", 7), 1, False),  # a head that feeds itself stores no drafts
        (sent("abcdefghX", "Y", 7, "again"), 3, False),  # the cache held nothing but its own
        (sent("abcdefghX", "Y", 0), 3, False),  # no hit
        (sent("abcXYZ", "Y", 3), 3, False),  # they part where the layers were fed the prompt alone
        (sent("abcdX", "Y", 4), 3, True),  # the third layer's row of "d" was fed what came behind the prompt
        (sent("abcdX", "Y", 4), 2, False),
        (sent("abcdef", "ghij", 5), 3, False),  # the same prompt stores the same rows
        (sent("Xbcdef", "Y", 5), 3, False),
        (sent("X", "Y", 0), 7, False),  # though the first layer's first row of the other one is provisional already
    ],
)
def test_a_row_that_was_fed_a_draft_of_another_answer(second: Sent, layers: int, cannot: bool) -> None:
    assert began_on_drafts([FIRST, second], layers) == [False, cannot]
    assert began_on_drafts([second, FIRST], layers) == [cannot, False]
