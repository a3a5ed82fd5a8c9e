"""Taps of engines that record less: without recording, without speculative decoding, and of a pipeline's stages."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np
from torch import Tensor

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.case import GrammarBackend
from eagletwin.harness.core.trace import Recorder, When
from eagletwin.harness.engines.inside.blame import Around, Wraps

from .inner import Inner
from .passes import DraftPass
from .pools import Allocation, Pool
from .taps import Taps
from .writer import Writer

# Taps that follow a run and record nothing of it: what recording costs is the difference (`speed` of tests/lab), and with
# nothing that waits for a GPU its streams may race (drive.py).


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

    _around_verify = _around_idle = _around_draft


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

    def __init__(self, scheduler: Any, recorder: Recorder, reached: Callable[[str], None]) -> None:
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


# Taps of a pipeline's stages (boot/single_rank.py): the last, which drafts and verifies, and those before it.
#
# In the last stage a round begins with verify, whose tree came with the batch, and ends with the draft of the next one:
#
#         forward_batch_generation
#         └ round
#           ├ verify()       record `draft`, of the tree that came: what it was drafted from was kept since then; and `verify`
#           ├ draft extend   record `extend`, when draft() begins
#           └ draft()        kept, with the forwards of it, until the request is verified; given up where it never is

# A record: stage, step, numbers, tensors, layer.
_Record = tuple[str, int, dict[str, int], dict[str, Array], int]


class KeepingWriter(Writer):
    """Keeps the records of drafts until their requests are verified: of one that has ended, or is prefilled again, never."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__(recorder)
        self._kept: dict[str, list[_Record]] = {}
        self._keeps = False

    def add(
        self, request: Any, stage: str, step: int, numbers: dict[str, int], tensors: dict[str, Array], layer: int = 0
    ) -> None:
        if self._keeps:
            self._kept.setdefault(request.rid, []).append((stage, step, numbers, tensors, layer))
        else:
            super().add(request, stage, step, numbers, tensors, layer)

    @contextmanager
    def keeping(self, requests: list[Any]) -> Iterator[None]:
        self.give_up(requests)
        self._keeps = True
        try:
            yield
        finally:
            self._keeps = False

    def give_up(self, requests: list[Any]) -> None:
        for request in requests:
            self._kept.pop(request.rid, None)

    def add_kept(self, request: Any, tree: dict[str, Array]) -> bool:
        """Add what was kept of the request, with the tree that it is verified with; False: it was never drafted for."""
        kept = self._kept.pop(request.rid, None)
        for stage, step, numbers, tensors, layer in kept or ():
            shown = tensors | tree if stage == "draft" else tensors
            self.add(request, stage, step, numbers, shown, layer)
        return kept is not None


class LastStage(Taps):
    """Drafts when a round is over, and verifies what the batch brings."""

    writer: KeepingWriter
    writes = KeepingWriter

    def _after_prefill(
        self, next_tokens: Tensor, draft_input: Any, starts: list[int], lengths: list[int], running: set[str]
    ) -> None:
        self.writer.give_up(self._now.requests)
        super()._after_prefill(next_tokens, draft_input, starts, lengths, running)

    def _around_verify(self, call: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        lengths = batch.seq_lens.tolist()
        for n, (request, tree) in enumerate(zip(self._now.requests, self._trees(batch.spec_info, lengths), strict=True)):
            if not self.writer.add_kept(request, tree):
                tensors = tree | {"table": self._table_in_draft(request, lengths[n])}
                self.writer.add(request, "draft", 0, {"seq_len": lengths[n], "in_graph": 0, "undrafted": 1}, tensors)
        self._now.draft = DraftPass()
        return super()._around_verify(call, batch, *args, **kwargs)

    def _around_draft(self, call: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._record_extend(self._now.extending(), batch.seq_lens.tolist(), batch.spec_info)
        self.writer.round_ends(self._now.requests)
        self._now.draft = draft = DraftPass()
        with self.writer.keeping(self._now.requests):
            result = call(batch, *args, **kwargs)
            self._record_draft(draft, result[0], batch)  # and its topology
        return result

    def _round_is_over(self, result: Any, batch: Any) -> None:
        """It was when the next draft began."""


class EarlierStage(PlainTaps):
    """Runs its layers and hands on what they give. Its free rows are poisoned as those of the last stage are."""

    allocates = Allocation
    records = True
    poisons = True

    def __init__(self, scheduler: Any, recorder: Recorder, reached: Callable[[str], None]) -> None:
        super().__init__(scheduler, recorder, reached)
        self.pools = {"target": Pool(scheduler.tp_worker.model_runner.token_to_kv_pool)}

    def __enter__(self) -> Taps:
        self._wraps.method(self._scheduler, "run_batch", self._around_batch)
        return self

    def watch_coins(self) -> None:
        """The last stage draws them."""

    def _around_batch(self, call: Around, batch: Any, *args: Any, **kwargs: Any) -> Any:
        for request in batch.reqs:
            self.allocation.note_slots(self.allocation.allocated_slots(request))
        return super()._around_batch(call, batch, *args, **kwargs)
