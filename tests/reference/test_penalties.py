"""Penalties by hand, and as transformers has them."""

import torch

from eagletwin.reference.sampling import held_back, penalized

LOGITS = torch.tensor([3.0, -1.0, 2.0, 0.5], dtype=torch.float64)


def test_each_time_once_and_scaled() -> None:
    assert penalized(LOGITS, [0, 0, 1], 0.5, 0.0, 1.0).tolist() == [2.0, -1.5, 2.0, 0.5]
    assert penalized(LOGITS, [0, 0, 1], 0.0, -0.5, 1.0).tolist() == [3.5, -0.5, 2.0, 0.5]
    assert penalized(LOGITS, [0, 0, 1], 1.0, 1.5, 2.0).tolist() == [-1.0, -7.0, 2.0, 0.5]
    assert torch.equal(penalized(LOGITS, [], 1.0, 1.0, 2.0), LOGITS)


def test_repetition_is_that_of_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    emitted = [3, 1, 3]
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([emitted]), LOGITS[None].clone())
    torch.testing.assert_close(penalized(LOGITS, emitted, 0.0, 0.0, 1.3), theirs[0])


def test_what_ends_a_text_is_impossible_until_it_is_long_enough() -> None:
    assert held_back(LOGITS, 2, 3, [0, 3]).tolist() == [-torch.inf, -1.0, 2.0, -torch.inf]
    assert torch.equal(held_back(LOGITS, 3, 3, [0, 3]), LOGITS)


def test_a_least_length_is_that_of_transformers() -> None:
    from transformers import MinNewTokensLengthLogitsProcessor

    theirs = MinNewTokensLengthLogitsProcessor(1, 2, eos_token_id=[0], device="cpu")
    for emitted in range(4):
        text = torch.ones(1, 1 + emitted, dtype=torch.int64)
        torch.testing.assert_close(held_back(LOGITS, emitted, 2, [0]), theirs(text, LOGITS[None].clone())[0])
