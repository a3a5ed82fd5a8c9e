"""Answers whose rows may be another request's: what they deserve cannot be told.

A row of layer k at position i was fed the token at i + k + 1. Where that one lay behind the prompt, it may have been a draft
that was refused, and SGLang does not write the row again (ledger entry `boundary-kv`). Where another request shares the row by
the prefix cache, and goes on otherwise, the row holds what the other one went on with.

A request takes rows from the cache when it begins, which its answer says (`cached`), and when a chunk or its prefill is over:
of the rows that others have put there meanwhile, it gives its own up. Nothing says so. So it is asked what it may have shared.
"""

from collections.abc import Sequence
from itertools import takewhile

from eagletwin.harness.core.weighed import Untold

from .conditions import Seen
from .cuts import ONCE
from .sending import Sent
from .server import Started

_SHARED = Untold(
    "rows of another answer",
    "they were sent together and begin alike, so the prefix cache may have given them rows of a text that goes on otherwise, "
    "or that was read in other chunks",
    "give prompts that begin otherwise",
)


def why_untold(all_seen: Sequence[Seen], layers: int, started: Started) -> list[Untold | None]:
    """Of each answer, why it may rest on rows that were fed otherwise; None: it does not.

    layers: of the draft that propose something; 0 or 1 for a head that is fed its own states, and stores no draft that was
    refused.
    """
    if layers < 2:
        return [None] * len(all_seen)
    together, cut = [one.sent for one in all_seen if one.sent.way == "together"], _cut(layers, started.chunk or 0)

    def why(seen: Seen) -> Untold | None:
        sent = seen.sent
        if sent.way == "together":
            borrows = any(_borrows(sent, other, layers, started) for other in together if other is not sent)
            return _SHARED if borrows else None
        # By itself a prompt meets no rows of others: the cache is emptied before it. Once more, it meets its own, some of which
        # it may compute again; where chunks end near the prompt's end they may differ.
        return cut if sent.way == "again" and seen.ways != ONCE else None

    return [why(seen) for seen in all_seen]


def _cut(layers: int, chunk: int) -> Untold:
    longer = "1 token" if layers == 2 else f"1 to {layers - 1} tokens"
    return Untold(
        "a chunk near the prompt's end",
        "they were sent once more, and a chunk of the prompt ended just in front of its last tokens, of which some rows are "
        "computed again",
        f"give prompts that are not {longer} longer than a multiple of {chunk}, or serve with another --chunked-prefill-size",
    )


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
