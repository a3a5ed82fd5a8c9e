"""Record what the older worker does (spec v1: EAGLEWorker, up to 0.5.12.post1). Made by drive.py instead of Taps where it runs.

What is different from the V2 worker, for whoever reads a trace of it:

* draft() borrows slots, hands them back to the allocator before it writes to them, and verify takes others. So a request's
  row of req_to_token is another one in each stage of a round, and the records of single forwards bring their own.
* verify() appends the tokens to the requests, cuts each off where it ends (`kept`), keeps the accepted slots by naming them in
  req_to_token, and frees the others.
* Draft extend has the accepted rows only, and not those of requests that have ended.
"""

from collections.abc import Callable
from itertools import accumulate
from types import TracebackType
from typing import Any

import numpy as np

from eagletwin.harness.slot_runs import Array
from eagletwin.harness.trace import snapshot

from .eras import names
from .taps import Taps


class TapsV1(Taps):
    """The same records of the older worker. page_size is 1: it refuses trees in pages, and chains run on V2."""

    def __enter__(self) -> "TapsV1":
        from sglang.srt.speculative import eagle_info

        super().__enter__()
        self._module = eagle_info
        self._walk = eagle_info.verify_tree_greedy_func
        self._walked: tuple[Array, Array, Array] | None = None
        self._going_on: list[Any] = []  # requests of the batch that did not end in this round
        self._kept: list[int] = []  # tokens of each of them that were committed
        eagle_info.verify_tree_greedy_func = self._around_walk
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._module.verify_tree_greedy_func = self._walk
        super().__exit__(kind, error, trace)

    def _around_walk(self, *args: Any, **kwargs: Any) -> Any:
        """What verify decides, before it cuts it off where a request ends."""
        result = self._walk(*args, **kwargs)
        predicted, accept_index, correct = map(snapshot, result)
        self._walked = predicted, accept_index, correct
        return result

    def _next_input(self, result: Any, batch: Any) -> Any:  # noqa: ARG002
        return batch.spec_info

    def _table_in_draft(self, request: Any, length: int) -> Array:
        return self.allocation.table(request, length + self._topk * self._steps)

    def _mask_mode(self) -> str:
        return "FULL_MASK"

    def _around_verify(self, call: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        lengths = batch.seq_lens.tolist()
        result = call(batch, *args, **kwargs)
        logits, output = result[:2]
        assert self._walked is not None, "verify returned, and nothing has walked the trees"
        predicted, accepted, correct = self._walked
        kept = [1 + drafts for drafts in names.drafts_kept(output)]
        ends = list(accumulate(kept))
        tokens, hidden = (np.split(snapshot(all_), ends[:-1]) for all_ in (names.tokens_kept(output), logits.hidden_states))
        new_lengths = batch.seq_lens.tolist()
        for n, request in enumerate(self._batch):
            accept_len = int(correct[n]) + 1
            path = accepted[n, : max(0, min(accept_len, self._width))]
            numbers = {
                "seq_len": lengths[n],
                "accept_len": accept_len,
                "bonus": int(predicted[path[-1]]),
                "new_seq_len": new_lengths[n],
            }
            if request.finished():
                numbers["kept"] = kept[n]
            tensors = {"predicted": tokens[n], "accept_index": path - n * self._width}
            if self._topk > 1:
                tensors["path_hidden"] = hidden[n]
            self._add(request, "verify", 0, numbers, tensors)
        going_on = [n for n, request in enumerate(self._batch) if not request.finished()]
        self._going_on = [self._batch[n] for n in going_on]
        self._kept = [kept[n] for n in going_on]
        self._ends = [new_lengths[n] for n in going_on]
        self._reached("draft extend")
        return result

    def _after_extend(self, result: Any, batch: Any) -> None:
        if self._going_on:
            self._record_extend(self._going_on, self._ends, self._next_input(result, batch))

    def _rows_of(self, batch: Any, target: bool) -> tuple[list[Any], str, list[int], list[int]]:
        if batch.forward_mode.is_draft_extend():
            return self._going_on, "draft.extend_decode", self._kept, [0] * len(self._kept)
        return super()._rows_of(batch, target)

    def _add_tables(
        self, stage: str, requests: list[Any], lengths: list[int], batch: Any, found: list[dict[str, Array]]
    ) -> None:
        if stage not in ("target.verify", "draft.extend_decode"):
            return
        ends = batch.seq_lens.tolist()  # draft extend is given those of its end
        reach = [end + (length if stage == "target.verify" else 0) for end, length in zip(ends, lengths, strict=True)]
        for request, end, tensors in zip(requests, reach, found, strict=True):
            tensors["table"] = self.allocation.table(request, end)
