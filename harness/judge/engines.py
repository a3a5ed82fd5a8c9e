"""Where engines mean different things by the same words: conventions, each with its source in docs/explanation/conventions.md.

A rule asks the view of the engine that left the trace, and is the same for all else.
"""

from dataclasses import dataclass
from itertools import zip_longest

from eagletwin.harness.core.trace import Trace


@dataclass(frozen=True, slots=True)
class EngineView:
    """An engine's conventions.

    trees       verify is given a tree: links and a mask come with its nodes. Else it is a chain by construction
    spare_slot  draft() lays out a slot for each of num_steps steps, the last of which does not run
    draft_ids   the first proposal is handed on as an id of the draft's vocabulary, where that is its own; else as the target's
    counts_all  a round of no drafts is counted as a round; else a last chunk that is padded to the rows of a round is
    pairs       keys of the prefix cache are pairs of tokens, of which n tokens have n - 1; else a key covers a block and the
                token after it, so that all rows but that of the last token can be found
    early       a block is in the prefix cache when the step that writes it is scheduled, and a request of that step may have
                it: each layer writes its rows before it attends
    keeps_last  the prefix cache is given the rows that the last round of a request committed
    skips       no drafts are proposed in a step after which no request of the batch can use any
    strict_penalties  each row of a round counts the drafts before it; repetition comes first, for the prompt too, and a
                bias before it. Else a round counts what was sent when it began
    hashes_places  chance is hashed from a request's seed and a row's place: the coin that accepts a draft; and, by token, the
                noise that draws the bonus token. Else coins of the worker's own do both
    """

    trees: bool = True
    spare_slot: bool = True
    draft_ids: bool = True
    counts_all: bool = True
    pairs: bool = True
    early: bool = False
    keeps_last: bool = True
    skips: bool = False
    strict_penalties: bool = False
    hashes_places: bool = False


_VIEWS = {
    "vllm": EngineView(
        trees=False,
        spare_slot=False,
        draft_ids=False,
        counts_all=False,
        pairs=False,
        early=True,
        keeps_last=False,
        skips=True,
        strict_penalties=True,
        hashes_places=True,
    )
}
_USUAL = EngineView()


def view_of_engine(name: str) -> EngineView:
    """The conventions of an engine, by its name in a trace."""
    return _VIEWS.get(name, _USUAL)


# Where two engines part on one case: a convention, if both are right.

_SHARED = ("input_ids", "positions", "tokens", "next_token", "predicted")  # integers that mean the same on any engine
_COUNTED = ("start", "end", "final", "seq_len", "new_seq_len", "accept_len", "bonus", "steps", "skipped", "padded", "finish")


@dataclass(frozen=True, slots=True)
class Parting:
    """The first place in which two engines did something else. what: a number, or a row of a tensor."""

    place: str
    what: str
    left: str
    right: str

    def __str__(self) -> str:
        return f"{self.place}, {self.what}: {self.left} | {self.right}"


def first_parting(left: Trace, right: Trace) -> Parting | None:
    """In the order of the left trace, request by request; None: they agree in all that both have. Memory is each engine's own,
    and what is computed in floats is the judge's."""
    ours, theirs = _by_key(left), _by_key(right)
    stages = {key[2] for key in ours} & {key[2] for key in theirs}
    for key in dict.fromkeys((*ours, *theirs)):
        if key[2] not in stages:
            continue
        request, round, stage, step = key
        place = f"request {request}, round {round}, {stage}" + (f" {step}" if step else "")
        if key not in ours or key not in theirs:
            return Parting(place, "record", *("there" if key in one else "none" for one in (ours, theirs)))
        for name, (one, other) in _values(left, ours[key], right, theirs[key]).items():
            if one != other:
                return Parting(place, name, one, other)
    return None


def _by_key(trace: Trace) -> dict[tuple[str, int, str, int], int]:
    """Records of requests: (request, round, stage, step) -> number of the first."""
    found: dict[tuple[str, int, str, int], int] = {}
    for number, record in enumerate(trace.header.records):
        if record.request:
            found.setdefault((record.request, record.round, record.stage, record.step), number)
    return dict(sorted(found.items(), key=lambda item: (item[0][0], item[0][1], item[1])))


def _values(left: Trace, one: int, right: Trace, other: int) -> dict[str, tuple[str, str]]:
    """What both records say, by name, as text."""
    records = left.header.records[one], right.header.records[other]
    first, second = records
    found = {
        name: (str(first.numbers.get(name, 0)), str(second.numbers.get(name, 0)))
        for name in _COUNTED
        if name in first.numbers or name in second.numbers
    }
    for name in _SHARED:
        if all(name in record.tensors for record in records):
            rows = left.integers(one, name), right.integers(other, name)
            apart = [(row, pair) for row, pair in enumerate(zip_longest(*rows, fillvalue="none")) if pair[0] != pair[1]]
            found |= {f"row {row} of {name}": (str(pair[0]), str(pair[1])) for row, pair in apart[:1]}
    return found
