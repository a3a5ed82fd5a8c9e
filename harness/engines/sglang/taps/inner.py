"""Taps inside draft(), verify() and draft extend: where Python runs a single forward or a step, or replays a graph of them."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.trace import snapshot
from eagletwin.harness.engines.inside.blame import Wraps, hand_on

from ..compat import attention, dp_attention
from ..graphs import install
from .passes import ForwardPass, Underway
from .pools import Allocation
from .sampling import Coins
from .speculation import Speculation
from .writer import Writer

# What the forwards of draft decode leave in the buffers of a CUDA graph: noted while it is captured, read after a replay.
#
# boot/cuda.py notes them.


class Captures:
    """What draft decode of a tree holds between its steps, in the graph of each batch size.

    Tensors that Python refers to are not reused by the allocator of a graph, nor by that of a later one in the same pool. So
    what select_top_k_tokens returned while a graph was captured is where each replay of it writes the same values again. The
    graph itself is not changed; only its memory is reused less.
    """

    def __init__(self) -> None:
        self._steps: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}  # batch size -> per step: tokens, scores, frontier

    def note(self, step: int, result: Any) -> None:
        """select_top_k_tokens of this step returned this. Warm-up runs, before a capture, are of no use."""
        if not torch.cuda.is_current_stream_capturing():
            return
        frontier, (scores, tokens, _) = result[0], result[3]
        if step == 0:
            self._steps[tokens.shape[0]] = []
        self._steps[tokens.shape[0]].append((tokens, scores, frontier))

    def read(self, size: int, count: int, topk: int) -> tuple[list[tuple[Array, Array]], Array]:
        """After the graph of this batch size ran for `count` requests: all candidates of each step, (tokens, scores)
        [count, ..], and the tokens that went on [count, (S - 1) * topk]."""
        steps = self._steps[size]
        candidates = [
            (snapshot(tokens[:count]).reshape(count, -1), snapshot(scores[:count]).reshape(count, -1))
            for tokens, scores, _ in steps
        ]
        frontiers = [snapshot(frontier).reshape(size, topk)[:count] for _, _, frontier in steps[:-1]]
        return candidates, np.concatenate(frontiers or [np.empty((count, 0), np.int64)], 1)


CAPTURES = Captures()


class CapturedChoices:
    """Rows that indexers choose in CUDA graphs. A graph makes a copy of what each of its indexers returned, and each replay
    writes that copy anew."""

    def __init__(self) -> None:
        self._replayed: list[Tensor] = []
        self._captured: list[Tensor] = []

    def watch(self, graphs: Any) -> None:
        """Follow the graphs of this class (torch.cuda.CUDAGraph). Called before any is captured."""
        begin, replay = graphs.capture_begin, graphs.replay

        def capture_begin(graph: Any, *args: Any, **kwargs: Any) -> None:
            hand_on(begin, graph, *args, **kwargs)
            self._captured = graph.eagletwin_chosen = []

        def noted_replay(graph: Any) -> None:
            self._replayed += getattr(graph, "eagletwin_chosen", ())
            hand_on(replay, graph)

        graphs.capture_begin, graphs.replay = capture_begin, noted_replay

    def note(self, result: Tensor | None) -> None:
        """An indexer returned this [n, K]. Warm-up runs, before a capture, are of no use."""
        if result is not None and torch.cuda.is_current_stream_capturing():
            self._captured.append(result.clone())

    def take(self) -> list[Array]:
        """Of the graphs that were replayed since this was last called, in the order of their indexers."""
        found, self._replayed = [snapshot(rows) for rows in self._replayed], []
        return found


CHOICES = CapturedChoices()


# what a layer finds -> its name on a model runner
_USED = {"attention": "attn_backend", "kv_pool": "token_to_kv_pool", "req_pool": "req_to_token_pool"}


class Inner:
    """Fills the passes that are under way, and records forwards. taps.py says which tap stands where."""

    def __init__(self, of: Speculation, underway: Underway, allocation: Allocation, writer: Writer, coins: Coins) -> None:
        self.states = True  # whether hidden states are recorded
        self._of = of
        self._now = underway
        self._allocation = allocation
        self._writer = writer
        self._coins = coins
        # a batch of DP attention, the tokens that it has, and those that it says each rank has
        self._counted: tuple[Any, int, Array] = None, 0, np.empty(0, np.int64)

    def wrap(self, wraps: Wraps) -> None:
        of = self._of
        wraps.method(of.drafter, "draft_forward", self._around_draft_forward)
        wraps.method(of.target, "forward", partial(self._around_forward, None))
        for layer, runner in enumerate(of.drafts):
            wraps.method(runner, "forward", partial(self._around_forward, layer))
            if of.layers:
                wraps.method(runner.model, "forward", partial(self._around_model, layer))
        for graph in of.draft_graphs:
            wraps.method(graph, "execute", self._around_replay)
        for graph in of.extend_graphs:
            if of.layers:
                wraps.method(graph, "prepare", self._around_prepare)
            else:
                wraps.method(graph, "execute", partial(self._around_forward, 0))
        for router in self._parts_called("TopK") if self.states else ():  # each chooses experts for a layer's rows
            wraps.method(router, "forward", self._around_router)
        for indexer in self._parts_called("Indexer") if self.states else ():
            wraps.method(indexer, "forward", self._around_indexer)
        # the only place where all candidates of a step are together
        wraps.function(of.module, "select_top_k_tokens", self._around_select)
        wraps.value(install, "listener", self)

    def _parts_called(self, name: str) -> list[Any]:
        """The parts of target and draft whose class has this name."""
        models = [runner.model for runner in (self._of.target, *self._of.drafts)]
        return [part for model in models for part in model.modules() if type(part).__name__ == name]

    def _around_router(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Not seen in a graph, nor where a fused kernel chooses for itself."""
        result = call(*args, **kwargs)
        chosen = getattr(result, "topk_ids", None)
        if self._now.forward is not None and chosen is not None:
            self._now.forward.experts.append(snapshot(dp_attention.own_rows(chosen)))
        return result

    def _around_indexer(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Rows that a layer's rows attend to, by position; -1 behind them."""
        result = call(*args, **kwargs)
        if self._now.forward is not None and result is not None:
            self._now.forward.chosen.append(snapshot(result))
        return result

    def _around_draft_forward(self, call: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        draft = self._now.drafting()
        draft.candidates.clear()  # a second call begins anew
        result = call(batch, *args, **kwargs)
        if not batch.forward_mode.is_idle():
            draft.grown(result)
        return result

    def _around_select(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        if not self._now.requests:  # an idle batch
            return result
        self._now.drafting().proposed = True
        if self._of.topk > 1:
            self._now.drafting().step_selects(result)
        return result

    def _around_replay(self, call: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Draft decode in a graph: no Python runs between its steps, and what it holds is read when it is over."""
        if not self._now.requests:
            return call(batch, *args, **kwargs)
        draft, count = self._now.drafting(), len(self._now.requests)
        CHOICES.take()
        result = call(batch, *args, **kwargs)
        if self._of.tapes:
            draft.grown(result)
            return result
        draft.note_replay(result, CHOICES.take())
        if self._of.topk > 1:  # no number of steps changes then
            draft.candidates, draft.consumed = CAPTURES.read(int(self._of.draft_graphs[0].bs), count, self._of.topk)
        return result

    def _around_prepare(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """All layers of a multi-layer draft are about to run in graphs."""
        if self._now.requests:
            self._now.extending().in_graph = not self._of.tapes
        return call(*args, **kwargs)

    def _around_model(self, layer: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What attention will read and write with, seen where it looks."""
        self._note_memory(layer, attention.forward_memory(*args, *kwargs.values()))
        return call(*args, **kwargs)

    def _note_memory(self, layer: int, used: Mapping[str, Any]) -> None:
        """Each number names a layer, -1 none of them."""

        def owner_of(name: str) -> int:
            owners = [n for n, runner in enumerate(self._of.drafts) if getattr(runner, name) is used[name]]
            return layer if layer in owners else owners[0] if owners else -1

        if self._now.forward is not None:
            self._now.forward.used = {part: owner_of(name) for part, name in _USED.items()}

    def _around_forward(self, layer: int | None, call: Callable[..., Any], batch: Any, *args: Any, **kwargs: Any) -> Any:
        """layer: of the draft; None: the target's."""
        mode, target = batch.forward_mode, layer is None
        self._now.forward = None
        if getattr(batch, "global_num_tokens_cpu", None) is not None:
            if batch is not self._counted[0]:  # later steps of a draft find it padded
                tokens = 0 if batch.input_ids is None else len(batch.input_ids)
                self._counted = batch, tokens, np.array(batch.global_num_tokens_cpu, np.int64)
            _, tokens, counts = self._counted
            self._writer.add_numbered("gathered", "", {"counts": counts}, {"tokens": tokens, "target": int(target)})
        if not self._now.requests or mode.is_idle():
            return call(batch, *args, **kwargs)
        forward = self._begin_forward(layer, batch)
        CHOICES.take()
        try:
            result = call(batch, *args, **kwargs)
            forward.chosen += CHOICES.take()
            if self.states and (target or mode.is_decode()):
                forward.note_result(result.logits_output.hidden_states)
            if target and mode.is_target_verify():
                self._coins.note_output(result.logits_output)
            return result
        finally:  # what went into a forward that never returned is the best hint at why
            forward.record(self._writer)

    def _begin_forward(self, layer: int | None, batch: Any) -> ForwardPass:
        self._writer.forward_begins()
        self._now.forward = forward = self._forward_of(batch, layer is None)
        forward.layer = layer or 0
        consumed = batch.spec_info.hidden_states if self.states and layer is not None else None
        self._allocation.note_slots(forward.begins(batch, consumed))
        self._add_tables(forward, batch)
        return forward

    # Forwards of the draft inside a tape (graphs/install.py): those that `execute` does not show.

    def forward_begins_in_graph(self, runner: Any, batch: Any, used: Mapping[str, Any]) -> None:
        if not self._now.requests or not (batch.forward_mode.is_decode() or self._of.layers):
            return
        layer = self._of.drafts.index(runner)
        self._begin_forward(layer, batch)
        if self._of.layers:
            self._note_memory(layer, used)

    def forward_ends_in_graph(self, hidden: Tensor | None) -> None:
        forward = self._now.forward
        if forward is None or not (forward.stage == "draft.decode" or self._of.layers):
            return
        if self.states and forward.stage == "draft.decode":
            assert hidden is not None
            forward.note_result(hidden)
        forward.record(self._writer)

    def step_selects_in_graph(self, scores: Tensor, tokens: Tensor) -> None:
        if self._now.draft is not None and self._now.requests:
            count = len(self._now.requests)
            self._now.draft.proposed = True
            if self._of.topk > 1:
                self._now.draft.step_selects((None, None, None, (scores[:count], tokens[:count], None)))

    def router_chooses_in_graph(self, chosen: Tensor) -> None:
        if self.states and self._now.forward is not None:
            self._now.forward.experts.append(snapshot(dp_attention.own_rows_in_graph(chosen)))

    def indexer_chooses_in_graph(self, chosen: Tensor) -> None:
        if self.states and self._now.forward is not None:
            self._now.forward.chosen.append(snapshot(chosen))

    def _forward_of(self, batch: Any, target: bool) -> ForwardPass:
        """Whose rows a forward has, and how many of each request."""
        mode, requests = batch.forward_mode, self._now.requests
        count = len(requests)
        if mode.is_target_verify():
            return ForwardPass("target.verify", requests, [self._of.width] * count, [0] * count)
        if self._extends_a_round(mode):
            extend = self._now.extending()
            steps = [0] * len(extend.requests)
            return ForwardPass("draft.extend_decode", extend.requests, extend.rows, steps, extend.defined)
        if mode.is_decode():
            draft = self._now.drafting()
            draft.root |= self._of.roots and not draft.proposed
            return ForwardPass("draft.decode", requests, [self._of.topk] * count, [draft.begins()] * count)
        lengths = [int(length) for length in batch.extend_seq_lens_cpu]
        starts = [int(start) for start in batch.extend_prefix_lens_cpu]
        return ForwardPass("target.extend" if target else "draft.extend", requests, lengths, starts)

    def _extends_a_round(self, mode: Any) -> bool:
        return bool(mode.is_draft_extend_v2())

    def _add_tables(self, forward: ForwardPass, batch: Any) -> None:
        """Rows of req_to_token, where they change between the stages of a round: nowhere in v2."""
