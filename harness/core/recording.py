"""The recording of one request of a server, as its trace.json holds it. Plain data; trace.py writes and reads it.

It has the records of a trace, and no case: nobody drew what a server was asked for, and no recipe describes its model. Read, it
becomes a trace of a case that says what there was, with a `served` model.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from .arrays import Array
from .case import Case, EngineSettings, Request, Sampling, SGLangSettings
from .records import Ending, EngineInfo, Header, Record, ServedModel, Size
from .verdict import Divergence

RECORDING = 2
# A server's own file, beside the folders of its requests.
SERVER = "server.json"
# Why a request that was due was not recorded.
Skipped = Literal["over_share", "at_once", "full", "failed", "not_tokens_alone"]


class RecordedRequest(Struct, frozen=True, kw_only=True):
    """What a client asked for.

    id       what the records call it
    rid      what the engine calls it; where ids are private, a digest of that by the recording's key, the same on each rank
    stop     tokens that end it, the model's end-of-sequence tokens among them unless it ignores those
    sampled  whether anything but the best token may be taken
    altered  whether its logits are changed before a token is chosen: by a bias, a penalty, a grammar, a processor
    """

    id: str
    rid: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    stop: tuple[int, ...] = ()
    sampled: bool = False
    altered: bool = False


class RecordedServer(Struct, frozen=True, kw_only=True):
    """What a rank says of all its recordings; written anew after each. `arguments` are those of the server by which it drafts.

    launch   which start of the server the rank belongs to: the same for all its ranks, and another for the next start
    dp       the rank's number among those of data parallelism; `engine` has that of tensor parallelism
    seen     requests that were prefilled; written: those that have a recording; skipped: those that were due and have none
    failures of taps, each of which gave up the recordings under way; last_failure: the newest
    share    of the scheduler's time that recording took
    """

    recording: int
    engine: EngineInfo
    arguments: dict[str, str]
    launch: str
    dp: int = 0
    seen: int = 0
    written: int = 0
    skipped: dict[Skipped, int] = {}
    failures: int = 0
    last_failure: str = ""
    share: float = 0.0


class RecordingHeader(Struct, frozen=True, kw_only=True):
    """A recording. The sizes are those of the server's arguments, in tokens.

    recording  its format
    private    token ids are permuted, each request's by a permutation of its own
    dtypes, shapes and the digests are those of a trace
    """

    schema: int
    recording: int
    request: RecordedRequest
    num_steps: int
    topk: int
    num_draft_tokens: int
    page_size: int
    chunked_prefill_size: int
    radix_cache: bool
    served: ServedModel
    engine: EngineInfo
    ending: Ending
    records: tuple[Record, ...]
    private: bool = False
    dtypes: str = ""
    shapes: tuple[tuple[Size, ...], ...] = ()
    tensors_sha256: str = ""
    sha256: str = ""


def as_header(recorded: RecordingHeader, records: tuple[Record, ...]) -> Header:
    """The header of a trace that says the same. Its case lies outside of what a case file may hold: servers are larger."""
    asked = recorded.request
    request = Request(
        id=asked.id,
        prompt=asked.prompt,
        max_new_tokens=asked.max_new_tokens,
        stop=asked.stop,
        sampling=Sampling() if asked.sampled else None,
    )
    case = Case(
        name=asked.rid or asked.id,
        model="served",
        requests=(request,),
        num_steps=recorded.num_steps,
        topk=recorded.topk,
        num_draft_tokens=recorded.num_draft_tokens,
        page_size=recorded.page_size,
        chunked_prefill_size=recorded.chunked_prefill_size,
        engine=EngineSettings(sglang=SGLangSettings(radix_cache=recorded.radix_cache)),
    )
    return Header(
        schema=recorded.schema,
        case=case,
        weights="",
        engine=recorded.engine,
        inner=True,
        ending=recorded.ending,
        records=records,
        served=recorded.served,
        tensors_sha256=recorded.tensors_sha256,
        sha256=recorded.sha256,
    )


class Tables:
    """Rows of req_to_token of one request, written as what has changed since the one before: whole ones would grow with the
    square of the request's length."""

    def __init__(self) -> None:
        self._last: Array = np.empty(0, np.int64)

    def changes(self, table: Array) -> tuple[dict[str, int], dict[str, Array]]:
        """Numbers and tensors that a record has in place of its `table` [n]."""
        last, both = self._last, min(len(self._last), len(table))
        at = np.concatenate([np.flatnonzero(table[:both] != last[:both]), np.arange(both, len(table))])
        self._last = table
        return {"table_length": len(table)}, {"table_at": at, "table_slots": table[at]}


def whole_tables(
    records: Sequence[Record], tensors: dict[str, Tensor | Array]
) -> tuple[tuple[Record, ...], dict[str, Tensor | Array]]:
    """The records of one request with whole tables again. Raises KeyError or ValueError if the changes do not fit.

    Tables that only grow share their memory.
    """
    found, kept, room = [], dict(tensors), np.empty(0, np.int64)
    end = before = 0  # entries of `room` that some table shows; length of the last table
    for number, record in enumerate(records):
        length = record.numbers.get("table_length")
        if length is None:
            found.append(record)
            continue
        at, slots = (np.asarray(kept.pop(f"{number}.{name}")) for name in ("table_at", "table_slots"))
        if at.shape != slots.shape or (len(at) and not 0 <= int(at.min()) <= int(at.max()) < length):
            raise ValueError(f"record {number} changes entries outside of its table")
        if length > before + len(at):
            raise ValueError(f"record {number} has a longer table than it says the entries of")
        before = length
        if length > len(room) or (len(at) and int(at[0]) < end):
            room = np.concatenate([room[:length], np.zeros(max(0, 2 * length - len(room)), np.int64)])
            end = 0
        room[at] = slots
        end = max(end, length)
        kept[f"{number}.table"] = room[:length]
        names = (*(name for name in record.tensors if name not in ("table_at", "table_slots")), "table")
        numbers = {name: value for name, value in record.numbers.items() if name != "table_length"}
        found.append(replace(record, tensors=names, numbers=numbers))
    return tuple(found), kept


# What a pair of checkpoints says of a recording of its server, and why it may say nothing of what was drafted. Plain data.


@dataclass(frozen=True, slots=True)
class Inconclusive:
    """Why nobody can tell which drafts a request deserves.

    cause   in a few words, for tables and programs
    why     a sentence's part that explains it; remedy: a sentence's part, what to do to have such requests compared
    """

    cause: str
    why: str
    remedy: str


@dataclass(slots=True)
class RecordingComparison:
    """One recording: comparisons by rule, and what diverged, in the order of the data.

    open    choices that are too close to tell
    untold  why none of its drafts was compared; None: some were
    """

    divergences: list[Divergence] = field(default_factory=list)
    checked: Counter[str] = field(default_factory=Counter)
    open: int = 0
    untold: Inconclusive | None = None
