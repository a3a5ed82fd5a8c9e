"""Record what the worker does, stage by stage, without changing it. Called by drive.py before the first request."""

from collections.abc import Callable
from functools import partial
from itertools import accumulate
from types import TracebackType
from typing import Any

import numpy as np
from torch import Tensor

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.case import GrammarBackend
from eagletwin.harness.core.errors import not_seen
from eagletwin.harness.core.trace import Recorder, snapshot
from eagletwin.harness.engines.inside.blame import Wraps

from ..compat import adaptive, memory, workers
from ..compat.verify import Accepted
from .compressed_pool import pool_of
from .inner import Inner
from .passes import (
    ChangedRows,
    DraftPass,
    ExtendPass,
    ForwardPass,
    Found,
    Scratch,
    Underway,
    VerifyPass,
    proposals_of,
    scratch_of,
    tree_masks,
)
from .pools import Allocation, Pool, states_of
from .prefix_cache import host_tier_of, look_ups_of, reads_of
from .sampling import Coins, Masks
from .speculation import speculation
from .writer import Writer


class Taps:
    """Stands around the methods of one scheduler's workers and fills a Recorder. Only defined regions are recorded (DESIGN §4).

    A batch is a prefill (a chunk of some prompts) or a round (a token or more for each request). A round has three phases. Each
    is an object, made when the phase begins, filled while it runs, and handed on when it ends:

        forward_batch_generation              _around_batch          record `batch`: who owns which slot
        ├ prefill: target extend, draft extend                       record `prefill` when it returns
        └ round
          ├ draft()                           _around_draft          DraftPass   → record `draft`
          │ └ draft_forward                   _around_draft_forward  parents and selection of the tree
          │   ├ ModelRunner.forward           _around_forward        ForwardPass → record `draft.decode`; no last step
          │   └ select_top_k_tokens           _around_select         candidates of a step
          ├ verify()                          _around_verify         VerifyPass  → record `verify`, and an ExtendPass
          │ └ ModelRunner.forward             _around_forward        ForwardPass → record `target.verify`
          └ draft extend                      (no method of its own) ExtendPass  → record `extend`, when the batch returns
            └ ModelRunner.forward             _around_forward        ForwardPass → record `draft.extend_decode`, of each layer

    Taps at forward_batch_generation, draft and verify are *boundary* taps: they see what a stage leaves behind, and exist on
    every engine. Those at forward and select_top_k_tokens are *inner* taps: they need Python to run at that place.

    What is known when:

    * Before a batch: its requests, and where its chunks start. SGLang changes the batch while it runs, so lengths are read
      before verify, and again after it.
    * When draft() returns: the tree, and the KV rows in the slots that it borrowed. They are read now, since verify writes its
      own rows over them.
    * While verify() runs: its coins and the logits that it samples from (Coins), and in older releases the accepted nodes
      (Accepted), where a function passes by that is given them. When it returns: how many rows of each request draft extend
      may use; the rest is unread garbage, and is not recorded.
    * When the batch returns: the proposal for the next round, and all committed KV rows that are new or have changed.

    With CUDA graphs no Python runs between the steps of draft decode. `_around_replay` stands where the graph is replayed: the
    draft is `in_graph`, has no `draft.decode`, and its candidates are read from what the graph left in memory (inner.py).
    Draft extend of a single head is replayed through `execute`, which is given the batch that forward would be given: it is
    recorded as a forward. Verify in a graph goes through ModelRunner.forward.

    A multi-layer draft has proposed all its tokens in draft extend, one layer after another: draft() runs no forward and
    only builds the tree. `_around_model` notes whose attention backend and pools each layer finds. In graphs `_around_prepare`
    sees that draft extend begins, and nothing shows until it ends.

    The older worker (v1) has its own order of slots and its own results: TapsV1, a subclass. Taps that record nothing:
    stages.py. `reached(stage)` is called at each stage, so that a process outside knows where a run was when it died.
    """

    allocates: type[Allocation] = Allocation
    inner: type[Inner] = Inner
    writes: type[Writer] = Writer
    records = True
    poisons = True  # whether the pools are poisoned before a case
    numbers = True  # whether hidden states, KV rows and probabilities are recorded, and not integers alone

    def __init__(self, scheduler: Any, recorder: Recorder, reached: Callable[[str], None]) -> None:
        self.writer = self.writes(recorder)
        self.requests: dict[str, Any] = {}  # SGLang's Req objects by id, as they are first seen
        self.prefills = 0  # prefill batches so far
        self.allocation = self.allocates(scheduler)
        self._of = speculation(scheduler)
        self.pools = self._pools_of_runners() if self.numbers else {}
        self._reached = reached
        self.states = states_of(scheduler) if self.numbers else None
        self.host_tier = host_tier_of(scheduler) if self.numbers and self.records else None
        self._look_ups = look_ups_of(scheduler, self.allocation, self.host_tier) if self.numbers and self.records else None
        self._reads = reads_of(scheduler, self.allocation) if self.numbers and self.records else None
        self._rows = ChangedRows(self.allocation, self.pools)
        self._accepted = Accepted()
        self._coins = Coins()
        self._grammars = Masks()
        self._wraps = self._new_wraps()
        self._now = Underway()
        self._inner = self.inner(self._of, self._now, self.allocation, self.writer, self._coins)
        self._inner.states = self.numbers and self._of.states

    def _new_wraps(self) -> Wraps:
        return Wraps()

    def _pools_of_runners(self) -> dict[str, Pool]:
        pools = {"target": pool_of(self._of.target.token_to_kv_pool)}
        for layer, runner in enumerate(self._of.drafts if self._of.memory else ()):
            pools[f"draft{layer or ''}"] = pool_of(runner.token_to_kv_pool)
        return pools

    def __enter__(self) -> "Taps":
        """Replace the bound methods on these instances; other schedulers of the process are untouched."""
        wrap = self._wraps.method
        wrap(self._of.worker, "forward_batch_generation", self._around_batch)
        wrap(self._of.drafter, "draft", self._around_draft)
        wrap(self._of.worker, "verify", self._around_verify)
        if self._of.adaptive:
            wrap(self._of.worker, adaptive.FED, self._around_fed)
        self._inner.wrap(self._wraps)
        if self.host_tier is not None:
            self.host_tier.watch(self._wraps, self._record_copy)
        if self.states is not None:
            self.states.watch(self._wraps)
        if self._look_ups is not None:
            self._look_ups.watch(self._wraps, partial(self.writer.add_numbered, "looked_up"))
        if self._reads is not None:
            self._reads.watch(self._wraps, partial(self.writer.add_numbered, "read", ""))
        self._accepted.start()
        self._grammars.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._accepted.stop()
        self._coins.stop()
        self._grammars.stop()
        self._wraps.undo()

    def watch_coins(self) -> None:
        """Record what a verify samples by, too. Call it before the taps are entered."""
        self._coins.start()

    def watch_masks(self, vocabulary: int, backend: GrammarBackend) -> None:
        """Record what grammars allow, of so many tokens. Call it before the taps are entered."""
        self._grammars.vocabulary, self._grammars.backend = vocabulary, backend

    def _around_batch(self, call: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._now.batch_begins(list(batch.reqs))
        if batch.forward_mode.is_idle():
            return self._around_idle(call, batch, *args, **kwargs)
        for request in self._now.requests:
            self.requests.setdefault(request.rid, request)
        self._record_owners()
        self._grammars.clear()
        if batch.forward_mode.is_extend():
            starts, lengths = workers.chunk(batch)
            self._reached("prefill")
            running = {request.rid for request in getattr(batch, "decoding_reqs", None) or ()}
            result = call(batch, *args, **kwargs)
            self.prefills += 1
            self._after_prefill(result.next_token_ids, self._next_input(result, batch), starts, lengths, running)
        else:
            self._reached("draft")
            result = call(batch, *args, **kwargs)
            self._round_is_over(result, batch)
        return result

    def _around_idle(self, call: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        """With DP attention, a batch of no request, with which a rank takes part in what others compute."""
        self._now.draft = DraftPass()
        self._reached("idle batch")
        kept = {name: pool.copies() for name, pool in self.pools.items()}
        result = call(batch, *args, **kwargs)
        changed = {name: pool.slots_that_differ(kept[name], self._of.page) for name, pool in self.pools.items()}
        self.writer.add_numbered("idle", "", changed)
        return result

    def _round_is_over(self, result: Any, batch: Any) -> None:
        self._after_extend(result, batch)
        self.writer.round_ends(self._now.requests)

    def _record_owners(self) -> None:
        """Who owns which slot when a batch begins. The scheduler has just moved slots about: freed, evicted, retracted."""
        held = {name: self.allocation.allocated_slots(request) for name, request in self.requests.items()}
        counts = [len(slots) for slots in held.values()]
        slots = np.concatenate(list(held.values()), dtype=np.int32, casting="unsafe")
        self.allocation.note_slots(slots)
        owners = np.repeat(np.arange(len(held), dtype=np.int32), counts)
        tensors = {"slots": slots, "owners": owners, "cached": self.allocation.cached()}
        if kept := self.allocation.kept_by_sessions(self.requests.values()):
            tensors["kept"] = np.array([slot for each in kept.values() for slot in each], np.int64)
        if self.allocation.has_windows:
            tensors["window_slots"] = self.allocation.window_slots(slots)
            tensors["window_cached"] = self.allocation.window_slots(tensors["cached"])
        if self.states is not None:
            tensors["states"] = np.array([memory.state_slot(request) for request in self.requests.values()], np.int64)
            tensors["state_cached"] = self.states.cached()
        self.writer.add_numbered("batch", "", tensors, {f"request.{name}": number for number, name in enumerate(held)})

    def _record_copy(self, request: str, restore: bool, slots: dict[str, Array]) -> None:
        self.writer.add_numbered("copy", request, slots, {"restore": int(restore)})

    def _next_input(self, result: Any, batch: Any) -> Any:  # noqa: ARG002  where v1 has it
        """What the next round begins with, of a batch that is done."""
        return result.next_draft_input

    def _after_prefill(
        self, next_tokens: Tensor, draft_input: Any, starts: list[int], lengths: list[int], running: set[str]
    ) -> None:
        """running: requests that a mixed batch gives one token more, next to those that it prefills."""
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        tokens, proposals = snapshot(next_tokens), self._proposals(draft_input)
        for n, (request, end, tensors) in enumerate(
            zip(self._now.requests, ends, self._rows.of(self._now.requests, ends), strict=True)
        ):
            # what its last round gave one that runs is not in its list yet, under overlap
            has = len(request.origin_input_ids) + len(request.output_ids)
            more = end - has
            final = more == 0 or (more > 0 and request.rid in running)
            if final:  # what a chunk in between predicts and proposes is legal garbage
                tensors |= {"next_token": tokens[n : n + 1]} | self._grammars.of(n, len(ends))
            if final or self._of.layers:  # of several layers, those above have consumed it
                tensors |= proposals[n]
            if self.states is not None:
                tensors |= self.states.of(request)
            numbers = {"start": starts[n], "end": end, "final": int(final)} | ({"mixed": 1} if request.rid in running else {})
            numbers |= {} if final else {"tokens": has}
            self.writer.add(request, "prefill", starts[n], numbers, tensors)

    def _proposals(self, draft_input: Any) -> list[dict[str, Array]]:
        return proposals_of(draft_input, self._of)

    def _around_draft(self, call: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.forward_mode.is_idle():
            return call(batch, *args, **kwargs)
        self._now.draft = draft = DraftPass()
        result = call(batch, *args, **kwargs)
        self._record_draft(draft, result, batch)
        self._reached("verify")
        return result

    def _record_draft(self, draft: DraftPass, result: Any, batch: Any) -> None:
        of, lengths = self._of, batch.seq_lens.tolist()
        scratch = scratch_of(batch, lengths, self.pools.get("draft"), of, draft.ran(of)) if of.memory else Scratch()
        self.allocation.note_slots(scratch.slots)
        numbers = {"in_graph": int(draft.in_graph)} | of.of_round()
        trees = self._trees(result, lengths)
        for n, request in enumerate(self._now.requests):
            tensors = trees[n] | {"table": self._table_in_draft(request, lengths[n])}
            tensors |= {"scratch_slots": scratch.slots[n]} if of.memory else {}
            tensors |= draft.tree_of(n, of)
            if scratch.rows and not of.layers:
                tensors["scratch_kv"] = scratch.rows[n]
            if scratch.holes and len(scratch.holes[n]):
                tensors["hole_kv"] = scratch.holes[n]
            if draft.consumed is not None:
                tensors["consumed"] = draft.consumed[n]
            if draft.chosen:
                tensors["chosen"] = np.sort(np.stack([rows[n] for rows in draft.chosen]), -1)[:, None]
            self.writer.add(request, "draft", 0, {"seq_len": lengths[n]} | numbers, tensors)

    def _trees(self, result: Any, lengths: list[int]) -> list[dict[str, Array]]:
        """The tree of each request, as verify is given it."""
        of_nodes = {"tokens": result.draft_token, "positions": result.positions} | workers.links(result)
        nodes = {name: snapshot(tensor).reshape(len(lengths), -1) for name, tensor in of_nodes.items()}
        masks, trees = self._masks(result, lengths), []
        for n in range(len(lengths)):
            tree = {name: tensor[n] for name, tensor in nodes.items()}
            tree["retrieve_index"] = tree["retrieve_index"] - n * self._of.width
            trees.append(tree | ({"mask": masks[n]} if masks else {}))
        return trees

    def _masks(self, result: Any, lengths: list[int]) -> list[Array]:
        return tree_masks(snapshot(result.custom_mask), self._mask_mode(), self._of.width, lengths)

    def _table_in_draft(self, request: Any, length: int) -> Array:  # noqa: ARG002  v1 needs it
        """The request's row of req_to_token, as far as its round reaches."""
        return self.allocation.allocated_slots(request)

    def _mask_mode(self) -> str:
        backend = getattr(self._of.target.attn_backend, "verify_mask", None)
        if backend is not None:
            return str(backend.mode.name)
        # a draft without rows of its own names none, and what builds its trees takes the whole
        mode = getattr(self._of.drafter, "tree_mask_mode", None)
        return "FULL_MASK" if mode is None else str(mode.name)

    def _around_verify(self, call: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        if batch.forward_mode.is_idle():
            return call(batch, *args, **kwargs)
        if self._now.draft is None:  # a round of no steps, which verifies the bonus token alone
            self._now.draft = DraftPass()
            self._record_draft(self._now.draft, batch.spec_info, batch)
        steps = self._record_steps(batch)
        self._now.verify = verify = VerifyPass(batch.seq_lens.tolist())
        self._coins.clear()
        result = call(batch, *args, **kwargs)
        for request, (numbers, tensors) in zip(self._now.requests, self._after_verify(verify, result, batch), strict=True):
            self.writer.add(request, "verify", 0, numbers | steps, tensors)
        self._reached("draft extend")
        return result

    def _record_steps(self, batch: Any) -> dict[str, int]:
        """Of a round whose number of steps was chosen: what each part of the worker holds it to be. What verify's records
        say."""
        found = self._of.of_round()
        if found:
            self.writer.add_round("steps", adaptive.parts(self._of, batch.spec_info))
        return found

    def _around_fed(self, call: Callable[..., Any], correct: list[int], *args: Any, **kwargs: Any) -> Any:
        """What chooses the steps is told how many drafts a batch accepted. Of what is told, the judge knows the rest."""
        size = kwargs.get("batch_size", args[0] if args else 0)
        self.writer.add_numbered("fed", "", {"correct": np.array(correct, np.int64)}, {"batch_size": int(size)})
        return call(correct, *args, **kwargs)

    def _after_verify(self, verify: VerifyPass, result: Any, batch: Any) -> Found:  # noqa: ARG002  v1 needs it
        found = verify.note_result(
            result, self._accepted.index(result), self._coins, self._of, states=self.numbers and self._of.states
        )
        for n, (_, tensors) in enumerate(found):
            tensors |= self._grammars.of(n, len(found))
        requests = self._now.requests
        self._now.extend = ExtendPass(requests, [self._of.width] * len(requests), verify.accept_lens)
        return found

    def _after_extend(self, result: Any, batch: Any) -> None:
        self._record_extend(self._now.extending(), workers.new_seq_lens(result).tolist(), self._next_input(result, batch))

    def _record_extend(self, extend: ExtendPass, ends: list[int], draft_input: Any) -> None:
        proposals, rows = self._proposals(draft_input), self._rows.of(extend.requests, ends)
        for n, (request, tensors) in enumerate(zip(extend.requests, rows, strict=True)):
            tensors |= proposals[n]
            if self.states is not None:
                tensors |= self.states.of(request)
            # single layers in a graph are seen as a whole; of several, nothing but what they leave behind
            self.writer.add(request, "extend", 0, {"seq_len": ends[n], "in_graph": int(extend.in_graph)}, tensors)


# Record what the older worker does (spec v1: EAGLEWorker, up to 0.5.12.post1). Made by drive.py instead of Taps where it runs.
#
# How its traces differ from those of the V2 worker:
#
# * draft() borrows slots, hands them back to the allocator before it writes to them, and verify takes others. So a request's
#   row of req_to_token is another one in each stage of a round, and the records of single forwards bring their own.
# * verify() appends the tokens to the requests, cuts each off where it ends (`kept`), keeps the accepted slots by naming them
#   in req_to_token, and frees the others.
# * Draft extend has the accepted rows only, and not those of requests that have ended.


class InnerV1(Inner):
    def wrap(self, wraps: Wraps) -> None:
        from sglang.srt.speculative import eagle_info

        super().wrap(wraps)
        wraps.function(eagle_info, "verify_tree_greedy_func", self._around_walk)

    def _around_walk(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What verify decides, before it cuts it off where a request ends."""
        result = call(*args, **kwargs)
        predicted, accept_index, correct = map(snapshot, result)
        self._now.verifying().walked = predicted, accept_index, correct
        return result

    def _extends_a_round(self, mode: Any) -> bool:
        return bool(mode.is_draft_extend())

    def _add_tables(self, forward: ForwardPass, batch: Any) -> None:
        if forward.stage not in ("target.verify", "draft.extend_decode"):
            return
        ends = batch.seq_lens.tolist()  # draft extend is given those of its end
        reach = [end + (rows if forward.stage == "target.verify" else 0) for end, rows in zip(ends, forward.rows, strict=True)]
        for request, end, tensors in zip(forward.requests, reach, forward.tensors, strict=True):
            tensors["table"] = self._allocation.table(request, end)


class TapsV1(Taps):
    """The same records of the older worker. page_size is 1: it refuses trees in pages, and chains run on V2."""

    inner = InnerV1

    def _next_input(self, result: Any, batch: Any) -> Any:  # noqa: ARG002
        return batch.spec_info

    def _table_in_draft(self, request: Any, length: int) -> Array:
        return self.allocation.table(request, length + self._of.topk * self._of.steps)

    def _mask_mode(self) -> str:
        return "FULL_MASK"

    def _after_verify(self, verify: VerifyPass, result: Any, batch: Any) -> Found:
        logits, output = result[:2]
        if verify.walked is None:
            raise not_seen("verify returned, and nothing has walked the trees")
        predicted, accepted, correct = verify.walked
        kept = [1 + drafts for drafts in workers.drafts_kept(output)]
        cuts = list(accumulate(kept))[:-1]
        tokens = np.split(snapshot(workers.tokens_kept(output)), cuts)
        hidden = np.split(snapshot(logits.hidden_states), cuts) if self._of.topk > 1 and self._of.states else []
        requests, new_lengths = self._now.requests, batch.seq_lens.tolist()
        found = []
        for n, request in enumerate(requests):
            accept_len = int(correct[n]) + 1
            path = accepted[n, : max(0, min(accept_len, self._of.width))]
            numbers = {
                "seq_len": verify.lengths[n],
                "accept_len": accept_len,
                "bonus": int(predicted[path[-1]]),
                "new_seq_len": new_lengths[n],
            }
            if request.finished():
                numbers["kept"] = kept[n]
            tensors = {"predicted": tokens[n], "accept_index": path - n * self._of.width}
            if hidden:
                tensors["path_hidden"] = hidden[n]
            found.append((numbers, tensors))
        on = [n for n, request in enumerate(requests) if not request.finished()]
        self._now.extend = ExtendPass(
            [requests[n] for n in on], [kept[n] for n in on], defined=None, ends=[new_lengths[n] for n in on]
        )
        return found

    def _after_extend(self, result: Any, batch: Any) -> None:
        extend = self._now.extending()
        if extend.requests:
            assert extend.ends is not None
            self._record_extend(extend, extend.ends, self._next_input(result, batch))
