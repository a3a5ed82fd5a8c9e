"""Step the real scheduler through a case: hand requests in, let its own event loop run, drain, flush.

The release's own loop runs; only its receive call is replaced, which it makes once per iteration. That is the stepping
hook: arrivals, poison of freed slots, accounting and the end of the case all happen there.
"""

import contextlib
from array import array
from collections.abc import Callable
from typing import Any

import torch

from eagletwin.harness.case import Case, Request
from eagletwin.harness.trace import Recorder

from .taps import Taps


class _Done(BaseException):
    """Leaves the event loop; not an Exception, so that no handler of the loop takes it for a failure."""


class EndlessCase(Exception):
    """The scheduler went on for more iterations than the case can need: it makes no progress."""


def drive(scheduler: Any, case: Case, recorder: Recorder, reached: Callable[[str], None]) -> None:
    """Run the case to its end. Raises what the worker raises, or EndlessCase."""
    taps = Taps(scheduler, recorder, reached)
    taps.install()
    Drive(scheduler, case, recorder, taps, reached).run()


class Drive:
    """One case on one scheduler. `receive` stands in for the scheduler's receive call."""

    def __init__(self, scheduler: Any, case: Case, recorder: Recorder, taps: Taps, reached: Callable[[str], None]) -> None:
        self._scheduler = scheduler
        self._case = case
        self._recorder = recorder
        self._taps = taps
        self._reached = reached
        self._allocation = taps.allocation
        self._pools = taps.pools
        self._waiting = sorted(case.requests, key=lambda request: request.arrive)
        self._reported: set[str] = set()
        self._emitted: dict[str, list[int]] = {}  # what was sent towards the detokenizer
        self._aborted: set[str] = set()
        self._iteration = -1
        self._idle = 0
        # Every request prefills at least a page an iteration and decodes at least a token; twice that, and room to start
        work = sum(len(request.prompt) // case.page_size + request.max_new_tokens for request in case.requests)
        self._limit = 2 * work + max(request.arrive for request in case.requests) + 20

    def run(self) -> None:
        for pool in self._pools.values():
            pool.poison(slice(None))
        # nobody listens at the other end of this socket
        sender = self._scheduler.ipc_channels.send_to_detokenizer
        type(sender).send_output = lambda _self, payload, *args, **kwargs: self._sent(payload)
        receiver = getattr(self._scheduler, "request_receiver", self._scheduler)
        # the receiver is a slotted dataclass from 0.5.20 on: its class is what can be changed
        type(receiver).recv_requests = lambda _self, *args, **kwargs: self._receive()
        loop = getattr(self._scheduler, "run_event_loop", None) or self._scheduler.event_loop_normal
        with contextlib.suppress(_Done):
            loop()

    def _sent(self, payload: Any) -> None:
        """Collect a batch of output: each message holds the tokens since the last one, and the reason if it is the last."""
        for n, name in enumerate(getattr(payload, "rids", None) or ()):
            ids = getattr(payload, "output_ids", None)
            self._emitted.setdefault(name, []).extend(ids[n] if ids is not None else ())
            reason = payload.finished_reasons[n]
            if reason is not None and reason.get("type") == "abort":
                self._aborted.add(name)

    def _receive(self) -> list[Any]:
        self._iteration += 1
        self._taps.iteration = self._iteration
        self._reached("schedule")
        self._poison_freed()
        self._account("iteration")
        self._report_finished()
        if self._iteration > self._limit:
            raise EndlessCase(f"{self._iteration} iterations, and these are not finished: {', '.join(self._unfinished())}")
        if not self._waiting and not self._unfinished():
            self._idle += 1
            if self._idle == 2:  # the scheduler has had one idle iteration, and so has checked itself
                self._report_cached()
                self._scheduler.flush_cache()
                self._account("flushed")
                raise _Done
        arrived = [request for request in self._waiting if request.arrive <= self._iteration]
        self._waiting = self._waiting[len(arrived) :]
        return [_tokenized(request) for request in arrived]

    def _unfinished(self) -> list[str]:
        handed_in = {request.id for request in self._case.requests} - {request.id for request in self._waiting}
        return sorted(handed_in - self._reported)

    def _report_finished(self) -> None:
        for name, request in self._taps.requests.items():
            if name not in self._reported and request.finished():
                self._reported.add(name)
                tokens = torch.tensor(self._emitted.get(name, []), dtype=torch.int64)
                numbers = {"aborted": int(name in self._aborted)}
                self._recorder.add(name, 0, "finished", iteration=self._iteration, numbers=numbers, tensors={"tokens": tokens})

    def _poison_freed(self) -> None:
        """Free slots hold plausible rows of whoever had them, until now."""
        free = self._allocation.free()
        for pool in self._pools.values():
            pool.poison(free)

    def _account(self, stage: str) -> None:
        held = {name: self._allocation.held(request) for name, request in self._taps.requests.items()}
        self._recorder.add(
            "",
            0,
            stage,
            step=self._iteration,
            iteration=self._iteration,
            numbers=self._allocation.counts() | {"live": sum(len(slots) > 0 for slots in held.values())},
            tensors={
                "free": self._allocation.free().sort().values.to(torch.int32),
                "cached": self._allocation.cached().to(torch.int32),
                "held": torch.cat([*held.values(), torch.empty(0, dtype=torch.int64)]).to(torch.int32),
            },
        )

    def _report_cached(self) -> None:
        """The rows that the prefix cache keeps of finished requests: as long a prefix of each as a new request would get."""
        if not self._case.engine.sglang.radix_cache:
            return
        for name, request in self._taps.requests.items():
            tokens = [*request.origin_input_ids, *request.output_ids]
            slots = self._allocation.cached_prefix(tokens)
            tensors = {"tokens": torch.tensor(tokens), "slots": slots}
            for part, pool in self._pools.items():
                tensors[f"{part}_keys"], tensors[f"{part}_values"] = pool.rows(slots)
            self._recorder.add(name, 0, "cached", iteration=self._iteration, tensors=tensors)


def _tokenized(request: Request) -> Any:
    """The request as the tokenizer process would send it (dataclass up to 0.5.14, msgspec struct after)."""
    import dataclasses

    from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
    from sglang.srt.sampling.sampling_params import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_new_tokens=request.max_new_tokens, ignore_eos=True)
    sampling.normalize(None)
    values = {
        "rid": request.id,
        "input_text": "",
        "input_ids": array("q", request.prompt),
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
