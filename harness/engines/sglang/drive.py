"""Step the real scheduler through a case: hand requests and events in, let its own event loop run, drain, flush.

The release's own loop runs; only its receive call is replaced, which it makes once per iteration. That is the stepping
hook: arrivals, events, poison of freed slots, accounting and the end of the case all happen there. Events are the control
messages that SGLang itself takes from its tokenizer process.
"""

import contextlib
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from eagletwin.harness.case import Case, Event, Request
from eagletwin.harness.slot_runs import Array, runs_of
from eagletwin.harness.trace import Recorder

from .boot import RECEIVE_OF_RANKS
from .eras import workers
from .eras.names import pick
from .taps import Taps
from .taps_v1 import TapsV1


class _Done(BaseException):
    """Leaves the event loop; not an Exception, so that no handler of the loop takes it for a failure."""


class EndlessCase(Exception):
    """The scheduler went on for more iterations than the case can need: it makes no progress."""


class Stopped(Exception):
    """The iteration was reached after which the case was to stop."""


class Drive:
    """One case on one scheduler. `receive` stands in for the scheduler's receive call.

    until  raise Stopped after this iteration; -1: never
    live   asked before each iteration for the case as it is now, and whether there will be more; None: `case` is all
    rank, ranks  this one, of so many. Each steps through the same case; SGLang's own broadcast hands what rank 0 returns to the
           others
    """

    def __init__(
        self,
        scheduler: Any,
        case: Case,
        recorder: Recorder,
        reached: Callable[[str], None],
        until: int = -1,
        live: Callable[[int, Case], tuple[Case, bool]] | None = None,
        rank: int = 0,
        ranks: int = 1,
    ) -> None:
        self.case = case
        self._scheduler = scheduler
        self._recorder = recorder
        self._reached = reached
        self._until = until
        self._live = live
        self._rank, self._ranks = rank, ranks
        self._taps = (TapsV1 if workers.is_v1(scheduler) else Taps)(scheduler, recorder, reached)
        self._allocation = self._taps.allocation
        self._pools = self._taps.pools
        self._on_gpu = str(scheduler.device).startswith("cuda")
        self._handed_in: set[str] = set()
        self._finished: set[str] = set()  # requests whose end was recorded
        self._emitted: dict[str, list[int]] = {}  # what was sent towards the detokenizer
        self._aborted: set[str] = set()
        self._dropped: set[str] = set()  # aborted while they were queued, so no batch will end them
        self._paused = False
        self._iteration = -1
        self._alone = 0  # since this iteration nobody adds to the case
        self._idle = 0
        # with overlap the first idle iteration still processes what the last batch came to
        self._drained = 3 if scheduler.enable_overlap else 2

    def run(self, fresh: bool = False) -> None:
        """Run the case to its end. Raises what the worker raises, EndlessCase or Stopped.

        fresh: as if nothing had run on this scheduler. Whatever ran has drained and flushed it."""
        if fresh:
            self._allocation.forget()
        for pool in self._pools.values():
            pool.poison_all()
        # nobody listens at the other end of these sockets; both senders are of one class
        sender = getattr(self._scheduler, "ipc_channels", self._scheduler).send_to_detokenizer
        type(sender).send_output = lambda _self, payload, *args, **kwargs: self._sent(payload)
        receiver = getattr(self._scheduler, "request_receiver", self._scheduler)
        # the receiver is a slotted dataclass from 0.5.20 on: its class is what can be changed
        if self._ranks == 1:
            type(receiver).recv_requests = lambda _self, *args, **kwargs: self._receive()
        else:
            setattr(type(receiver), RECEIVE_OF_RANKS, lambda _self: self._receive_of_rank())
        if self.case.samples:  # whatever was drawn before: the same coins for the same case
            torch.manual_seed(self.case.engine.sglang.random_seed)
            self._taps.watch_coins()
        chunk = self._scheduler.chunked_prefill_size
        with self._taps, contextlib.suppress(_Done):
            _event_loop(self._scheduler)()
        self._scheduler.chunked_prefill_size = chunk

    def _sent(self, payload: Any) -> None:
        """Collect a batch of output: each message holds the tokens since the last one, and the reason if it is the last."""
        for n, name in enumerate(getattr(payload, "rids", None) or ()):
            ids = getattr(payload, "output_ids", None)
            self._emitted.setdefault(name, []).extend(ids[n] if ids is not None else ())
            reason = payload.finished_reasons[n]
            if reason is not None and reason.get("type") == "abort":
                self._aborted.add(name)
        if type(payload).__name__ == "AbortReq":  # it was queued, or between two chunks
            self._aborted.add(payload.rid)
            self._dropped.add(payload.rid)

    def _receive_of_rank(self) -> list[Any] | None:
        messages = self._receive()
        return messages if self._rank == 0 else None

    def _receive(self) -> list[Any]:
        if 0 <= self._until <= self._iteration:
            raise Stopped(f"after iteration {self._iteration}, as asked")
        self._iteration += 1
        self._taps.iteration = self._iteration
        self._reached("schedule")
        if self._on_gpu:  # with overlap, what was launched last may still run, in another stream
            torch.cuda.synchronize()
        free = self._allocation.free()
        self._account("iteration", free)
        self._record_finished()
        if self._live is not None:
            self.case, more = self._live(self._iteration, self.case)
            if not more:
                self._live, self._alone = None, self._iteration
        if self._live is None and self._iteration > self._alone + self._limit():
            names = ", ".join(self._unfinished())
            raise EndlessCase(f"{self._iteration} iterations, and these are not finished: {names}")
        if self._live is None and not self._paused and self._handed_in >= self._ids() and not self._unfinished():
            self._idle += 1
            if self._idle == self._drained:  # the scheduler has had one idle iteration, and so has checked itself
                self._record_cached()
                self._scheduler.flush_cache()
                self._account("flushed", self._allocation.free())
                raise _Done
        if self._iteration:  # until now free slots hold plausible rows of whoever had them
            used = self._allocation.used(free)
            freed = self._allocation.freed(free, used)
            for pool in self._pools.values():
                pool.poison(freed, used)
        self._set_chunk()
        arrived = [
            request for request in self.case.requests if request.arrive <= self._iteration and request.id not in self._handed_in
        ]
        self._handed_in.update(request.id for request in arrived)
        messages = [_tokenized(request) for request in arrived]
        for event in self.case.events:
            if event.at == self._iteration:
                messages += self._control(event)
        if self._paused and self._live is None and self._iteration > self.case.last_arrival:
            messages += self._control(Event(at=self._iteration, kind="resume"))
        return messages

    def _limit(self) -> int:
        """Iterations that the case can need: every request prefills at least a page an iteration and decodes at least a token,
        once more for each retraction; twice that, and room to start."""
        work = sum(len(request.prompt) // self.case.page_size + request.max_new_tokens for request in self.case.requests)
        retractions = sum(event.kind == "retract" for event in self.case.events)
        return 2 * work * (1 + retractions) + self.case.last_arrival + 20

    def _set_chunk(self) -> None:
        """The budget of the next prefill batch. The scheduler reads it anew for each batch."""
        chunks = self.case.chunks
        chunk = chunks[self._taps.prefills] if self._taps.prefills < len(chunks) else self.case.chunked_prefill_size
        self._scheduler.chunked_prefill_size = chunk

    def _control(self, event: Event) -> list[Any]:
        """The event as the messages that SGLang takes from its tokenizer process."""
        from sglang.srt.managers import io_struct

        if event.kind == "abort":
            # one that is still to come was never there; SGLang forgets an abort of a request it does not know
            return [io_struct.AbortReq(rid=event.request)]
        if event.kind == "flush":
            return [io_struct.FlushCacheReqInput()]
        if event.kind == "retract":
            pause = io_struct.PauseGenerationReqInput(mode="retract")
            return [pause] if self._paused else [pause, io_struct.ContinueGenerationReqInput()]
        self._paused = event.kind == "pause"
        if self._paused:
            return [io_struct.PauseGenerationReqInput(mode="in_place")]
        return [io_struct.ContinueGenerationReqInput()]

    def _ids(self) -> set[str]:
        return {request.id for request in self.case.requests}

    def _unfinished(self) -> list[str]:
        return sorted(self._handed_in - self._finished)

    def _record_finished(self) -> None:
        """The ends of requests since the last iteration, with all that was emitted for them."""
        ended = {name for name, request in self._taps.requests.items() if request.finished()} | self._dropped
        for request in self.case.requests:
            name = request.id
            if name in ended and name not in self._finished:
                self._finished.add(name)
                tokens = np.array(self._emitted.get(name, []), np.int64)
                numbers = {"aborted": int(name in self._aborted)}
                self._recorder.add(name, 0, "finished", iteration=self._iteration, numbers=numbers, tensors={"tokens": tokens})

    def _account(self, stage: str, free: Array) -> None:
        held = {name: self._allocation.held(request) for name, request in self._taps.requests.items()}
        self._recorder.add(
            "",
            0,
            stage,
            step=self._iteration,
            iteration=self._iteration,
            numbers=self._allocation.counts() | {"live": sum(len(slots) > 0 for slots in held.values())},
            tensors={
                "free": runs_of(free),
                "cached": self._allocation.cached(),
                "held": np.array([slot for slots in held.values() for slot in slots], np.int32),
            },
        )

    def _record_cached(self) -> None:
        """The rows that the prefix cache keeps of finished requests: as long a prefix of each as a new request would get."""
        if not self.case.engine.sglang.radix_cache:
            return
        for name, request in self._taps.requests.items():
            tokens = [*request.origin_input_ids, *request.output_ids]
            slots = self._allocation.cached_prefix(tokens)
            tensors = {"tokens": np.array(tokens, np.int64), "slots": slots}
            for part, pool in self._pools.items():
                tensors[f"{part}_kv"] = pool.rows(slots)
            self._recorder.add(name, 0, "cached", iteration=self._iteration, tensors=tensors)


def _event_loop(scheduler: Any) -> Callable[[], None]:
    """The loop that this scheduler's own process would run; up to 0.5.9 that process chooses between two."""
    names = ["event_loop_overlap" if scheduler.enable_overlap else "event_loop_normal"]
    loop: Callable[[], None] = pick(scheduler, "run_event_loop", *names)
    return loop


def _takes_arrays(message: Any) -> bool:
    """Token ids are arrays from 0.5.13 on, and lists before."""
    return "array" in str(message.__annotations__["input_ids"])


def _tokenized(request: Request) -> Any:
    """The request as the tokenizer process would send it (dataclass up to 0.5.14, msgspec struct after)."""
    import dataclasses

    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    asked = request.sampling
    how: dict[str, Any] = {"temperature": 0.0}
    if asked is not None:
        how = {"temperature": asked.temperature, "top_k": asked.top_k or -1, "top_p": asked.top_p, "sampling_seed": asked.seed}
    sampling = SamplingParams(
        **how,
        max_new_tokens=request.max_new_tokens,
        stop_token_ids=list(request.stop) or None,
        ignore_eos=not request.stop,
    )
    sampling.normalize(None)
    values = {
        "rid": request.id,
        "input_text": "",
        "input_ids": array("q", request.prompt) if _takes_arrays(TokenizedGenerateReqInput) else list(request.prompt),
        "mm_inputs": None,
        "sampling_params": sampling,
        "return_logprob": False,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "token_ids_logprob": None,
        "stream": False,
        "input_embeds": None,
        "token_type_ids": None,
    }
    fields = getattr(TokenizedGenerateReqInput, "__struct_fields__", None)
    names = fields or [field.name for field in dataclasses.fields(TokenizedGenerateReqInput)]
    return TokenizedGenerateReqInput(**{name: value for name, value in values.items() if name in names})
