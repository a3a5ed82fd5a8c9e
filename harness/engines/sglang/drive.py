"""Step the real scheduler through a case: hand requests and events in, let its own event loop run, drain, flush.

The release's own loop runs; only its receive call is replaced, which it makes once per iteration. That is the stepping
hook: arrivals, events, poison of freed slots, accounting and the end of the case all happen there. Events are the control
messages that SGLang itself takes from its tokenizer process.
"""

import contextlib
import random
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from eagletwin.harness.core.arrays import Array, runs_of
from eagletwin.harness.core.case import Case, Event, Request, most_before, share_of_rank
from eagletwin.harness.core.records import EngineInfo, Jitter, Jittered, Pause
from eagletwin.harness.core.trace import Recorder, When
from eagletwin.harness.engines.inside import blame
from eagletwin.harness.engines.inside.adapter import EndlessCase, Stopped
from eagletwin.harness.families import RECIPES

from . import case_requests
from .answers import Fates, Messages
from .case_requests import InStep, OpenSessions
from .compat import adaptive, dp_attention, requests, workers
from .compat import memory as kept_sessions
from .stand_ins.stubs import Ends
from .taps.stages import EarlierStage, LastStage, PlainTaps, Unrecorded, Unwaited
from .taps.taps import Taps, TapsV1

# Seeded pauses between the streams of a GPU, so that a wait that is missing shows.
#
# Streams are ordered where one records an event and another waits for it, and begin new work where the process enters or
# leaves a stream. After each such call, by chance, the stream on which work goes on sleeps for a while. The answers must not
# change: all that has to wait is made to. SGLang's own test (`sglang/test/cache_consistency_jitter.py`) pauses after events,
# too.

_CYCLES = 2000  # of a microsecond: GPUs of today run at up to 2 GHz
_SPREAD = 100  # the shortest pause is this part of the longest


