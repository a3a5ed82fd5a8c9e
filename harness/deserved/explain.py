"""Which mistake of configuration a server's rounds betray, and which one a pair's own texts do."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

import numpy as np

from .compare import compare
from .conditions import Seen
from .draft import States
from .figures import Text
from .follow import Followed, Shape
from .misconfigured import LEAST_TEXTS, Mistake, is_clearly_more, mistakes
from .pair import Pair
from .target import Read

# Answers that are looked at again for each mistake: of those that a mistake does not explain, few are needed.
_LOOKED_AT = 16
# Texts of a pair: each is followed once for each mistake.
_TEXTS = 40


def explained_by(pair: Pair, shape: Shape, seen: Sequence[Seen]) -> list[Mistake]:
    """The mistakes that explain every answer looked at, where some are not what the pair deserves."""
    unequal = [one for one in seen if not one.compared.equal]
    equal = [one for one in seen if one.compared.equal]
    left = _of(pair) if unequal else []
    for one in [*unequal[:_LOOKED_AT], *equal[:_LOOKED_AT]]:
        answer = one.sent.answer
        read = _reader(pair, (*answer.prompt, *answer.tokens))
        left = [
            mistake
            for mistake in left
            if compare(
                replace(pair, draft=mistake.draft, tie=one.compared.tie), shape, answer, read(mistake.draft.reads), one.ways
            ).equal
        ]
        if not left:
            break
    return left


def better_read_as(pair: Pair, shape: Shape, texts: Sequence[Text]) -> list[Mistake]:
    """The mistakes with which the head accepts clearly more on some texts."""
    if len(texts) < LEAST_TEXTS:
        return []
    some, possible = texts[:_TEXTS], _of(pair)
    as_it_says = [_accepted(text.followed, text.begin) for text in some]
    otherwise: list[list[float]] = [[] for _ in possible]
    for text in some:
        read = _reader(pair, text.tokens)
        for mistake, found in zip(possible, otherwise, strict=True):
            mistaken = replace(pair, draft=mistake.draft)
            followed = mistaken.follow(text.tokens, read(mistake.draft.reads).hidden, shape)
            found.append(_accepted(followed, text.begin))
    return [mistake for mistake, found in zip(possible, otherwise, strict=True) if is_clearly_more(as_it_says, found)]


def _of(pair: Pair) -> list[Mistake]:
    return mistakes(pair.draft, pair.of_draft, pair.of_target, pair.target.shared)


def _reader(pair: Pair, tokens: Sequence[int]) -> Callable[[States], Read]:
    """What the target makes of a text: most mistakes read the same states of it, which are kept for that text alone."""
    return cache(lambda reads: pair.target.read(tokens, reads))


def _accepted(followed: Followed, begin: int) -> float:
    """Mean drafts that are accepted behind a prompt."""
    return float(np.mean(followed.accepted_everywhere[begin:-1]))
