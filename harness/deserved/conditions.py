"""Under which condition rounds are lost: the one that all losses share and no equal answer has."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import comb

from eagletwin.cases.entry import Condition

from .compare import Compared
from .cuts import ONCE, Cuts
from .sending import Sent
from .server import Started


@dataclass(frozen=True, slots=True)
class Seen:
    """One answer and how it compares, if its prompt was read in one of these ways."""

    sent: Sent
    compared: Compared
    ways: tuple[Cuts, ...] = ONCE


def _chunked(seen: Seen, started: Started) -> bool | None:
    """Also where the prompt was in the cache: what is stored of it was computed in chunks. A shorter one that came with others
    may have been cut where their chunk was full, and nothing says whether it was."""
    if started.chunk is None:
        return None
    longer = bool(started.chunk) and len(seen.sent.answer.prompt) > started.chunk
    return None if started.chunk and not longer and seen.sent.way == "together" else longer


# What may be asked of an answer, by the names that a ledger entry's `loses` has. None: it is not known.
CONDITIONS: Mapping[Condition, Callable[[Seen, Started], bool | None]] = {
    "prompts longer than a chunk": _chunked,
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
