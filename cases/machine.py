"""A Hypothesis state machine that plays the scheduler by hand: each rule is one scheduler iteration, and each is judged.

It reaches what a case drawn as a whole hardly does: what happens next depends on what has happened. Whatever it plays is a
case in the end, and can be run again like any other.
"""

from collections.abc import Callable
from typing import ClassVar, Protocol

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from eagletwin.harness.core.case import Case, Event, Request

from .strategies import MAX_REQUESTS, Focus, configurations, requests


class Live(Protocol):
    """A case that is played step by step (harness/testing/twin.py). Each call raises as soon as something diverged."""

    @property
    def case(self) -> Case: ...

    @property
    def failed(self) -> bool: ...

    def step(self, requests: tuple[Request, ...] = (), events: tuple[Event, ...] = (), chunk: int | None = None) -> None: ...

    def finish(self) -> object: ...

    def close(self) -> None: ...


class SchedulerMachine(RuleBasedStateMachine):
    """One run of the machine. `machine` makes a class of it for an engine and a focus."""

    start: ClassVar[Callable[[Case], Live]]
    focus: ClassVar[Focus | None]

    def __init__(self) -> None:
        super().__init__()
        self.live: Live | None = None
        self.configuration = self.focus or Focus()
        self.paused = False

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        self.configuration = data.draw(configurations(self.focus))
        first = data.draw(requests(self.configuration, "a"))
        alone = Request(id="a", prompt=first.prompt, max_new_tokens=first.max_new_tokens, stop=first.stop)
        self.live = type(self).start(self.configuration.case("played", (alone,)))

    def play(self, *events: Event, requests: tuple[Request, ...] = (), chunk: int | None = None) -> None:
        assert self.live is not None
        self.live.step(requests, events, chunk)

    @rule(iterations=st.integers(1, 3))
    def step(self, iterations: int) -> None:
        for _ in range(iterations):
            self.play()

    @precondition(lambda self: len(self.live.case.requests) < MAX_REQUESTS)
    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        assert self.live is not None
        earlier = self.live.case.requests
        self.play(requests=(data.draw(requests(self.configuration, "abcdefgh"[len(earlier)], earlier)),))

    @rule(pages=st.integers(1, 6))
    def next_chunk(self, pages: int) -> None:
        self.play(chunk=pages * self.configuration.page_size)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        assert self.live is not None
        name = data.draw(st.sampled_from([request.id for request in self.live.case.requests]))
        self.play(Event(at=0, kind="abort", request=name))

    @rule()
    def retract(self) -> None:
        self.play(Event(at=0, kind="retract"))

    @rule()
    def flush(self) -> None:
        self.play(Event(at=0, kind="flush"))

    @rule()
    def pause_or_resume(self) -> None:
        self.play(Event(at=0, kind="resume" if self.paused else "pause"))
        self.paused = not self.paused

    def teardown(self) -> None:
        if self.live is None:
            return
        try:
            if not self.live.failed:
                self.live.finish()
        finally:
            self.live.close()


def machine(start: Callable[[Case], Live], focus: Focus | None = None) -> type[SchedulerMachine]:
    """The state machine on engines that `start` provides. focus: the configuration that most runs have, or any."""
    return type("SchedulerMachine", (SchedulerMachine,), {"start": staticmethod(start), "focus": focus})
