"""Greedy answers of a recipe's target, by the reference alone."""

import torch

from eagletwin.reference.llama import target_rows

from . import RECIPES
from .weights import model_pair


def target_says(model: str, prompt: tuple[int, ...], count: int) -> list[int]:
    """The `count` tokens with which the target alone answers a prompt."""
    weights, shape = model_pair(model).reference_target(), RECIPES[model].target
    tokens = torch.tensor(prompt)
    for _ in range(count):
        tokens = torch.cat([tokens, target_rows(weights, shape, tokens).logits[-1:].argmax(-1)])
    return tokens[len(prompt) :].tolist()
