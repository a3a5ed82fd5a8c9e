"""Where the chunks of a prompt may have ended, as far as a draft of several layers is fed otherwise by it."""

import pytest

from eagletwin.harness.deserved.rounds import possible_cuts


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
