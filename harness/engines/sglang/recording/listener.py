"""Taps in the scheduler of a server: they record the requests that are chosen, and let all other batches pass."""

import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.errors import not_seen
from eagletwin.harness.core.recording import RECORDING, RecordedServer, RecordingHeader, Skipped
from eagletwin.harness.core.records import Ending
from eagletwin.harness.core.trace import SCHEMA, When, snapshot
from eagletwin.harness.engines.inside.blame import Wraps
from eagletwin.harness.engines.protocol import RecordOptions, read_record_options

from ..compat import memory, workers
from ..compat.workers import rank_of
from ..taps.inner import Inner
from ..taps.pools import Pool
from ..taps.speculation import speculation
from ..taps.taps import Taps
from . import server_facts
from .guard import Choice, GuardedWraps, Guards
from .underway import CommittedRows, Keeper, Recording, UnderWay, permutation

# Failures of taps after which nothing more is recorded: they will not stop.
_MOST_FAILURES = 5
_POOL_SECONDS = 1.0  # between two looks at the pool
_ABSENT = 32  # batches in a row without a request, after which it is looked for
# A scheduler's batches; a release has some of them.
_BATCHES = ("running_batch", "last_batch", "cur_batch", "cur_batch_for_debug")
_CACHES = ("UnifiedRadixCache", "RadixCache", "ChunkCache")  # whose counts of slots the judge knows what to make of


def listen(scheduler: Any) -> None:
    """Record what this scheduler was asked to record; nothing if it does not draft. Called when it is built."""
    wanted = read_record_options()
    if wanted is None or getattr(scheduler, "draft_worker", None) is None:
        return
    if workers.is_v1(scheduler):
        raise not_seen(f"{type(scheduler.draft_worker).__name__} is not recorded: only the V2 worker is (0.5.13 and later)")
    of = speculation(scheduler)
    if of.adaptive:
        raise not_seen("a server with adaptive steps is not recorded yet: its rounds have any number of steps")
    if not of.memory:
        raise not_seen("a draft that reads the target's rows is not recorded yet")
    Listener(scheduler, *wanted).__enter__()
    folder, options = wanted
    print(f"eagletwin: every {options.every}. request is recorded into {folder}", file=sys.stderr, flush=True)


