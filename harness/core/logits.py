"""What a request has added to the logits of its tokens: by its logit_bias, and by its custom logit processor."""

from math import inf

from .case import Processor, Request

_STEPS = 33  # of a quarter each, from -4 to 4


def biases(request: Request) -> dict[int, float]:
    """By token."""
    return {bias.token: bias.value for bias in request.logit_bias}


def processed(processor: Processor, vocabulary: int) -> list[float]:
    """What a processor adds, by token."""
    hashed = [_hash(token, processor.seed) for token in range(vocabulary)]
    if processor.kind == "forbid":
        return [-inf if number % 4 == 0 else 0.0 for number in hashed]
    return [(number % _STEPS - _STEPS // 2) / 4 for number in hashed]


def added(request: Request, vocabulary: int) -> list[float] | None:
    """What is added in all, by token; None: nothing."""
    if not request.logit_bias and request.processor is None:
        return None
    own = [0.0] * vocabulary if request.processor is None else processed(request.processor, vocabulary)
    for token, value in biases(request).items():
        own[token] += value
    return own


def _hash(token: int, seed: int) -> int:
    """Some 16 bits that look drawn, the same everywhere."""
    number = (token + 1) * 2654435761 + (seed + 1) * 2246822519
    number = (number ^ number >> 15) * 3266489917 % 2**32
    return (number ^ number >> 13) >> 8
