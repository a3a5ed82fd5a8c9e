"""Tokens of drawn prompts, by a seed."""

from random import Random


def tokens(seed: int, count: int, vocabulary: int) -> tuple[int, ...]:
    """The first `count` tokens of a stream that only the seed decides: two of one seed are one a prefix of the other."""
    random = Random(seed)
    return tuple(random.randrange(vocabulary) for _ in range(count))
