"""Aborts that come inside a step: while a batch runs, after the worker was given it and before its result is looked at.

SGLang's scheduler is one thread, and looks for messages at the start of an iteration alone. One that comes while a batch runs
lies in its socket until then: with overlap the result of the batch has not been looked at when it is read, without overlap it
has. So the message is handed to the scheduler at its first look after the launch, before all that comes later.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from eagletwin.harness.core.case import Case, Event
from eagletwin.harness.core.trace import Recorder, When

from .taps.wraps import Around, Wraps


class InStep:
    """Counts the batches of a scheduler, and says which of a case's events are due. drive.py asks before each iteration.

    Results are looked at in the order in which their batches were launched, so two numbers say which are under way.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._wraps = Wraps()
        self._launched, self._read = 0, 0
        self._batches: Counter[str] = Counter()  # by request
        self._sent: set[int] = set()  # events by their number

    def watch(self, scheduler: Any) -> None:
        self._wraps.method(scheduler, "run_batch", self._around_launch)
        self._wraps.method(scheduler, "process_batch_result", self._around_result)

    def undo(self) -> None:
        self._wraps.undo()

    def due(self, case: Case, iteration: int) -> Iterator[Event]:
        """Events that came since the last call, each recorded with the batches that were launched and read when the scheduler
        learns of it."""
        for number, event in enumerate(case.events):
            if not event.step or number in self._sent or self._batches[event.request] < event.step:
                continue
            self._sent.add(number)
            numbers = {"launched": self._launched, "read": self._read}
            self._recorder.add(event.request, 0, "abort", step=number, when=When(iteration), numbers=numbers)
            yield event

    def _around_launch(self, call: Around, batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = call(batch, *args, **kwargs)
        if batch.reqs:
            self._launched += 1
            self._batches.update(request.rid for request in batch.reqs)
        return result

    def _around_result(self, call: Around, batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = call(batch, *args, **kwargs)
        self._read += bool(batch.reqs)
        return result
