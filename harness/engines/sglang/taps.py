"""Record what the worker does, stage by stage, without changing it. Called by drive.py before the first request.

Boundary taps stand where the worker's own stages return: the whole of a prefill or decode batch, draft(), verify(). Inner
taps stand in ModelRunner.forward, and need a forward that Python runs. Only defined regions are recorded (DESIGN §4).
"""

from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from eagletwin.harness.trace import Recorder

from .pools import Allocation, Pool


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
        self._drafter = self._worker.draft_worker
        self._target_runner = scheduler.tp_worker.model_runner
        self._draft_runner = self._drafter.draft_runner
        self.pools = {
            "target": Pool(self._target_runner.token_to_kv_pool),
            "draft": Pool(self._draft_runner.token_to_kv_pool),
        }
        self._width = int(self._worker.speculative_num_draft_tokens)
        self._steps = int(self._worker.speculative_num_steps)
        self.prefills = 0  # prefill batches so far
        self._rounds: dict[str, int] = {}
        self._wrapped: list[tuple[Any, str]] = []
        self._batch: list[Any] = []
        self._forward = 0
        self._draft_step = 0
        self._accept_lens: list[int] = []
        self._stored: dict[tuple[str, str], Tensor] = {}  # last KV rows seen [2, L, n, G, D], to record changes only

    def __enter__(self) -> "Taps":
        """Replace the bound methods on these instances; other schedulers of the process are untouched."""
        self._wrap(self._worker, "forward_batch_generation", self._around_batch)
        self._wrap(self._worker, "verify", self._around_verify)
        self._wrap(self._drafter, "draft", self._around_draft)
        self._wrap(
            self._target_runner, "forward", lambda call, batch, *a, **k: self._around_forward(True, call, batch, *a, **k)
        )
        self._wrap(
            self._draft_runner, "forward", lambda call, batch, *a, **k: self._around_forward(False, call, batch, *a, **k)
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for owner, name in self._wrapped:
            delattr(owner, name)  # the class's own method shows again

    def _wrap(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        original = getattr(owner, name)
        setattr(owner, name, lambda *args, **kwargs: around(original, *args, **kwargs))
        self._wrapped.append((owner, name))

    def _add(self, request: Any, stage: str, step: int, numbers: dict[str, int], tensors: dict[str, Tensor]) -> None:
        self.recorder.add(
            request.rid,
            self._rounds.get(request.rid, 0),
            stage,
            step=step,
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
        if batch.forward_mode.is_extend():
            starts, lengths = list(batch.prefix_lens), list(batch.extend_lens)
            self._reached("prefill")
            result = call(batch, *args, **kwargs)
            self.prefills += 1
            self._after_prefill(result, starts, lengths)
        else:
            self._reached("draft")
            result = call(batch, *args, **kwargs)
            self._after_extend(result)
            for request in self._batch:
                self._rounds[request.rid] = self._rounds.get(request.rid, 0) + 1
        return result

    def _record_owners(self) -> None:
        """Who owns which slot when a batch begins. The scheduler has just moved slots about: freed, evicted, retracted."""
        held = {name: self.allocation.allocated(request) for name, request in self.requests.items()}
        counts = torch.tensor([len(slots) for slots in held.values()])
        self.recorder.add(
            "",
            0,
            "batch",
            step=self._forward,
            iteration=self.iteration,
            forward=self._forward,
            numbers={f"request.{name}": number for number, name in enumerate(held)},
            tensors={
                "slots": torch.cat(list(held.values())).to(torch.int32),
                "owners": torch.repeat_interleave(counts).to(torch.int32),
                "cached": self.allocation.cached().to(torch.int32),
            },
        )

    def _after_prefill(self, result: Any, starts: list[int], lengths: list[int]) -> None:
        proposal = result.next_draft_input
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        for n, (request, end, tensors) in enumerate(zip(self._batch, ends, self._changed_rows(ends), strict=True)):
            final = end == len(request.origin_input_ids) + len(request.output_ids)
            if final:  # what a chunk in between predicts and proposes is legal garbage
                tensors |= {
                    "next_token": result.next_token_ids[n : n + 1],
                    "proposal": proposal.topk_index[n],
                    "proposal_hidden": proposal.hidden_states[n],
                }
            self._add(request, "prefill", starts[n], {"start": starts[n], "end": end, "final": int(final)}, tensors)

    def _around_draft(self, call: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        self._draft_step = 0
        lengths = batch.seq_lens.tolist()
        result = call(batch, *args, **kwargs)
        tokens, positions = result.draft_token.view(-1, self._width), result.positions.view(-1, self._width)
        tables = [
            self.allocation.table(request, length + self._width) for request, length in zip(self._batch, lengths, strict=True)
        ]
        # draft decode step j writes the row of position seq_len + j - 1; read now: draft extend writes over it
        count = self._steps - 1
        slots = [table[length : length + count] for table, length in zip(tables, lengths, strict=True)]
        scratch = self.pools["draft"].rows(torch.cat(slots))
        for n, (request, table) in enumerate(zip(self._batch, tables, strict=True)):
            keys, values = scratch[:, :, n * count : (n + 1) * count].unbind()
            tensors = {
                "tokens": tokens[n],
                "positions": positions[n],
                "table": table,
                "scratch_keys": keys,
                "scratch_values": values,
            }
            self._add(request, "draft", 0, {"seq_len": lengths[n]}, tensors)
        self._reached("verify")
        return result

    def _around_verify(self, call: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        lengths = batch.seq_lens.tolist()
        result = call(batch, *args, **kwargs)
        self._accept_lens = result.accept_lens.tolist()
        predicted = result.next_token_ids.view(-1, self._width)
        bonus, new_lengths = result.next_draft_input.bonus_tokens.tolist(), result.new_seq_lens.tolist()
        for n, request in enumerate(self._batch):
            accept_len = self._accept_lens[n]
            kept = max(0, min(accept_len, self._width))  # a wrong accept_len must reach the judge, not break the tap
            tensors = {
                "predicted": predicted[n, :kept],
                "accept_index": result.accept_index[n, :kept] - n * self._width,
            }
            numbers = {
                "seq_len": lengths[n],
                "accept_len": accept_len,
                "bonus": bonus[n],
                "new_seq_len": new_lengths[n],
            }
            self._add(request, "verify", 0, numbers, tensors)
        self._reached("draft extend")
        return result

    def _after_extend(self, result: Any) -> None:
        proposal, lengths = result.next_draft_input, result.new_seq_lens.tolist()
        for n, (request, tensors) in enumerate(zip(self._batch, self._changed_rows(lengths), strict=True)):
            tensors |= {"proposal": proposal.topk_index[n], "proposal_hidden": proposal.hidden_states[n]}
            self._add(request, "extend", 0, {"seq_len": lengths[n]}, tensors)

    def _changed_rows(self, ends: list[int]) -> list[dict[str, Tensor]]:
        """Of each request: its table up to ends[n], and the KV rows below ends[n] that differ from those last recorded for it.

        All of them are read each time: a row that somebody overwrote later is a change, and so a record.
        """
        tables = [self.allocation.table(request, end) for request, end in zip(self._batch, ends, strict=True)]
        found = [{"table": table} for table in tables]
        slots = torch.cat(tables)
        for name, pool in self.pools.items():
            rows, begin = pool.rows(slots), 0  # [2, L, all, G, D]
            for request, end, tensors in zip(self._batch, ends, found, strict=True):
                mine, before = rows[:, :, begin : begin + end], self._stored.get((request.rid, name))
                changed = torch.ones(end, dtype=torch.bool)
                if before is not None:
                    known = min(end, before.shape[2])
                    changed[:known] = (mine[:, :, :known] != before[:, :, :known]).movedim(2, 0).flatten(1).any(1)
                self._stored[request.rid, name] = mine
                at = changed.nonzero().flatten()
                keys, values = mine.index_select(2, at).unbind()
                tensors |= {f"{name}_rows": at, f"{name}_keys": keys, f"{name}_values": values}
                begin += end
        return found

    # -- inner -------------------------------------------------------------------------------------------------------

    def _around_forward(self, target: bool, call: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        mode = batch.forward_mode
        if self._batch and not mode.is_idle():
            self._forward += 1
            if mode.is_target_verify():
                self._split(batch, "target.verify", [self._width] * len(self._batch), None, [0] * len(self._batch))
            elif mode.is_draft_extend_v2():
                self._split(
                    batch, "draft.extend_decode", [self._width] * len(self._batch), self._accept_lens, [0] * len(self._batch)
                )
            elif mode.is_decode():
                self._draft_step += 1
                self._split(batch, "draft.decode", [1] * len(self._batch), None, [self._draft_step] * len(self._batch))
            else:
                lengths = [int(length) for length in batch.extend_seq_lens_cpu]
                starts = [int(start) for start in batch.extend_prefix_lens_cpu]
                self._split(batch, "target.extend" if target else "draft.extend", lengths, None, starts)
        first = len(self.recorder.records) - len(self._batch)
        result = call(batch, *args, **kwargs)
        # known only now, and part of what was recorded before the forward
        if self._batch and (target or mode.is_decode()) and not mode.is_idle():
            hidden, begin = result.logits_output.hidden_states, 0
            for number in range(first, first + len(self._batch)):
                length = len(self.recorder.tensors[f"{number}.input_ids"])
                self.recorder.complete(number, "hidden_out", hidden[begin : begin + length])
                begin += length
        return result

    def _split(self, batch: Any, stage: str, lengths: list[int], keep: list[int] | None, steps: list[int]) -> None:
        """Cut the rows of one forward into requests; of each, keep the first keep[n] rows (all, if None)."""
        begin = 0
        hidden = None if stage.startswith("target") else batch.spec_info.hidden_states
        for n, request in enumerate(self._batch):
            kept = lengths[n] if keep is None else max(0, min(keep[n], lengths[n]))
            rows = slice(begin, begin + kept)
            tensors = {
                "input_ids": batch.input_ids[rows],
                "positions": batch.positions[rows],
                "slots": batch.out_cache_loc[begin : begin + lengths[n]],
            }
            if hidden is not None:
                tensors["hidden_in"] = hidden[rows]
            self._add(request, stage, steps[n], {}, tensors)
            begin += lengths[n]
