"""The recordings of a server that are under way, by request. It takes what a Writer adds, in a Recorder's place."""

from hashlib import sha256
from typing import Any

import numpy as np

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.recording import Tables
from eagletwin.harness.core.trace import Recorder

from ..taps.pools import Allocation, Pool
from ..taps.rows import ChangedRows

# Tensors and numbers that are token ids, by stage. (A draft's `next_token` is a link of its tree.)
_TOKENS: dict[str, tuple[str, ...]] = {
    "target.extend": ("input_ids",),
    "draft.extend": ("input_ids",),
    "prefill": ("next_token", "proposal"),
    "draft.decode": ("input_ids",),
    "draft": ("tokens", "candidate_tokens", "consumed"),
    "target.verify": ("input_ids",),
    "verify": ("predicted", "bonus"),
    "draft.extend_decode": ("input_ids",),
    "extend": ("proposal",),
    "finished": ("tokens",),
}


# What is recorded of floats, where it was asked for.
KEPT = "draft_kv"


class Recording:
    """One request. id: what its records call it; request: SGLang's own object; permutation: of its token ids, or None."""

    def __init__(self, number: int, request: Any, permutation: Array | None) -> None:
        self.id = f"request-{number:06}"
        self.request = request
        self.rounds = 0
        self.absent = 0  # batches in a row that ran without the request
        self.rows = 0  # of the draft's pool, so far
        self.recorder = Recorder()
        self._tables = Tables()
        self._permutation = permutation

    def add(
        self, round: int, stage: str, numbers: dict[str, int], tensors: dict[str, Array], *, own: bool = True, **key: Any
    ) -> None:
        """A record; own: of this request, and not of its batch or the pool."""
        tensors = {name: _kept(array) for name, array in tensors.items() if array.dtype.kind != "f" or name == KEPT}
        if "table" in tensors:
            more, changed = self._tables.changes(tensors.pop("table"))
            numbers, tensors = numbers | more, tensors | changed
        for name in _TOKENS.get(stage, ()) if self._permutation is not None else ():
            if name in tensors:
                tensors[name] = self.permuted(tensors[name])
            if name in numbers:
                numbers = numbers | {name: int(self.permuted(np.array([numbers[name]]))[0])}
        if stage == "verify":
            self.rounds += 1
        self.recorder.add(self.id if own else "", round, stage, numbers=numbers, tensors=tensors, **key)

    def permuted(self, tokens: Array) -> Array:
        """Ids as they are recorded. One outside the vocabulary stays outside."""
        if self._permutation is None:
            return tokens
        inside = (tokens >= 0) & (tokens < len(self._permutation))
        found: Array = np.where(inside, self._permutation[np.where(inside, tokens, 0)], tokens)
        return found


def _kept(array: Array) -> Array:
    """A request's part of what a batch has, without the rest of it."""
    return array.copy() if array.base is not None else array


def permutation(key: str, rid: str, vocab_size: int) -> Array:
    """A permutation of the vocabulary [V], the same on every rank for one request."""
    seed = int.from_bytes(sha256(f"{key}/{rid}".encode()).digest(), "big")
    return np.random.default_rng(seed).permutation(vocab_size)


class UnderWay:
    """All of them, by SGLang's id of the request."""

    def __init__(self) -> None:
        self.by_rid: dict[str, Recording] = {}

    def of(self, requests: list[Any]) -> list[Recording]:
        """The recordings of a batch's requests."""
        return [self.by_rid[request.rid] for request in requests if request.rid in self.by_rid]

    def add(
        self,
        request: str,
        round: int,
        stage: str,
        *,
        numbers: dict[str, int] | None = None,
        tensors: dict[str, Array] | None = None,
        **key: Any,
    ) -> None:
        """As Recorder.add. What belongs to requests that are not recorded is dropped."""
        recording = self.by_rid.get(request)
        if recording is not None:
            recording.add(round, stage, numbers or {}, tensors or {}, **key)


# The draft's KV rows of requests that are recorded: each once, when it is committed. What a checkpoint at hand explains.


class CommittedRows(ChangedRows):
    """In the place of ChangedRows, which reads all rows each time: a server's requests are too long for that.

    most: rows of a request, at most
    """

    def __init__(self, allocation: Allocation, pool: Pool, underway: UnderWay, most: int) -> None:
        super().__init__(allocation, {})
        self._pool, self._underway, self._most = pool, underway, most

    def of(self, requests: list[Any], ends: list[int]) -> list[dict[str, Array]]:
        """As there; of the rows below ends[n] those that were not recorded yet."""
        found = super().of(requests, ends)
        parts = []
        for request, end, tensors in zip(requests, ends, found, strict=True):
            recording = self._underway.by_rid.get(request.rid)
            if recording is None or recording.rows >= min(end, self._most):
                continue
            begin, recording.rows = recording.rows, min(end, self._most)
            tensors["draft_rows"] = np.arange(begin, recording.rows)
            parts.append((tensors, tensors["table"][begin : recording.rows]))
        if parts:
            for (tensors, _), rows in zip(parts, self._pool.rows_of([slots for _, slots in parts]), strict=True):
                tensors[KEPT] = rows
        return found
