"""Record what the older worker does (spec v1: EAGLEWorker, up to 0.5.12.post1). Made by drive.py instead of Taps where it runs.

How its traces differ from those of the V2 worker:

* draft() borrows slots, hands them back to the allocator before it writes to them, and verify takes others. So a request's
  row of req_to_token is another one in each stage of a round, and the records of single forwards bring their own.
* verify() appends the tokens to the requests, cuts each off where it ends (`kept`), keeps the accepted slots by naming them in
  req_to_token, and frees the others.
* Draft extend has the accepted rows only, and not those of requests that have ended.
"""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import numpy as np

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.errors import not_seen
from eagletwin.harness.core.trace import snapshot

from ..compat import names
from .inner import Inner
from .passes import ExtendPass, ForwardPass, Found, VerifyPass
from .taps import Taps
from .wraps import Wraps


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
        kept = [1 + drafts for drafts in names.drafts_kept(output)]
        cuts = list(accumulate(kept))[:-1]
        tokens = np.split(snapshot(names.tokens_kept(output)), cuts)
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
