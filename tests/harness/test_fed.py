"""What the rows of a prefix hit consumed, of a draft of several layers."""

from eagletwin.harness.judge.rules.multi_layer_draft import FedTokens

A, B = [7, 19, 5, 4, 60], [7, 19, 3, 8, 9]


def fed_by_a(layers: int = 2) -> FedTokens:
    """Request a's rows 0 to 3 in slots 10 to 13, when all of its tokens were known."""
    fed = FedTokens(layers)
    for layer in range(layers):
        rows = range(4)
        fed.write("a", layer, rows, [10, 11, 12, 13], [(*A, 0)[row + 1 + layer] for row in rows], known=4)
    return fed


def wrong(fed: FedTokens, table: list[int], count: int, tokens: list[int]) -> list[tuple[int, int]]:
    """(layer, row) of what consumed another token than it must have."""
    return [
        (one.layer, row)
        for one in fed.reused(table, count, tokens)
        for row, (expected, consumed) in enumerate(zip(one.expected, one.consumed, strict=True))
        if expected != consumed
    ]


def test_a_hit_as_long_as_pairs_of_tokens_agree_is_right() -> None:
    assert wrong(fed_by_a(), [10, 20, 21], 1, B) == []


def test_a_hit_that_is_one_row_too_long_is_wrong_in_the_first_layer() -> None:
    assert wrong(fed_by_a(), [10, 11, 20], 2, B) == [(0, 1), (1, 0)]


def test_what_lies_beyond_the_key_is_accepted_in_the_layers_above() -> None:
    """x[0..1] is known to be the same; row 0 of layer 1 consumed x[2]."""
    fed = fed_by_a()
    fed.write("b", 0, range(1, 3), [20, 21], B[2:4], known=4)
    fed.write("b", 1, range(1, 3), [20, 21], B[3:5], known=4)
    assert wrong(fed, [10, 20, 21], 3, B) == []
    # a request with b's tokens takes over what both of them fed
    assert wrong(fed, [10, 20, 21], 3, [*B[:4], 1]) == []
    assert wrong(fed, [10, 20, 21], 3, [*B[:3], 1, 1]) == [(0, 2), (1, 1)]


def test_a_row_that_was_fed_a_draft_and_one_that_was_never_fed_are_left_out() -> None:
    fed = FedTokens(2)
    fed.write("a", 0, range(2), [10, 11], [19, 77], known=1)  # row 1 consumed a draft of x[2]
    assert wrong(fed, [10, 11, 12], 3, B) == []
    fed.write("a", 0, range(1, 2), [11], [5], known=2)
    assert wrong(fed, [10, 11, 12], 3, B) == [(0, 1)]


def test_a_layer_that_looks_behind_the_reused_rows_answers_for_none_of_them() -> None:
    """As many layers as a chunk has rows, and more: the last ones look behind the chunk with each of its rows."""
    fed = FedTokens(4)
    tokens = [7, 8, 9]
    for layer in range(4):
        fed.write("a", layer, range(2), [21, 22], [8 + layer, 9 + layer], 5)
    found = fed.reused([21, 22], 2, tokens)
    assert [len(one.expected) for one in found] == [2, 1, 0, 0]
