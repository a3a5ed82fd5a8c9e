"""Adds what the taps found to a Recorder, with when it was: iteration, batch, forward, and the round of each request."""

from collections import Counter
from collections.abc import Container
from typing import Any

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.trace import Recorder, When


class Writer:
    """Counts while a case runs. drive.py sets `iteration`; all else is counted here."""

    def __init__(self, recorder: Recorder) -> None:
        self.iteration = 0
        self._recorder = recorder
        # of batches, copies, look-ups, results before a retraction and what the choice of steps was told, each by its stage
        self._numbered: Counter[str] = Counter()
        self._forwards = 0  # those in a CUDA graph are not seen, so batches are counted, too
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

    def add_round(self, stage: str, tensors: dict[str, Array]) -> None:
        """A record of the round that runs; of no request."""
        when = When(self.iteration, self._forwards)
        self._recorder.add("", 0, stage, step=self._numbered["batch"], when=when, tensors=tensors)

    def add_numbered(self, stage: str, request: str, tensors: dict[str, Array], numbers: dict[str, int] | None = None) -> None:
        """A record that is counted by its stage: of a batch that begins, of a copy between device and host, of what the prefix
        cache had at a look-up or before a retraction by an event, or of what a batch's result told the choice of steps.

        request: whose rows a copy brings back, or who is looked up; "": none
        """
        when = When(self.iteration, self._forwards)
        self._recorder.add(request, 0, stage, step=self._numbered[stage], when=when, numbers=numbers, tensors=tensors)
        self._numbered[stage] += 1

    def forget_but(self, names: Container[str]) -> None:
        """Forget the rounds of all other requests: a server has no last one."""
        self._rounds = {name: rounds for name, rounds in self._rounds.items() if name in names}

    def forward_begins(self) -> None:
        self._forwards += 1

    def round_ends(self, requests: list[Any]) -> None:
        for request in requests:
            self._rounds[request.rid] = self._rounds.get(request.rid, 0) + 1
