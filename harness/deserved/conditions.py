"""Under which condition rounds are lost: the one that all losses share and no equal answer has."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import comb

from eagletwin.cases.entry import Condition
from eagletwin.harness.core.recording import Inconclusive

from .rounds import ONCE, Compared, Cuts
from .server import Sent, Started


@dataclass(frozen=True, slots=True)
class Seen:
    """One answer and how it compares, if its prompt was read in one of these ways."""

    sent: Sent
    compared: Compared
    ways: tuple[Cuts, ...] = ONCE


def _is_chunked(seen: Seen, started: Started) -> bool | None:
    """Also where the prompt was in the cache: what is stored of it was computed in chunks. A shorter one that came with others
    may have been cut where their chunk was full, and nothing says whether it was."""
    if started.chunk is None:
        return None
    longer = bool(started.chunk) and len(seen.sent.answer.prompt) > started.chunk
    return None if started.chunk and not longer and seen.sent.way == "together" else longer


# What may be asked of an answer, by the names that a ledger entry's `loses` has. None: it is not known.
CONDITIONS: Mapping[Condition, Callable[[Seen, Started], bool | None]] = {
    "prompts longer than a chunk": _is_chunked,
    "prefix hits": lambda seen, _: seen.sent.answer.cached > 0,
    "batches": lambda seen, started: seen.sent.beside > 0 and started.max_running != 1,
}


@dataclass(frozen=True, slots=True)
class AnswerCount:
    """Answers of a condition: how many, how many are not equal, and the rounds."""

    count: int
    unequal: int
    deserved: int
    used: int


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the losses have in common.

    condition  "": nothing is lost; a name of CONDITIONS: the losses share it, and what lacks it is equal; "always": with each
               condition and without it answers lose; "mixed": none of these
    shares     of the answers with and without each condition; where that is not known an answer is in neither
    """

    condition: str
    shares: Mapping[Condition, tuple[AnswerCount, AnswerCount]]


# A condition explains the losses if all of them have it, and if that would be chance less often than this.
_BY_CHANCE = 0.01


def diagnose(all_seen: Sequence[Seen], started: Started) -> Diagnosis:
    """Which condition the unequal answers share."""
    shares: dict[Condition, tuple[AnswerCount, AnswerCount]] = {}
    for name, holds in CONDITIONS.items():
        having = [seen for seen in all_seen if holds(seen, started) is True]
        lacking = [seen for seen in all_seen if holds(seen, started) is False]
        shares[name] = (_share(having), _share(lacking))
    if all(seen.compared.equal for seen in all_seen):
        return Diagnosis("", shares)
    chances = {
        name: comb(having.count, having.unequal) / comb(having.count + lacking.count, having.unequal)
        for name, (having, lacking) in shares.items()
        if lacking.count and not lacking.unequal
    }
    if chances and min(chances.values()) < _BY_CHANCE:
        return Diagnosis(min(chances, key=lambda name: chances[name]), shares)
    everywhere = all(not part.count or part.unequal for both in shares.values() for part in both)
    return Diagnosis("always" if everywhere else "mixed", shares)


def _share(some: Sequence[Seen]) -> AnswerCount:
    return AnswerCount(
        len(some),
        sum(not seen.compared.equal for seen in some),
        sum(seen.compared.deserved.rounds for seen in some),
        sum(seen.compared.used for seen in some),
    )


# Answers whose rows may be another request's: what they deserve cannot be told.
#
# A row of layer k at position i was fed the token at i + k + 1. Where that one lay behind the prompt, it may have been a draft
# that was refused, and SGLang does not write the row again (ledger entry `boundary-kv`). Where another request shares the row
# by the prefix cache, and goes on otherwise, the row holds what the other one went on with.
#
# A request takes rows from the cache when it begins, which its answer says (`cached`), and when a chunk or its prefill is over:
# of the rows that others have put there meanwhile, it gives its own up. Nothing says so. So it is asked what it may have
# shared.

_SHARED = Inconclusive(
    "rows of another answer",
    "they were sent together and begin alike, so the prefix cache may have given them rows of a text that goes on otherwise, "
    "or that was read in other chunks",
    "give prompts that begin otherwise",
)


def why_untold(all_seen: Sequence[Seen], layers: int, started: Started) -> list[Inconclusive | None]:
    """Of each answer, why it may rest on rows that were fed otherwise; None: it does not.

    layers: of the draft that propose something; 0 or 1 for a head that is fed its own states, and stores no draft that was
    refused.
    """
    if layers < 2:
        return [None] * len(all_seen)
    together, cut = [one.sent for one in all_seen if one.sent.way == "together"], _cut(layers, started.chunk or 0)

    def why(seen: Seen) -> Inconclusive | None:
        sent = seen.sent
        if sent.way == "together":
            borrows = any(_borrows(sent, other, layers, started) for other in together if other is not sent)
            return _SHARED if borrows else None
        # By itself a prompt meets no rows of others: the cache is emptied before it. Once more, it meets its own, some of which
        # it may compute again; where chunks end near the prompt's end they may differ.
        return cut if sent.way == "again" and seen.ways != ONCE else None

    return [why(seen) for seen in all_seen]


def _cut(layers: int, chunk: int) -> Inconclusive:
    longer = "1 token" if layers == 2 else f"1 to {layers - 1} tokens"
    return Inconclusive(
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
