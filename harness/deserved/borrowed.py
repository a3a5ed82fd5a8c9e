"""Answers whose rows may be another request's: what they deserve cannot be told.

A row of layer k at position i was fed the token at i + k + 1. Where that one lay behind the prompt, it may have been a draft
that was refused, and SGLang does not write the row again (ledger entry `boundary-kv`). Where another request shares the row by
the prefix cache, and goes on otherwise, the row holds what the other one went on with.

A request takes rows from the cache when it begins, which its answer says (`cached`), and when a chunk or its prefill is over:
of the rows that others have put there meanwhile, it gives its own up. Nothing says so. So it is asked what it may have shared.
"""

from collections.abc import Sequence
from itertools import takewhile

from .cuts import ONCE, possible_cuts
from .sending import Sent
from .server import Started


def cannot_be_told(all_sent: Sequence[Sent], layers: int, started: Started) -> list[bool]:
    """Of each answer, whether it may rest on rows that others had otherwise.

    layers: of the draft that propose something; 0 or 1 for a head that is fed its own states, and stores no draft that was
    refused.
    """
    together = [sent for sent in all_sent if sent.way == "together"]
    return [
        layers > 1
        and (
            any(_borrows(sent, other, layers, started) for other in together if other is not sent)
            if sent.way == "together"
            # By itself a prompt meets no rows of others: the cache is emptied before it. Once more, it meets its own, some of
            # which it may compute again; where chunks end near the prompt's end they may differ.
            else sent.way == "again" and possible_cuts(sent.way, len(sent.answer.prompt), started.chunk, layers) != ONCE
        )
        for sent in all_sent
    ]


def _borrows(sent: Sent, other: Sent, layers: int, started: Started) -> bool:
    """Whether it may have rows of the other one that are not what its own would be."""
    if sent.answer.prompt == other.answer.prompt and not started.chunk:
        return False  # each would have stored the same rows; where chunks end may differ
    alike, page = _alike(sent, other), max(started.page_size, 1)
    # The cache finds a row by its token and the next one.
    shared = max(alike - 1, 0) // page * page
    return shared > max(min(alike, len(other.answer.prompt)) - layers, 0)


def _alike(sent: Sent, other: Sent) -> int:
    """How many tokens of this prompt the text of the other one begins with."""
    text = (*other.answer.prompt, *other.answer.tokens)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(sent.answer.prompt, text, strict=False)))