class Pauses:
    """From `start` to `stop` every event and every stream of the process gets them.

    cuda  torch.cuda, whose classes are changed
    name  what to call a stream
    """

    def __init__(self, asked: Jitter, name: Callable[[Any], str], cuda: Any = torch.cuda) -> None:
        self._asked, self._name, self._cuda = asked, name, cuda
        self._random = random.Random(asked.seed)
        self._points, self._pauses = 0, list[Pause]()
        self._inside = False  # a wait for a stream records an event and waits for it: one point, not three
        self._undo: list[tuple[Any, str, Any]] = []

    @property
    def jittered(self) -> Jittered:
        return Jittered(self._asked, self._points, tuple(self._pauses))

    def start(self) -> None:
        cuda = self._cuda
        for method in ("record", "wait"):
            self._wrap(cuda.Event, method, lambda event, stream=None: stream)
        for method in ("wait_event", "wait_stream"):
            self._wrap(cuda.Stream, method, lambda stream, other: stream)
        for method in ("__enter__", "__exit__"):  # work goes on in the stream that is then the current one
            self._wrap(cuda.StreamContext, method, lambda context, *_: None)

    def stop(self) -> None:
        while self._undo:
            setattr(*self._undo.pop())

    def _wrap(self, owner: Any, method: str, goes_on: Callable[..., Any]) -> None:
        """goes_on: of the call's arguments the stream behind it; None: the current one."""
        original = getattr(owner, method)
        place = f"{owner.__name__}.{method.strip('_')}"

        def with_pause(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return original(*args, **kwargs)
            self._inside = True
            try:
                result = original(*args, **kwargs)
                self._perhaps(place, goes_on(*args, **kwargs))
                return result
            finally:
                self._inside = False

        setattr(owner, method, with_pause)
        self._undo.append((owner, method, original))

    def _perhaps(self, place: str, stream: Any) -> None:
        """A point: draw whether the stream gets a pause, and which."""
        point, self._points = self._points, self._points + 1
        chance, part = self._random.random(), self._random.random()
        microseconds = int(self._asked.longest * _SPREAD ** (part - 1))
        if chance >= self._asked.share or not microseconds:
            return
        stream = self._cuda.current_stream() if stream is None else stream
        with self._cuda.StreamContext(stream):
            self._cuda._sleep(microseconds * _CYCLES)
        self._pauses.append(Pause(point, f"{place} on {self._name(stream)}", microseconds))


def streams_of(scheduler: Any) -> Callable[[Any], str]:
    """By what name the scheduler has a stream."""
    owners = {"schedule": "schedule_stream", "forward": "forward_stream", "copy": "copy_stream"}

    def name(stream: Any) -> str:
        held = {word: getattr(scheduler, attribute, None) for word, attribute in owners.items()}
        held["lengths"] = getattr(getattr(scheduler, "future_map", None), "fwd_prepare_d2h_stream", None)
        return next((word for word, known in held.items() if known is not None and known == stream), "another")

    return name


# Records between batches: slots, ends of requests and the prefix cache; and poison in the slots that are free.


class Accounts:
    """What drive.py notes at the start of an iteration, of the requests that the taps have seen."""

    def __init__(self, case: Case, taps: Taps, recorder: Recorder) -> None:
        self._case = case
        self._taps = taps
        self._recorder = recorder

    def slots(self, stage: str, iteration: int, free: Array) -> None:
        """Whose the slots are. stage: `iteration`, or `flushed` at the end of a case."""
        if not self._taps.records:
            return
        allocation = self._taps.allocation
        held = {name: allocation.held_slots(request) for name, request in self._taps.requests.items()}
        numbers = allocation.counts() | {"live": sum(map(allocation.lives, self._taps.requests.values()))}
        tensors = {
            "free": runs_of(free),
            "cached": allocation.cached(),
            "held": np.array([slot for slots in held.values() for slot in slots], np.int32),
        }
        tensors |= self._of_sessions()
        if allocation.has_windows:
            numbers |= allocation.window_counts()
            tensors["window_free"] = runs_of(allocation.window_free())
            tensors |= {f"window_{kind}": allocation.window_pages(tensors[kind]) for kind in ("cached", "held")}
        if (states := self._taps.states) is not None:
            owned = [slot for request in self._taps.requests.values() for slot in states.held_slots(request)]
            numbers |= {"state_total": states.total, "state_given_up": states.given_up}
            tensors |= {"state_free": runs_of(states.free()), "state_held": np.array(owned, np.int64)}
            tensors |= {"state_cached": (cached := states.cached())} | states.anew(cached)
        if (tier := self._taps.host_tier) is not None:
            more, slots = tier.slots()
            numbers |= more
            tensors |= slots
        self._recorder.add(
            "",
            0,
            stage,
            step=iteration,
            when=When(iteration),
            numbers=numbers,
            tensors=tensors,
        )

    def record_finished(self, names: list[str], iteration: int, fates: Fates) -> None:
        """The ends of requests since the last iteration, with all that was sent for them."""
        requests = self._taps.requests
        for name in fates.finish(names, lambda name: name in requests and bool(requests[name].finished())):
            answer = fates.answers.get(name, Messages())
            numbers = {"aborted": int(name in fates.aborted), "dropped": int(name in fates.dropped)} | answer.numbers
            self._recorder.add(name, 0, "finished", when=When(iteration), numbers=numbers, tensors=answer.tensors)

    def _of_sessions(self) -> dict[str, Array]:
        """Slots that sessions hold while no request of theirs runs, and whose each is, by the session's number."""
        if not self._case.sessions:
            return {}
        kept = self._taps.allocation.kept_by_sessions(self._taps.requests.values())
        slots = [slot for name in self._case.sessions for slot in kept.get(name, ())]
        whose = [number for number, name in enumerate(self._case.sessions) for _ in kept.get(name, ())]
        return {"sessions": np.array(slots, np.int64), "whose": np.array(whose, np.int64)}

    def cached(self, iteration: int, of_sessions: Mapping[str, tuple[int, ...]]) -> None:
        """The rows that the prefix cache keeps of finished requests: as long a prefix of each as a new request would get.

        of_sessions: all that requests of sessions were asked, whose lists SGLang lengthens for the next ones, in place"""
        for name, request in self._taps.requests.items():
            tokens = [*of_sessions.get(name, request.origin_input_ids), *request.output_ids]
            slots = self._taps.allocation.cached_prefix(tokens, request.extra_key)
            tensors = {"tokens": np.array(tokens, np.int64), "slots": slots}
            if self._taps.allocation.has_windows:
                tensors["window_slots"] = self._taps.allocation.window_slots(slots)
            for part, pool in self._taps.pools.items():
                tensors[f"{part}_kv"] = pool.rows(slots)
            if self._taps.states is not None:
                tensors |= self._taps.states.of_prefixes(tokens)
            self._recorder.add(name, 0, "cached", when=When(iteration), tensors=tensors)

    def poison_all(self) -> None:
        for pool in self._taps.pools.values() if self._taps.poisons else ():
            pool.poison_all()
        if self._taps.poisons and self._taps.states is not None:
            self._taps.states.poison_all()
        if self._taps.host_tier is not None:
            self._taps.host_tier.poison_all()

    @property
    def copying(self) -> bool:
        """Whether the prefix cache still copies rows to the host or back: it is not to be flushed then."""
        return self._taps.host_tier is not None and self._taps.host_tier.copying > 0

    def poison_freed(self, free: Array) -> None:
        """Until now free slots hold plausible rows of whichever request had them."""
        if not self._taps.records:
            return
        allocation = self._taps.allocation
        used = allocation.used(free)
        freed = allocation.freed_slots(free, used)
        for pool in self._taps.pools.values():
            pool.poison(freed, used)
        if self._taps.states is not None:
            self._taps.states.poison(self._taps.states.free())
        if self._taps.host_tier is not None:
            self._taps.host_tier.poison_free()


class _Done(BaseException):
    """Leaves the event loop; not an Exception, so that no handler of the loop takes it for a failure."""


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
           returns. With DP attention each rank has its own requests, and rank 0 alone hands control messages on
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
        self._groups = 1 if info is None else info.dp
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
        with blame.own_code(), contextlib.ExitStack() as until_it_ends:
            self._stand_in(until_it_ends)
            self._run(fresh)

    def _stand_in(self, until: contextlib.ExitStack) -> None:
        """Have the scheduler receive from here and send to here. When `until` is closed, its classes and it are as before: the
        next case may need less."""

        def put(owner: Any, name: str, value: Any) -> None:
            until.enter_context(patch.object(owner, name, value))

        # these sockets have no listener; both senders are of one class
        sender = getattr(self._scheduler, "ipc_channels", self._scheduler).send_to_detokenizer
        put(type(sender), "send_output", lambda _self, payload, *args, **kwargs: blame.own_code()(self._fates.sent)(payload))
        # the receiver is a slotted dataclass from 0.5.20 on: its class is what can be changed
        receiver = type(getattr(self._scheduler, "request_receiver", self._scheduler))
        if self._stages > 1:
            put(receiver, workers.RECEIVE_OF_RANKS, self._receives_in_stages(receiver))
        elif self._groups > 1:
            put(receiver, workers.RECEIVE_OF_RANKS, lambda _self: blame.own_code()(self._receive)())
        elif self._ranks == 1:
            put(receiver, "recv_requests", lambda _self, *args, **kwargs: blame.own_code()(self._receive)())
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
                blame.own_code(inside=False)(workers.event_loop(self._scheduler))()
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
        self._accounts.record_finished([request.id for request in self._own.requests], self._iteration, self._fates)
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
            kept_sessions.end_waiting_sessions(self._scheduler)
        return self._messages()

    @property
    def _own(self) -> Case:
        """What this rank has of the case."""
        return share_of_rank(self.case, self._rank)

    def _all_ended(self) -> bool:
        """Whether every request of the case came and has ended."""
        return self._fates.handed_in.issuperset(one.id for one in self._own.requests) and not self._fates.unfinished()

    def _wait_for_gpu(self) -> None:
        if self._on_gpu:
            torch.cuda.synchronize()

    def _end_if_over(self) -> None:
        """Raise _Done when the scheduler has nothing left to do and has had time to check itself, or EndlessCase."""
        if self._iteration > self._alone + self._limit():
            unfinished = ", ".join(self._fates.unfinished())
            raise EndlessCase(f"{self._iteration} iterations, and these are not finished: {unfinished}")
        if self._paused:
            return
        over = self._all_ended() and not self._accounts.copying and not self._sessions.any_open
        if not (over if self._groups == 1 else dp_attention.all_agree(self._scheduler, over)):
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
            for one in self._own.requests
            if one.arrive <= self._iteration and one.id not in handed_in and self._may_come(one)
        ]
        self._fates.arrive(request.id for request in arrived)
        vocabulary = RECIPES[self.case.model].target.vocab_size
        sent = [message for event in self._in_step.due(self.case, self._iteration) for message in self._control(event)]
        for request in arrived:
            sent += [*self._sessions.enter(request, self._iteration), requests.tokenized_request(request, vocabulary)]
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
        return [] if self._groups > 1 and self._rank else sent

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
