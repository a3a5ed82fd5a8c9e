"""Adds what the taps found to a Recorder, with when it was: iteration, batch, forward, and the round of each request."""

from typing import Any

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.trace import Recorder, When


class Writer:
    """Counts while a case runs. drive.py sets `iteration`; all else is counted here."""

    def __init__(self, recorder: Recorder) -> None:
        self.iteration = 0
        self._recorder = recorder
        self._batches = 0  # not forwards: those in a CUDA graph are not seen
        self._forwards = 0
        self._rounds: dict[str, int] = {}  # request -> how often it was verified

    def add(
        self, request: Any, stage: str, step: int, numbers: dict[str, int], tensors: dict[str, Array], layer: int = 0
    ) -> None:
        """A record of one request. A batch's tensors are copied once, and each request's are a part of the copy."""
        self._recorder.add(
            request.rid,
            self._rounds.get(request.rid, 0),
            stage,
            step=step,
            layer=layer,
            when=When(self.iteration, self._forwards),
            numbers=numbers,
            tensors=tensors,
        )

    def add_batch(self, numbers: dict[str, int], tensors: dict[str, Array]) -> None:
        """The record of a batch that begins; of no request."""
        when = When(self.iteration, self._forwards)
        self._recorder.add("", 0, "batch", step=self._batches, when=when, numbers=numbers, tensors=tensors)
        self._batches += 1

    def forward_begins(self) -> None:
        self._forwards += 1

    def round_ends(self, requests: list[Any]) -> None:
        for request in requests:
            self._rounds[request.rid] = self._rounds.get(request.rid, 0) + 1
