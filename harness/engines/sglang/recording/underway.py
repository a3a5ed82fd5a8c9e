"""The recordings of a server that are under way, by request, and the thread that writes them.

A recording takes what a Writer adds, in a Recorder's place.
"""

import queue
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from torch import Tensor

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.recording import SERVER, RecordedServer, RecordingHeader, Tables
from eagletwin.harness.core.trace import Recorder, write_trace

from ..taps.passes import ChangedRows
from ..taps.pools import Allocation, Pool

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
        kept = {name: array for name, array in tensors.items() if array.dtype.kind != "f" or name == KEPT}
        # a request's part of what a batch has, without the rest of it
        tensors = {name: array.copy() if array.base is not None else array for name, array in kept.items()}
        if "table" in tensors:
            more, changed = self._tables.changes(tensors.pop("table"))
            numbers, tensors = numbers | more, tensors | changed
        for name in _TOKENS.get(stage, ()) if self._permutation is not None else ():
            if name in tensors:
                tensors[name] = self.permute(tensors[name])
            if name in numbers:
                numbers = numbers | {name: int(self.permute(np.array([numbers[name]]))[0])}
        if stage == "verify":
            self.rounds += 1
        self.recorder.add(self.id if own else "", round, stage, numbers=numbers, tensors=tensors, **key)

    def permute(self, tokens: Array) -> Array:
        """Ids as they are recorded. One outside the vocabulary stays outside."""
        if self._permutation is None:
            return tokens
        inside = (tokens >= 0) & (tokens < len(self._permutation))
        found: Array = np.where(inside, self._permutation[np.where(inside, tokens, 0)], tokens)
        return found


def permutation(key: str, rid: str, vocab_size: int) -> Array:
    """A permutation of the vocabulary [V], the same on every rank for one request."""
    seed = int.from_bytes(sha256(f"{key}/{rid}".encode()).digest(), "big")
    return np.random.default_rng(seed).permutation(vocab_size)


class UnderWay(Recorder):
    """All of them, by SGLang's id of the request."""

    def __init__(self) -> None:
        super().__init__()
        self.by_rid: dict[str, Recording] = {}

    def of(self, requests: list[Any]) -> list[Recording]:
        return [self.by_rid[request.rid] for request in requests if request.rid in self.by_rid]

    def add(
        self,
        request: str,
        round: int,
        stage: str,
        *,
        numbers: dict[str, int] | None = None,
        tensors: Mapping[str, Any] | None = None,
        **key: Any,
    ) -> None:
        """As Recorder.add, of arrays. What belongs to requests that are not recorded is dropped."""
        recording = self.by_rid.get(request)
        if recording is not None:
            recording.add(round, stage, numbers or {}, dict(tensors or {}), **key)


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


# Writes recordings, in a thread of its own: the scheduler waits for no disk, and a disk that is full stops no server.

_WAITING = 16  # recordings that wait to be written, at most: each is some megabytes in memory


class Keeper:
    """Writes each recording into a folder of its own below `folder`, and server.json after it.

    spent(seconds): told of the processor time that writing took; state(): what server.json says now
    """

    def __init__(
        self, folder: Path, megabytes: int, spent: Callable[[float], None], state: Callable[[], RecordedServer]
    ) -> None:
        self._folder = folder
        self._left = megabytes * 1_000_000
        self._spent, self._state = spent, state
        self._waiting: queue.Queue[tuple[RecordingHeader, Mapping[str, Tensor | Array]] | None] = queue.Queue(_WAITING)
        self.written = 0
        self.full = False  # for good: what is there is whole, and nothing is added to it

    def start(self) -> None:
        """Raises OSError if the folder cannot be written."""
        self._folder.mkdir(parents=True)
        self._say()
        threading.Thread(target=self._work, name="eagletwin-keeper", daemon=True).start()

    def keep(self, header: RecordingHeader, tensors: Mapping[str, Tensor | Array]) -> bool:
        """Have it written. False if too many wait."""
        try:
            self._waiting.put_nowait((header, tensors))
        except queue.Full:
            return False
        return True

    @property
    def busy(self) -> bool:
        return self._waiting.full()

    def note(self) -> None:
        """Have server.json written anew, if nothing else has it written soon."""
        if self._waiting.empty():
            try:
                self._waiting.put_nowait(None)
            except queue.Full:
                return

    def _work(self) -> None:
        while True:
            work, begin = self._waiting.get(), time.thread_time()
            try:
                if work is not None and not self.full:
                    self._write(*work)
                self._say()
            except OSError as error:
                self._give_up(error)
            self._spent(time.thread_time() - begin)

    def _write(self, header: RecordingHeader, tensors: Mapping[str, Tensor | Array]) -> None:
        folder = self._folder / header.request.id
        folder.mkdir()
        try:
            write_trace(folder, header, tensors)
        except OSError:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        self.written += 1
        self._left -= sum(file.stat().st_size for file in folder.iterdir())
        if self._left <= 0:
            self.full = True
            _tell("the files of the recordings are as large as was asked for: no further request is recorded")

    def _say(self) -> None:
        scratch = self._folder / f".{SERVER}"
        scratch.write_bytes(msgspec.json.encode(self._state()))
        scratch.replace(self._folder / SERVER)

    def _give_up(self, error: OSError) -> None:
        if not self.full:
            self.full = True
            _tell(
                f"error: {error}\n  so:  no further request is recorded; recordings that were complete are kept\n"
                "  try: name a folder on a disk with room, and start the server again"
            )


def _tell(text: str) -> None:
    print(f"eagletwin: {text}", file=sys.stderr, flush=True)
