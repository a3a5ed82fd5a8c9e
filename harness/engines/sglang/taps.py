"""Record what the worker does, stage by stage, without changing it. Called by drive.py before the first request.

Boundary taps stand where the worker's own stages return: the whole of a prefill or decode batch, draft(), verify(). Inner
taps stand in ModelRunner.forward, and need a forward that Python runs. Only defined regions are recorded (DESIGN §4).
"""

import sys
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from types import TracebackType
from typing import Any

import numpy as np
from torch import Tensor

from eagletwin.harness.slot_runs import Array
from eagletwin.harness.trace import Recorder, snapshot

from .cuda import CAPTURES
from .eras import layers, names, workers
from .eras.accepted import Accepted
from .eras.names import pick
from .pools import Allocation, Pool
from .taps_sampling import Coins
from .tree_layout import holes_of, tree_masks


def draft_runners(scheduler: Any) -> list[Any]:
    """The draft's model runners, by layer; a single head has one."""
    drafter = workers.drafter(scheduler)
    return list(getattr(drafter, "draft_runner_list", None) or [pick(drafter, "draft_runner", "draft_model_runner")])


class Taps:
    """Wraps the methods of one scheduler's workers and fills a Recorder.

    `reached(stage)` is called at each stage, so that somebody outside knows where a run was when it died.
    """

    def __init__(self, scheduler: Any, recorder: Recorder, reached: Callable[[str], None]) -> None:
        self.recorder = recorder
        self.iteration = 0
        self.requests: dict[str, Any] = {}  # SGLang's Req objects by id, as they are first seen
        self._reached = reached
        self.allocation = Allocation(scheduler)
        self._worker = scheduler.draft_worker
        self._drafter = workers.drafter(scheduler)
        self._target_runner = scheduler.tp_worker.model_runner
        self._draft_runners = draft_runners(scheduler)
        self._layers = len(self._draft_runners) if hasattr(self._drafter, "draft_runner_list") else 0  # 0: a single head
        self.pools = {
            "target": Pool(self._target_runner.token_to_kv_pool),
            "draft": Pool(self._draft_runners[0].token_to_kv_pool),
        }
        for layer, runner in enumerate(self._draft_runners[1:], 1):
            self.pools[f"draft{layer}"] = Pool(runner.token_to_kv_pool)
        self._used: dict[str, int] = {}  # whose attention backend and pools the forward of a layer found
        self._width = int(self._worker.speculative_num_draft_tokens)
        self._steps = int(self._worker.speculative_num_steps)
        self._topk = int(self._worker.topk)
        self._page = int(scheduler.page_size)
        self.prefills = 0  # prefill batches so far
        self._rounds: dict[str, int] = {}
        self._wrapped: list[tuple[Any, str]] = []
        self._batch: list[Any] = []
        self._forward = 0
        self._batches = 0
        self._draft_step = 0
        self._accept_lens: list[int] = []
        self._accepted = Accepted()
        self._coins = Coins()
        self._expanded = self._selected = np.empty(0)  # candidates of the round: the frontiers, and the final selection
        self._candidates: list[tuple[Array, Array]] = []  # of each step of the round: all tokens and scores [batch, ..]
        self._drafting = sys.modules[type(self._drafter).__module__]
        self._select = self._drafting.select_top_k_tokens
        self._consumed: Array | None = None  # of a round whose draft decode ran in a graph: tokens of its frontiers
        self._replayed = False  # whether it did
        self._graphs: dict[str, Any] = {
            "draft": getattr(self._drafter, "cuda_graph_runner", None),
            "extend": getattr(self._drafter, "cuda_graph_runner_for_draft_extend", None),
        }
        self._stored: dict[tuple[str, str], Array] = {}  # last KV rows seen [n, 2, L, G, D], to record changes only

    def __enter__(self) -> "Taps":
        """Replace the bound methods on these instances; other schedulers of the process are untouched."""
        self._wrap(self._worker, "forward_batch_generation", self._around_batch)
        self._wrap(self._worker, "verify", self._around_verify)
        self._wrap(self._drafter, "draft", self._around_draft)
        self._wrap(self._drafter, "draft_forward", self._around_draft_forward)
        self._wrap_forward(self._target_runner, None)
        for layer, runner in enumerate(self._draft_runners):
            self._wrap_forward(runner, layer)
            if self._layers:
                self._wrap(runner.model, "forward", partial(self._around_model, layer))
        self._accepted.start()
        if self._graphs["draft"] is not None:
            self._wrap(self._graphs["draft"], "execute", self._around_replay)
        if self._graphs["extend"] is not None and not self._layers:
            self._wrap(self._graphs["extend"], "execute", partial(self._around_forward, 0))
        elif self._graphs["extend"] is not None:
            self._wrap(self._graphs["extend"], "prepare", self._around_prepare)
        # a function of the worker's module, and the only place where all candidates of a step are together
        self._drafting.select_top_k_tokens = self._around_select  # type: ignore[attr-defined]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._drafting.select_top_k_tokens = self._select  # type: ignore[attr-defined]
        self._accepted.stop()
        self._coins.stop()
        for owner, name in self._wrapped:
            delattr(owner, name)  # the class's own method shows again

    def watch_coins(self) -> None:
        """Record what a verify samples by, too. Call it before the taps are entered."""
        self._coins.start()

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: around(original, *args, **kwargs))
        self._wrapped.append((owner, name))

    def _wrap_forward(self, runner: Any, layer: int | None) -> None:
        """layer: of the draft; None: it is the target's runner."""
        self._wrap(runner, "forward", partial(self._around_forward, layer))

    def _add(
        self, request: Any, stage: str, step: int, numbers: dict[str, int], tensors: dict[str, Array], layer: int = 0
    ) -> None:
        """A batch's tensors are copied once, and each request's are a part of the copy."""
        self.recorder.add(
            request.rid,
            self._rounds.get(request.rid, 0),
            stage,
            step=step,
            layer=layer,
            iteration=self.iteration,
            forward=self._forward,
            numbers=numbers,
            tensors=tensors,
        )

    # -- boundary ----------------------------------------------------------------------------------------------------

    def _around_batch(self, call: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._batch = list(batch.reqs)
        for request in self._batch:
            self.requests.setdefault(request.rid, request)
        self._record_owners()
        self._batches += 1  # not forwards: those in a CUDA graph are not seen
        if batch.forward_mode.is_extend():
            starts, lengths = names.chunk(batch)
            self._reached("prefill")
            result = call(batch, *args, **kwargs)
            self.prefills += 1
            self._after_prefill(result.next_token_ids, self._next_input(result, batch), starts, lengths)
        else:
            self._reached("draft")
            result = call(batch, *args, **kwargs)
            self._after_extend(result, batch)
            for request in self._batch:
                self._rounds[request.rid] = self._rounds.get(request.rid, 0) + 1
        return result

    def _record_owners(self) -> None:
        """Who owns which slot when a batch begins. The scheduler has just moved slots about: freed, evicted, retracted."""
        held = {name: self.allocation.allocated(request) for name, request in self.requests.items()}
        counts = [len(slots) for slots in held.values()]
        slots = np.concatenate(list(held.values()), dtype=np.int32, casting="unsafe")
        self.allocation.seen(slots)
        self.recorder.add(
            "",
            0,
            "batch",
            step=self._batches,
            iteration=self.iteration,
            forward=self._forward,
            numbers={f"request.{name}": number for number, name in enumerate(held)},
            tensors={
                "slots": slots,
                "owners": np.repeat(np.arange(len(held), dtype=np.int32), counts),
                "cached": self.allocation.cached(),
            },
        )

    def _next_input(self, result: Any, batch: Any) -> Any:  # noqa: ARG002  where v1 has it
        """What the next round begins with, of a batch that is done."""
        return result.next_draft_input

    def _after_prefill(self, next_tokens: Tensor, proposal: Any, starts: list[int], lengths: list[int]) -> None:
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        tokens, proposals = snapshot(next_tokens), self._proposals(proposal)
        for n, (request, end, tensors) in enumerate(zip(self._batch, ends, self._changed_rows(self._batch, ends), strict=True)):
            final = end == len(request.origin_input_ids) + len(request.output_ids)
            if final:  # what a chunk in between predicts and proposes is legal garbage
                tensors |= {"next_token": tokens[n : n + 1]}
            if final or self._layers:  # of several layers, those above have consumed it
                tensors |= proposals[n]
            self._add(request, "prefill", starts[n], {"start": starts[n], "end": end, "final": int(final)}, tensors)

    def _proposals(self, proposal: Any) -> list[dict[str, Array]]:
        """Of each request: what the root row of the next round proposes. Probabilities are a constant where topk is 1."""
        found = {"proposal": proposal.topk_index}  # [n, topk], or of all layers [n, layers * topk]
        if not self._layers:  # several layers have drafted all there is, and hand nothing on
            found["proposal_hidden"] = proposal.hidden_states
        if self._topk > 1:
            found["proposal_probabilities"] = proposal.topk_p
        rows = [snapshot(tensor) for tensor in found.values()]
        return [dict(zip(found, parts, strict=True)) for parts in zip(*rows, strict=True)]

    def _around_select(self, *args: Any, **kwargs: Any) -> Any:
        result = self._select(*args, **kwargs)
        if self._topk > 1:
            scores, tokens, _ = result[3]
            self._candidates.append((_flat(snapshot(tokens)), _flat(snapshot(scores))))
        return result

    def _around_replay(self, call: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Draft decode in a graph: no Python runs between its steps, and what it holds is read when it is over."""
        self._candidates.clear()
        count = int(batch.batch_size)
        result = call(batch, *args, **kwargs)
        self._replayed = True
        self._expanded, self._selected = snapshot(result[0])[:, 1:], snapshot(result[1])
        if self._topk > 1:
            self._candidates, self._consumed = CAPTURES.read(int(self._graphs["draft"].bs), count, self._topk)
        return result

    def _around_prepare(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._replayed = True
        return call(*args, **kwargs)

    def _around_draft_forward(self, call: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._candidates.clear()
        result = call(batch, *args, **kwargs)
        if not batch.forward_mode.is_idle():  # parents: -1 for the root, then the frontier of each step but the last
            self._expanded, self._selected = snapshot(result[0])[:, 1:].astype(np.int64), snapshot(result[1])
        return result

    def _around_draft(self, call: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._draft_step, self._replayed, self._consumed = 0, False, None
        result = call(batch, *args, **kwargs)
        lengths, count = batch.seq_lens.tolist(), len(self._batch)
        slots = snapshot(batch.out_cache_loc).reshape(count, self._topk, -1)[:, :, : self._steps]  # of each branch and step
        self.allocation.seen(slots)
        # read now: verify writes over them. Draft decode never runs for the last step's slots, and for none of several layers.
        steps = 0 if self._layers else self._steps - 1
        written = _flat(slots[:, :, :steps].swapaxes(1, 2))
        holes = [holes_of(slots[n], length, self._page) for n, length in enumerate(lengths)]
        rows = _parted(self.pools["draft"].rows(np.concatenate([*written, *holes])), [len(part) for part in (*written, *holes)])
        of_nodes = {
            "tokens": result.draft_token,
            "positions": result.positions,
        } | names.links(result)
        nodes = {name: snapshot(tensor).reshape(-1, self._width) for name, tensor in of_nodes.items()}
        masks = tree_masks(snapshot(result.custom_mask), self._mask_mode(), self._width, lengths)
        for n, request in enumerate(self._batch):
            tensors = {name: tensor[n] for name, tensor in nodes.items()} | {
                "table": self._table_in_draft(request, lengths[n]),
                "scratch_slots": slots[n],
                "mask": masks[n],
                "retrieve_index": nodes["retrieve_index"][n] - n * self._width,
            }
            if self._topk > 1:  # a chain's are constants that SGLang does not always fill in
                tensors |= {"expanded": self._expanded[n], "selected": self._selected[n]}
                if self._candidates and not self._layers:
                    tokens, scores = (
                        np.concatenate([step[n] for step in steps]) for steps in zip(*self._candidates, strict=True)
                    )
                    tensors |= {"candidate_tokens": tokens, "candidate_scores": scores}
            if not self._layers:
                tensors["scratch_kv"] = rows[n]
            if len(holes[n]):
                tensors["hole_kv"] = rows[count + n]
            if self._consumed is not None:
                tensors["consumed"] = self._consumed[n]
            self._add(request, "draft", 0, {"seq_len": lengths[n], "in_graph": int(self._replayed)}, tensors)
        self._replayed = False
        self._reached("verify")
        return result

    def _table_in_draft(self, request: Any, length: int) -> Array:  # noqa: ARG002  v1 needs it
        """The request's row of req_to_token, as far as its round reaches."""
        return self.allocation.allocated(request)

    def _mask_mode(self) -> str:
        backend = getattr(self._target_runner.attn_backend, "verify_mask", None)
        mode = self._drafter.tree_mask_mode if backend is None else backend.mode
        return str(mode.name)

    def _around_verify(self, call: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        lengths = batch.seq_lens.tolist()
        self._coins.clear()
        result = call(batch, *args, **kwargs)
        self._accept_lens = result.accept_lens.tolist()
        predicted, accepted = snapshot(result.next_token_ids).reshape(-1, self._width), self._accepted.index(result)
        bonus, new_lengths = names.bonus_tokens(result.next_draft_input).tolist(), names.new_seq_lens(result).tolist()
        hidden = result.logits_output.hidden_states
        path = None if self._topk == 1 else snapshot(hidden).reshape(len(lengths), self._width, -1)
        for n, request in enumerate(self._batch):
            accept_len = self._accept_lens[n]
            kept = max(0, min(accept_len, self._width))  # a wrong accept_len must reach the judge, not break the tap
            tensors = {
                "predicted": predicted[n, :kept],
                "accept_index": accepted[n, :kept] - n * self._width,
            }
            tensors |= self._coins.of(n, tensors["accept_index"])
            if path is not None:  # a chain's path is in front as it is
                tensors["path_hidden"] = path[n, :kept]
            numbers = {
                "seq_len": lengths[n],
                "accept_len": accept_len,
                "bonus": bonus[n],
                "new_seq_len": new_lengths[n],
            }
            self._add(request, "verify", 0, numbers, tensors)
        self._reached("draft extend")
        return result

    def _after_extend(self, result: Any, batch: Any) -> None:
        self._record_extend(self._batch, names.new_seq_lens(result).tolist(), self._next_input(result, batch))

    def _record_extend(self, requests: list[Any], lengths: list[int], proposal: Any) -> None:
        proposals = self._proposals(proposal)
        for n, (request, tensors) in enumerate(zip(requests, self._changed_rows(requests, lengths), strict=True)):
            tensors |= proposals[n]
            # single layers in a graph are seen as a whole; of several, nothing but what they leave behind
            self._add(request, "extend", 0, {"seq_len": lengths[n], "in_graph": int(self._replayed)}, tensors)
        self._replayed = False

    def _changed_rows(self, requests: list[Any], ends: list[int]) -> list[dict[str, Array]]:
        """Of each request: its table up to ends[n], and the KV rows below ends[n] that differ from those last recorded for it.

        All of them are read each time: a row that somebody overwrote later is a change, and so a record.
        """
        tables = [self.allocation.table(request, end) for request, end in zip(requests, ends, strict=True)]
        found = [{"table": table} for table in tables]
        slots = np.concatenate(tables)
        for name, pool in self.pools.items():
            rows = _parted(pool.rows(slots), ends)  # of each request [end, 2, L, G, D]
            for request, end, mine, tensors in zip(requests, ends, rows, found, strict=True):
                before = self._stored.get((request.rid, name))
                known = 0 if before is None else min(end, len(before))
                at, fresh = np.arange(known, end), mine[known:]
                if before is not None and not (mine[:known] == before[:known]).all():
                    changed = (mine[:known] != before[:known]).any((1, 2, 3, 4))
                    at = np.concatenate([np.flatnonzero(changed), at])
                    fresh = mine[at]
                self._stored[request.rid, name] = mine
                tensors |= {f"{name}_rows": at, f"{name}_kv": fresh}
        return found

    # -- inner -------------------------------------------------------------------------------------------------------

    def _around_model(self, layer: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What attention will read and write with, seen where it looks: each number is a layer's, -1 nobody's."""

        def whose(name: str) -> int:
            owners = [n for n, runner in enumerate(self._draft_runners) if getattr(runner, name) is used[name]]
            return layer if layer in owners else owners[0] if owners else -1

        used = layers.used(*args, *kwargs.values())
        names = {"attention": "attn_backend", "kv_pool": "token_to_kv_pool", "req_pool": "req_to_token_pool"}
        self._used = {part: whose(name) for part, name in names.items()}
        return call(*args, **kwargs)

    def _around_forward(self, layer: int | None, call: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        mode, target = batch.forward_mode, layer is None
        self._used = {}
        if not self._batch or mode.is_idle():
            return call(batch, *args, **kwargs)
        self._forward += 1
        requests, stage, lengths, steps = self._rows_of(batch, target)
        keep = self._accept_lens if mode.is_draft_extend_v2() else None
        found = self._split(batch, None if target else batch.spec_info.hidden_states, lengths, keep)
        self._add_tables(stage, requests, lengths, batch, found)
        try:
            result = call(batch, *args, **kwargs)
            if target or mode.is_decode():
                hidden, begin = snapshot(result.logits_output.hidden_states), 0
                for tensors in found:
                    rows = slice(begin, begin + len(tensors["input_ids"]))
                    tensors["hidden_out"], begin = hidden[rows], rows.stop
            return result
        finally:  # what went into a forward that never returned is the best hint at why
            for request, step, tensors in zip(requests, steps, found, strict=True):
                self._add(request, stage, step, dict(self._used), tensors, layer or 0)

    def _rows_of(self, batch: Any, target: bool) -> tuple[list[Any], str, list[int], list[int]]:
        """Whose rows a forward has, its stage, and of each request: how many rows, and the step."""
        mode, count = batch.forward_mode, len(self._batch)
        if mode.is_target_verify():
            return self._batch, "target.verify", [self._width] * count, [0] * count
        if mode.is_draft_extend_v2():
            return self._batch, "draft.extend_decode", [self._width] * count, [0] * count
        if mode.is_decode():
            self._draft_step += 1
            return self._batch, "draft.decode", [self._topk] * count, [self._draft_step] * count
        lengths = [int(length) for length in batch.extend_seq_lens_cpu]
        steps = [int(start) for start in batch.extend_prefix_lens_cpu]
        return self._batch, "target.extend" if target else "draft.extend", lengths, steps

    def _add_tables(
        self, stage: str, requests: list[Any], lengths: list[int], batch: Any, found: list[dict[str, Array]]
    ) -> None:
        """Rows of req_to_token, where they change between the stages of a round: nowhere in v2."""

    def _split(self, batch: Any, hidden: Tensor | None, lengths: list[int], keep: list[int] | None) -> list[dict[str, Array]]:
        """Cut the rows of one forward into requests; of each, keep the first keep[n] rows (all, if None)."""
        ids, positions, slots = map(snapshot, (batch.input_ids, batch.positions, batch.out_cache_loc))
        self.allocation.seen(slots)
        states = None if hidden is None else snapshot(hidden)
        found, begin = [], 0
        for n, length in enumerate(lengths):
            kept = length if keep is None else max(0, min(keep[n], length))
            rows = slice(begin, begin + kept)
            tensors = {"input_ids": ids[rows], "positions": positions[rows], "slots": slots[begin : begin + length]}
            if states is not None:
                tensors["hidden_in"] = states[rows]
            found.append(tensors)
            begin += length
        return found


def _flat(array: Array) -> Array:
    """[n, ..] -> [n, all the rest]."""
    return array.reshape(len(array), -1)


def _parted(rows: Array, lengths: list[int]) -> list[Array]:
    """Rows [n, 2, L, G, D] of several, one after another, as those of each."""
    return [rows[end - length : end] for end, length in zip(accumulate(lengths), lengths, strict=True)]
