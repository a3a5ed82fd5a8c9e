"""Step the real scheduler through a case: hand requests and events in, let its own event loop run, drain, flush.

The release's own loop runs; only its receive call is replaced, which it makes once per iteration. That is the stepping
hook: arrivals, events, poison of freed slots, accounting and the end of the case all happen there. Events are the control
messages that SGLang itself takes from its tokenizer process.
"""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import torch

from eagletwin.harness.core.case import Case, Event, Request
from eagletwin.harness.core.records import EngineInfo, Jitter, Jittered
from eagletwin.harness.core.request_inputs import most_before
from eagletwin.harness.core.trace import Recorder
from eagletwin.harness.families import RECIPES

from . import blame, case_requests
from .accounts import Accounts
from .answers import Fates
from .case_requests import InStep, OpenSessions
from .compat import adaptive, requests, workers
from .compat import sessions as kept_sessions
from .jitter import Pauses, streams_of
from .stand_ins.configuration import Ends
from .taps.plain import PlainTaps, Unrecorded, Unwaited
from .taps.stages import EarlierStage, LastStage
from .taps.taps import Taps
from .taps.worker_v1 import TapsV1


class _Done(BaseException):
    """Leaves the event loop; not an Exception, so that no handler of the loop takes it for a failure."""


class EndlessCase(Exception):
    """The scheduler went on for more iterations than the case can need: it makes no progress."""


class Stopped(Exception):
    """The iteration was reached after which the case was to stop."""


def _taps_of(scheduler: Any, *, waits: bool) -> type[Taps]:
    """The taps for the worker that runs, or those that record nothing. waits: for the GPU, when they look at it."""
    if not waits:
        return Unwaited
    if "record-nothing" in blame.ON:
        return Unrecorded
    return TapsV1 if workers.is_v1(scheduler) else Taps


