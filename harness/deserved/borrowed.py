"""Answers that began on another request's drafts: what they deserve cannot be told.

A row of layer k at position i was fed the token at i + k + 1. Where that one lay behind the prompt, it may have been a draft
that was refused, and SGLang does not write the row again (ledger entry `boundary-kv`). Whoever begins with the same text finds
the row in the prefix cache, and nothing tells which draft it holds.
"""

from collections.abc import Sequence
from itertools import takewhile

from .sending import Sent


def began_on_drafts(all_sent: Sequence[Sent], layers: int) -> list[bool]:
    """Of each answer, whether it may have begun on rows that hold a draft of another request.

    layers: of the draft; 0 or 1 for a head that is fed its own states, and stores no draft that was refused. A prompt that is
    sent by itself meets no rows of others: the prefix cache is emptied before it.
    """
    together = [sent for sent in all_sent if sent.way == "together"]
    return [
        layers > 1
        and sent.way == "together"
        and any(
            min(_alike(sent, other), sent.answer.cached) > max(len(other.answer.prompt) - layers, 0)
            for other in together
            if other.answer.prompt != sent.answer.prompt  # of the same prompt each would have stored the same rows
        )
        for sent in all_sent
    ]


def _alike(sent: Sent, other: Sent) -> int:
    """How many tokens of this prompt the text of the other one begins with."""
    text = (*other.answer.prompt, *other.answer.tokens)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(sent.answer.prompt, text, strict=False)))
