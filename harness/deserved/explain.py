"""Which mistake of configuration a server's rounds betray, and which one a pair's own texts do."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from .compare import compare
from .conditions import Seen
from .follow import Shape
from .misconfigured import Mistake, is_clearly_more, mistakes
from .pair import Pair

# Answers that are looked at again for each mistake: of those that a mistake does not explain, few are needed.
_LOOKED_AT = 16
# Texts of a pair: each is followed once for each mistake.
_TEXTS = 40


def explained_by(pair: Pair, shape: Shape, seen: Sequence[Seen]) -> list[Mistake]:
    """The mistakes that explain every answer looked at, where some are not what the pair deserves."""
    unequal = [one for one in seen if not one.compared.equal]
    equal = [one for one in seen if one.compared.equal]
    looked_at = [*unequal[:_LOOKED_AT], *equal[:_LOOKED_AT]]
    return [mistake for mistake in _of(pair) if unequal and _explains(replace(pair, draft=mistake.draft), shape, looked_at)]


def better_read_as(pair: Pair, shape: Shape, texts: Sequence[tuple[Sequence[int], int]]) -> list[Mistake]:
    """The mistakes with which the head accepts clearly more on some texts. texts: tokens, and where the prompt ends."""
    some = texts[:_TEXTS]
    as_it_says = [_accepted(pair, shape, tokens, begin) for tokens, begin in some]
    return [
        mistake
        for mistake in _of(pair)
        if is_clearly_more(
            as_it_says, [_accepted(replace(pair, draft=mistake.draft), shape, tokens, begin) for tokens, begin in some]
        )
    ]


def _of(pair: Pair) -> list[Mistake]:
    return mistakes(pair.draft, pair.of_draft, pair.of_target, pair.target.shared)


def _explains(pair: Pair, shape: Shape, looked_at: Sequence[Seen]) -> bool:
    for one in looked_at:
        answer = one.sent.answer
        if not compare(pair, shape, answer, pair.read((*answer.prompt, *answer.tokens))).equal:
            return False
    return True


def _accepted(pair: Pair, shape: Shape, tokens: Sequence[int], begin: int) -> float:
    followed = pair.follow(tokens, pair.read(tokens).hidden, shape)
    return float(np.mean([followed.accepted(place) for place in range(begin, len(tokens) - 1)]))
