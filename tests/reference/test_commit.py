"""What a verified tree commits, by hand."""

import torch

from eagletwin.reference.tree import (
    accept_row,
    bonus_token,
    committed_tokens,
    kv_moves,
    last_row,
    moved,
    packed_bytes,
    rotated,
    tracked_place,
)


def test_tokens_of_a_path() -> None:
    assert committed_tokens([7, 8, 9, 6], [0, 2, 3]) == [7, 9, 6]
    assert bonus_token([7, 8, 9, 6], [0, 2, 3]) == 6
    assert accept_row([0, 2], 8, 4) == [8, 10, -1, -1]


def test_rows_of_a_path_move_at_once() -> None:
    moves = kv_moves([0, 2, 3], [40, 41, 42, 43])
    assert moves == [(40, 40), (42, 41), (43, 42)]
    assert moved(torch.arange(50), moves)[40:44].tolist() == [40, 42, 43, 43]
    assert moved(torch.arange(3), [(0, 1), (1, 0)]).tolist() == [1, 0, 2]
    assert moved(torch.arange(3), []).tolist() == [0, 1, 2]


def test_the_row_that_is_drafted_from_and_the_place_that_is_tracked() -> None:
    assert last_row(2, 3, 4) == 10
    assert tracked_place(6, 3, 4) == 1  # lengths 7, 8, 9: the second new token makes 8
    assert tracked_place(8, 3, 4) is None
    assert tracked_place(7, 9, 4) == 8  # the last multiple, 16
    assert tracked_place(0, 1, 1) == 0


def test_rotation_of_nothing_is_nothing() -> None:
    assert rotated([1, 2, 3], 9) == [2, 3, 9]
    assert rotated([], 9) == []


def test_cells_are_packed_from_the_lowest_bit_on() -> None:
    assert packed_bytes(torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1]], dtype=torch.bool)) == [0b11000101, 0b1]
    assert packed_bytes(torch.empty(0, 4)) == []