class _Inner(Inner):
    """Forwards without their states, and graphs without what they hold."""

    def _around_replay(self, call: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = call(batch, *args, **kwargs)
        self._now.drafting().note_replay(result, [])
        return result


class Listener(Taps):
    """Taps that record integers alone, of batches with a chosen request; of those, the chosen requests' part."""

    inner = _Inner
    numbers = False

    def __init__(self, scheduler: Any, folder: Path, options: RecordOptions) -> None:
        self._scheduler = scheduler
        self._options = options
        self._guards = Guards(self._handle_failure, lambda: bool(self._now.requests))
        self._underway = UnderWay()
        self._failures, self._last_failure, self._off = 0, "", False
        super().__init__(scheduler, self._underway, lambda _: None)
        if options.rows and self._has_rows():
            pool = Pool(self._of.drafts[0].token_to_kv_pool)
            self._rows = CommittedRows(self.allocation, pool, self._underway, options.rows)
        self._choice = Choice(options, self._too_much)
        rank = rank_of(scheduler)
        self._engine = server_facts.engine_of(scheduler, self._of, rank)
        self._model = server_facts.model_of(scheduler, self._of)
        self._arguments = server_facts.arguments_of(scheduler)
        self._hot: Array | None = None
        hot = getattr(self._of.drafter, "hot_token_id", None)
        if hot is not None:
            self._hot = snapshot(hot)
        self._batches = self._numbers = 0
        self._looked_at_pool = 0.0
        self._launch, self._dp = server_facts.launch(), rank.dp
        name = f"{self._launch}-dp{rank.dp}-tp{rank.tp}-{os.getpid()}"
        self._keeper = Keeper(folder / name, options.megabytes, self._spent, self._state)

    def _has_rows(self) -> bool:
        """Whether the draft is one head that stores keys and values; what else there is has no rows in its recording."""
        pool = self._of.drafts[0].token_to_kv_pool
        found = not self._of.layers and self._of.states and hasattr(pool, "k_buffer")
        if not found:
            why = "this draft is no EAGLE or EAGLE-3 head that stores keys and values"
            print(f"eagletwin: --rows: {why}: no row is recorded", file=sys.stderr, flush=True)
        return found

    def _new_wraps(self) -> Wraps:
        return GuardedWraps(self._guards)

    def __enter__(self) -> "Listener":
        self._keeper.start()
        self._accepted.watching = False
        super().__enter__()
        self._wraps.method(self._scheduler, "process_batch_result", self._around_results)
        return self

    # -- which batches -----------------------------------------------------------------------------------------------------

    def _around_batch(self, call: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        requests = [] if self._off or batch.forward_mode.is_idle() else list(batch.reqs)
        if requests and batch.forward_mode.is_extend():
            self._choose(requests)
        chosen = self._underway.of(requests)
        self._accepted.watching = bool(chosen)
        if not chosen:
            self._now.batch_begins([])
            return call(batch, *args, **kwargs)
        self.writer.iteration = self._batches = self._batches + 1
        try:
            return super()._around_batch(call, batch, *args, **kwargs)
        finally:
            self.requests.clear()
            self.writer.forget_but(self._underway.by_rid)

    def _choose(self, requests: list[Any]) -> None:
        for request in requests:
            if self._choice.chooses(request):
                self._numbers += 1
                private = self._options.private
                order = permutation(self._options.key, request.rid, self._model.vocab_size) if private else None
                self._underway.by_rid[request.rid] = Recording(self._numbers, request, order)

    def _too_much(self) -> Skipped | None:
        if self._keeper.full:
            return "full"
        if len(self._underway.by_rid) >= self._options.at_once or self._keeper.busy:
            return "at_once"
        return "over_share" if self._guards.clock.share > self._options.share else None

    # -- what is recorded --------------------------------------------------------------------------------------------------

    def _record_owners(self) -> None:
        """Who of this batch owns which slot, for the recordings of it. What the prefix cache owns is not looked up."""
        requests = self._now.requests
        tables = [self.allocation.allocated_slots(request) for request in requests]
        slots = np.concatenate(tables).astype(np.int32)
        owners = np.repeat(np.arange(len(requests), dtype=np.int32), [len(table) for table in tables])
        tensors = {"slots": slots, "owners": owners, "cached": np.empty(0, np.int32)}
        for recording in self._underway.of(requests):
            names = {
                f"request.{recording.id if one is recording.request else f'other-{n}'}": n for n, one in enumerate(requests)
            }
            recording.add(0, "batch", names, tensors, own=False, step=self._batches, when=When(self._batches))

    def _proposals(self, draft_input: Any) -> list[dict[str, Array]]:
        """What is proposed, in the target's ids."""
        found = snapshot(draft_input.topk_index)
        if self._hot is not None:
            inside = (found >= 0) & (found < len(self._hot))
            found = np.where(inside, self._hot[np.where(inside, found, 0)], self._model.vocab_size + abs(found))
        return [{"proposal": row} for row in found]

    def _masks(self, result: Any, lengths: list[int]) -> list[Array]:
        if self._of.topk == 1 and result.custom_mask is None:  # a backend that needs none of a chain
            return []
        return super()._masks(result, lengths)

    # -- when a batch's results are known ----------------------------------------------------------------------------------

    def _around_results(self, call: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        result = call(batch, *args, **kwargs)
        if self._underway.by_rid:
            self._look_at_pool(batch)
            self._end(batch)
        return result

    def _look_at_pool(self, batch: Any) -> None:
        now = time.monotonic()
        if now - self._looked_at_pool < _POOL_SECONDS or type(self._scheduler.tree_cache).__name__ not in _CACHES:
            return
        self._looked_at_pool = now
        page, held = self._of.page, 0
        for request in self._live(batch):
            own = memory.request_memory(request)
            if own.row is not None:
                held += -(-own.allocated // page) * page - own.protected
        numbers = self.allocation.counts() | {"held": held}
        for recording in self._underway.by_rid.values():
            recording.add(0, "pool", numbers, {}, own=False, step=self._batches, when=When(self._batches))

    def _live(self, batch: Any) -> list[Any]:
        """Requests that may hold slots."""
        scheduler = self._scheduler
        batches = [batch, *(getattr(scheduler, name, None) for name in _BATCHES)]
        batches += [launched for launched, *_ in getattr(scheduler, "result_queue", None) or ()]
        found = [request for one in batches if one is not None for request in (getattr(one, "reqs", None) or ())]
        found += [*scheduler.waiting_queue, *_chunked_requests(scheduler)]
        return list({id(request): request for request in found}.values())

    def _end(self, batch: Any) -> None:
        """Hand over the recordings of requests that have ended, or that have left the scheduler, or grew too long."""
        for rid, recording in list(self._underway.by_rid.items()):
            request = recording.request
            if request.finished():
                self._hand_over(rid, recording, Ending(kind="finished"))
            elif recording.rounds >= self._options.rounds:
                self._hand_over(rid, recording, Ending(kind="stopped", detail=f"after {recording.rounds} rounds, as asked"))
            else:
                recording.absent = 0 if any(request is one for one in batch.reqs) else recording.absent + 1
                if recording.absent <= _ABSENT:
                    continue
                recording.absent = 0
                if not any(request is one for one in self._live(batch)):  # all queues are looked through, so rarely
                    self._hand_over(rid, recording, Ending(kind="stopped", detail="the request left the scheduler"))

    def _hand_over(self, rid: str, recording: Recording, ending: Ending) -> None:
        del self._underway.by_rid[rid]
        request = recording.request
        if ending.kind == "finished":
            aborted, otherwise = server_facts.ended_otherwise(request)
            tokens = np.array(request.output_ids_through_stop, np.int64)
            numbers = {"aborted": int(aborted), "otherwise": int(otherwise)}
            recording.add(0, "finished", numbers, {"tokens": tokens}, when=When(self._batches + 1))
        of = self._of
        header = RecordingHeader(
            schema=SCHEMA,
            recording=RECORDING,
            request=server_facts.request_of(recording, self._options),
            num_steps=of.steps,
            topk=of.topk,
            num_draft_tokens=of.width,
            page_size=of.page,
            chunked_prefill_size=int(self._scheduler.chunked_prefill_size or 0),
            radix_cache=not self._scheduler.server_args.disable_radix_cache,
            served=self._model,
            engine=self._engine,
            ending=ending,
            records=tuple(recording.recorder.records),
            private=self._options.private,
        )
        if not self._keeper.keep(header, recording.recorder.tensors):
            self._choice.skipped["at_once"] = self._choice.skipped.get("at_once", 0) + 1

    # -- what it costs, and when it fails ----------------------------------------------------------------------------------

    def _spent(self, seconds: float) -> None:
        self._guards.clock.taken += seconds

    def _handle_failure(self, error: Exception) -> None:
        """A tap failed: what is under way has a gap, and is given up."""
        self._failures += 1
        frame = traceback.extract_tb(error.__traceback__)[-1]
        self._last_failure = f"{type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})"
        if self._failures == 1:
            traceback.print_exception(error)
        for rid in list(self._underway.by_rid):
            del self._underway.by_rid[rid]
            self._choice.skipped["failed"] = self._choice.skipped.get("failed", 0) + 1
        self._now.batch_begins([])
        self._off = self._failures >= _MOST_FAILURES
        self._keeper.note()

    def _state(self) -> RecordedServer:
        return RecordedServer(
            recording=RECORDING,
            engine=self._engine,
            arguments=self._arguments,
            launch=self._launch,
            dp=self._dp,
            seen=self._choice.seen,
            written=self._keeper.written,
            skipped=dict(self._choice.skipped),
            failures=self._failures,
            last_failure=self._last_failure,
            share=self._guards.clock.share,
        )


def _chunked_requests(scheduler: Any) -> Iterator[Any]:
    """The requests whose prompts are prefilled in chunks; a release has one or several."""
    one = getattr(scheduler, "chunked_req", None)
    yield from [one] if one is not None else []
    yield from getattr(scheduler, "chunked_reqs", None) or ()
