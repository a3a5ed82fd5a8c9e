"""Greedy verification: every way a short chain can go."""

import pytest

from eagletwin.reference.verify import verify_greedy, verify_inputs


def test_the_target_consumes_the_bonus_token_and_the_drafts() -> None:
    assert verify_inputs(9, [1, 2]) == [9, 1, 2]


@pytest.mark.parametrize(
    ("drafted", "argmax", "accept_len", "committed"),
    [
        ([1, 2], [5, 0, 0], 1, (5,)),  # first draft rejected: the bonus token alone
        ([1, 2], [1, 5, 0], 2, (1, 5)),
        ([1, 2], [1, 2, 5], 3, (1, 2, 5)),  # all accepted
        ([1, 2], [5, 2, 7], 1, (5,)),  # a later agreement does not count once one was rejected
        ([], [5], 1, (5,)),
    ],
)
def test_accept_length_counts_the_bonus_token(
    drafted: list[int], argmax: list[int], accept_len: int, committed: tuple[int, ...]
) -> None:
    verdict = verify_greedy(drafted, argmax)
    assert (verdict.accept_len, verdict.committed) == (accept_len, committed)