class Drive:
    """One case on one scheduler. `receive` stands in for the scheduler's receive call.

    until  raise Stopped after this iteration; -1: never
    live   asked before each iteration for the case as it is now, and whether there will be more; None: `case` is all
    jitter  leave the streams of a GPU to themselves, with these pauses: nothing is recorded but what requests were sent, and at
           the end the rows that the prefix cache keeps
    info    which rank this is, of how many. Each steps through the same case; SGLang's own broadcast hands on what rank 0
           returns
    """

    def __init__(
        self,
        scheduler: Any,
        case: Case,
        recorder: Recorder,
        reached: Callable[[str], None],
        until: int = -1,
        live: Callable[[int, Case], tuple[Case, bool]] | None = None,
        jitter: Jitter | None = None,
        info: EngineInfo | None = None,
    ) -> None:
        self.case = case
        self._scheduler = scheduler
        self._reached = reached
        self._until = until
        self._live = live
        self._rank, self._ranks, self._stages = (info.rank, info.tp, info.pp) if info is not None else (0, 1, 1)
        self._pauses = None if jitter is None else Pauses(jitter, streams_of(scheduler))
        if self._stages > 1:
            self._taps: Taps = (EarlierStage if self._rank else LastStage)(scheduler, recorder, reached)
        elif scheduler.draft_worker is None:
            self._taps = PlainTaps(scheduler, recorder, reached)
        else:
            self._taps = _taps_of(scheduler, waits=jitter is None)(scheduler, recorder, reached)
        self._accounts = Accounts(case, self._taps, recorder)
        self._fates = Fates()
        self._in_step = InStep(recorder)
        self._sessions = OpenSessions(case, recorder)
        self._on_gpu = str(scheduler.device).startswith("cuda")
        self._paused = False
        self._iteration = -1
        self._alone = 0  # from this iteration on the caller adds nothing to the case
        self._idle = 0
        # with overlap the first idle iteration still processes what the last batch resulted in
        self._drained = (3 if scheduler.enable_overlap else 2) * self._stages

    @property
    def jittered(self) -> Jittered | None:
        """Where pauses fell, if there were to be some."""
        return None if self._pauses is None else self._pauses.jittered

    def send(self, answers: Mapping[str, tuple[int, ...]]) -> None:
        """Have a plain engine send these answers, by request, whatever it would have sent."""
        if isinstance(self._taps, PlainTaps):
            self._taps.sends = answers

    def run(self, fresh: bool = False) -> None:
        """Run the case to its end. Raises what the worker raises, EndlessCase or Stopped.

        fresh: as if nothing had run on this scheduler. Whatever ran has drained and flushed it."""
        with contextlib.ExitStack() as until_it_ends:
            self._stand_in(until_it_ends)
            self._run(fresh)

    def _stand_in(self, until: contextlib.ExitStack) -> None:
        """Have the scheduler receive from here and send to here. When `until` is closed, its classes and it are as before: the
        next case may need less."""

        def put(owner: Any, name: str, value: Any) -> None:
            until.enter_context(patch.object(owner, name, value))

        # these sockets have no listener; both senders are of one class
        sender = getattr(self._scheduler, "ipc_channels", self._scheduler).send_to_detokenizer
        put(type(sender), "send_output", lambda _self, payload, *args, **kwargs: self._fates.sent(payload))
        # the receiver is a slotted dataclass from 0.5.20 on: its class is what can be changed
        receiver = type(getattr(self._scheduler, "request_receiver", self._scheduler))
        if self._stages > 1:
            put(receiver, workers.RECEIVE_OF_RANKS, self._receives_in_stages(receiver))
        elif self._ranks == 1:
            put(receiver, "recv_requests", lambda _self, *args, **kwargs: self._receive())
        else:
            put(receiver, workers.RECEIVE_OF_RANKS, lambda _self: self._receive_of_rank())
        if self._scheduler.tokenizer is None and any(request.min_new_tokens for request in self.case.requests):
            put(self._scheduler, "tokenizer", Ends())

    def _run(self, fresh: bool) -> None:
        if fresh:
            self._taps.allocation.forget()
        self._accounts.poison_all()
        if self.case.samples:  # whatever was drawn before: the same coins for the same case
            torch.manual_seed(self.case.engine.sglang.random_seed)
            self._taps.watch_coins()
        if self.case.constrains:
            self._taps.watch_masks(RECIPES[self.case.model].target.vocab_size, self.case.engine.sglang.grammar_backend)
        adaptive.restart(self._scheduler, self.case)
        if self.case.adapters:
            case_requests.load(self._scheduler, self.case)
        chunk = self._scheduler.chunked_prefill_size
        if any(event.step for event in self.case.events):
            self._in_step.watch(self._scheduler)
        if self._pauses is not None:
            self._wait_for_gpu()  # the poison, in another stream than what follows
            self._pauses.start()
        try:
            with self._taps, contextlib.suppress(_Done):
                workers.event_loop(self._scheduler)()
        finally:
            self._in_step.undo()
            if self._pauses is not None:
                self._pauses.stop()
        self._scheduler.chunked_prefill_size = chunk

    def _receive_of_rank(self) -> list[Any] | None:
        messages = self._receive()
        return messages if self._rank == 0 else None

    def _receives_in_stages(self, receiver: type) -> Callable[[Any], list[Any] | None]:
        """The first stage is handed what comes, and each hands it on to the next, which all step through the same case."""
        pulls: Callable[[Any], list[Any] | None] = getattr(receiver, workers.RECEIVE_OF_RANKS)

        def receive(own: Any) -> list[Any] | None:
            messages = self._receive()
            return messages if self._rank == self._stages - 1 else pulls(own)

        return receive

    def _receive(self) -> list[Any]:
        if 0 <= self._until <= self._iteration:
            raise Stopped(f"after iteration {self._iteration}, as asked")
        self._iteration += 1
        self._taps.writer.iteration = self._iteration
        self._reached("schedule")
        if self._pauses is None:  # with overlap, what was launched last may still run, in another stream
            self._wait_for_gpu()
        free = self._taps.allocation.free()
        self._accounts.slots("iteration", self._iteration, free)
        self._accounts.finished([request.id for request in self.case.requests], self._iteration, self._fates)
        if self._live is not None:
            self.case, more = self._live(self._iteration, self.case)
            if not more:
                self._live, self._alone = None, self._iteration
        if self._live is None:
            self._end_if_over()
        if self._iteration:
            self._accounts.poison_freed(free)
        self._set_chunk()
        if self.case.sessions:
            kept_sessions.end_those_that_wait(self._scheduler)
        return self._messages()

    def _all_ended(self) -> bool:
        """Whether every request of the case came and has ended."""
        return self._fates.handed_in.issuperset(one.id for one in self.case.requests) and not self._fates.unfinished()

    def _wait_for_gpu(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()

    def _end_if_over(self) -> None:
        """Raise _Done when the scheduler has nothing left to do and has had time to check itself, or EndlessCase."""
        if self._iteration > self._alone + self._limit():
            unfinished = ", ".join(self._fates.unfinished())
            raise EndlessCase(f"{self._iteration} iterations, and these are not finished: {unfinished}")
        if self._paused or not self._all_ended():
            return
        if self._accounts.copying or self._sessions.any_open:
            return
        self._idle += 1
        if self._idle == self._drained:  # the scheduler has had one idle iteration, and so has checked itself
            self._wait_for_gpu()
            if self.case.engine.sglang.radix_cache:
                self._accounts.cached(self._iteration, self._sessions.prompts(self._fates))
            self._scheduler.flush_cache()
            self._accounts.slots("flushed", self._iteration, self._taps.allocation.free())
            raise _Done

    def _messages(self) -> list[Any]:
        """What the scheduler receives in this iteration: what came while the last batch ran, requests that arrive, then the
        events."""
        handed_in = self._fates.handed_in
        arrived = [
            one
            for one in self.case.requests
            if one.arrive <= self._iteration and one.id not in handed_in and self._may_come(one)
        ]
        self._fates.arrive(request.id for request in arrived)
        vocabulary = RECIPES[self.case.model].target.vocab_size
        sent = [message for event in self._in_step.due(self.case, self._iteration) for message in self._control(event)]
        for request in arrived:
            sent += [*self._sessions.enter(request, self._iteration), requests.tokenized(request, vocabulary)]
        for event in self.case.events:
            if event.at == self._iteration and not event.step:
                sent += self._control(event)
        if not self._paused and not arrived and self._all_ended():
            sent += self._sessions.close_all(self._iteration)
        if self._paused and self._live is None and self._iteration > self.case.last_arrival:
            sent += self._control(Event(at=self._iteration, kind="resume"))
        return sent

    def _may_come(self, request: Request) -> bool:
        """Whether what the client waits for before it hands this request in has ended."""
        waits = bool(request.after) and request.after not in self._fates.finished
        return not waits and self._sessions.may_come(request, self._fates)

    def _control(self, event: Event) -> list[Any]:
        if event.kind == "close":
            return list(self._sessions.close(event.session, self._iteration))
        sent = case_requests.messages(event, self._paused)
        self._paused = case_requests.pauses(event, self._paused)
        return sent

    def _limit(self) -> int:
        """Iterations that the case can need: every request prefills at least a page an iteration and decodes at least a token,
        once more for each retraction; twice that, and room to start."""
        prompts = {one.id: len(one.prompt) + most_before(self.case, one.id) for one in self.case.requests}
        work = sum(prompts[request.id] // self.case.page_size + request.max_new_tokens for request in self.case.requests)
        retractions = sum(event.kind == "retract" for event in self.case.events)
        return 2 * work * (1 + retractions) * self._stages + self.case.last_arrival + 20

    def _set_chunk(self) -> None:
        """The budget of the next prefill batch. The scheduler reads it anew for each batch."""
        chunks = self.case.chunks
        chunk = chunks[self._taps.prefills] if self._taps.prefills < len(chunks) else self.case.chunked_prefill_size
        self._scheduler.chunked_prefill_size = chunk
