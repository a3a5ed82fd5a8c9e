"""Penalties by hand, and as transformers has them."""

import torch
from transformers import RepetitionPenaltyLogitsProcessor

from eagletwin.reference.penalties import penalized

LOGITS = torch.tensor([3.0, -1.0, 2.0, 0.5], dtype=torch.float64)


def test_each_time_once_and_scaled() -> None:
    assert penalized(LOGITS, [0, 0, 1], 0.5, 0.0, 1.0).tolist() == [2.0, -1.5, 2.0, 0.5]
    assert penalized(LOGITS, [0, 0, 1], 0.0, -0.5, 1.0).tolist() == [3.5, -0.5, 2.0, 0.5]
    assert penalized(LOGITS, [0, 0, 1], 1.0, 1.5, 2.0).tolist() == [-1.0, -7.0, 2.0, 0.5]
    assert torch.equal(penalized(LOGITS, [], 1.0, 1.0, 2.0), LOGITS)


def test_repetition_is_that_of_transformers() -> None:
    emitted = [3, 1, 3]
    theirs = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([emitted]), LOGITS[None].clone())
    torch.testing.assert_close(penalized(LOGITS, emitted, 0.0, 0.0, 1.3), theirs[0])
