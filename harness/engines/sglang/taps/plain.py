"""Taps that record little or nothing: a run without recording, and an engine without speculative decoding."""

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import numpy as np
from torch import Tensor

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.case import GrammarBackend
from eagletwin.harness.core.trace import When

from .inner import Inner
from .pools import Allocation
from .taps import Taps
from .wraps import Around, Wraps
from .writer import Takes, Writer

# Taps that follow a run and record nothing of it: what recording costs is the difference (`speed` of tests/lab), and with
# nothing that waits for a GPU its streams may race (jitter.py).


class _Blind(Allocation):
    """Looks at no slot."""

    def free(self) -> Array:
        return np.empty(0, np.int64)

    def used(self, free: Array) -> Array:
        return free


class _NoInner(Inner):
    def wrap(self, wraps: Wraps) -> None:
        pass


class Unrecorded(Taps):
    """Knows the requests and the prefills, as a run needs them."""

    allocates: type[Allocation] = _Blind
    inner = _NoInner
    records = False
    poisons = False

    def _record_owners(self) -> None:
        pass

    def _after_prefill(
        self, next_tokens: Tensor, draft_input: Any, starts: list[int], lengths: list[int], running: set[str]
    ) -> None:
        pass

    def _after_extend(self, result: Any, batch: Any) -> None:
        pass

    def _around_draft(self, call: Around, batch: Any, *args: Any, **kwargs: Any) -> Any:
        return call(batch, *args, **kwargs)

    _around_verify = _around_draft


class Unwaited(Unrecorded):
    """Taps that wait for the GPU nowhere: a race between its streams is left to run. What draws coins and what applies grammars
    is not watched, and free slots are not poisoned while a case runs."""

    poisons = True

    def watch_coins(self) -> None:
        pass

    def watch_masks(self, vocabulary: int, backend: GrammarBackend) -> None:
        pass


# What an engine without speculative decoding would send, asked token by token: each request is sent what another engine sent
# it, and at each place it is noted what this one chose there.


class PlainTaps(Unrecorded):
    """Stands where the target samples. `sends`: by request, all that it is sent.

    The worker goes on from what was sent, with all that it keeps of it (penalties, grammars), so that one token that it would
    have chosen otherwise does not make all that follow incomparable. It leaves a record `plain` of each request."""

    def __init__(self, scheduler: Any, recorder: Takes, reached: Callable[[str], None]) -> None:
        self.writer = Writer(recorder)
        self.requests: dict[str, Any] = {}
        self.prefills = 0
        self.pools, self.states, self.host_tier = {}, None, None
        self.allocation: Allocation = self.allocates(scheduler)
        self._recorder, self._reached = recorder, reached
        self._scheduler = scheduler
        self.sends: Mapping[str, tuple[int, ...]] = {}
        self._wraps = Wraps()
        self._batch: list[Any] = []
        self._chosen: dict[str, list[int]] = {}

    def __enter__(self) -> "Taps":
        self._wraps.method(self._scheduler, "run_batch", self._around_batch)
        self._wraps.method(self._scheduler.tp_worker.model_runner, "sample", self._around_sample)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._wraps.undo()
        for name, tokens in self._chosen.items():
            tensors = {"tokens": np.array(tokens, np.int64)}
            self._recorder.add(name, 0, "plain", when=When(self.writer.iteration), tensors=tensors)

    def watch_masks(self, vocabulary: int, backend: GrammarBackend) -> None:
        pass

    def _around_batch(self, call: Around, batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._batch = list(batch.reqs)
        for request in self._batch:
            self.requests.setdefault(request.rid, request)
        prefill = batch.forward_mode.is_extend()
        self._reached("plain prefill" if prefill else "plain decode")
        result = call(batch, *args, **kwargs)
        self.prefills += prefill
        return result

    def _around_sample(self, call: Around, *args: Any, **kwargs: Any) -> Tensor:
        """A chunk in between chooses a token as well, which is thrown away: the last chunk's takes its place."""
        tokens: Tensor = call(*args, **kwargs)
        for row, (request, token) in enumerate(zip(self._batch, tokens.tolist(), strict=True)):
            at, sent = len(request.output_ids), self.sends.get(request.rid, ())
            self._chosen[request.rid] = [*self._chosen.get(request.rid, ())[:at], token]
            if at < len(sent):
                tokens[row] = sent[at]
        return tokens
