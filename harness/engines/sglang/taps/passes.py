"""Forwards of models and what surrounds them: one draft(), one verify, one draft extend, cut into requests, with KV rows."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor

from eagletwin.harness.core.arrays import Array, changed_rows
from eagletwin.harness.core.trace import snapshot

from ..compat import memory, workers
from .pools import Allocation, Pool
from .sampling import Coins
from .speculation import Speculation
from .writer import Writer

# One forward of a model: what goes in and comes out, cut into requests.


@dataclass(slots=True)
class ForwardPass:
    """Made when ModelRunner.forward begins, recorded when it ends, also if that is with an exception.

    rows     of each request in the batch; they lie one request after another
    steps    the step of each request's record
    defined  of each request's rows, how many at the front are defined; None: all
    layer    of a multi-layer draft; else 0
    used     of a layer: whose attention backend and pools the model found, by what they are
    tensors  of each request's record so far
    experts  of each layer that has some: which ones each row of the batch goes to
    chosen   of each layer with an indexer: which rows each row of the batch attends to, by position
    """

    stage: str
    requests: list[Any]
    rows: list[int]
    steps: list[int]
    defined: list[int] | None = None
    layer: int = 0
    used: dict[str, int] = field(default_factory=dict)
    tensors: list[dict[str, Array]] = field(default_factory=list)
    experts: list[Array] = field(default_factory=list)
    chosen: list[Array] = field(default_factory=list)

    def begins(self, batch: Any, hidden: Tensor | None) -> Array:
        """Note ids, positions, slots and, of the draft, hidden states [n, H] that go in. Returns the slots [n]; a forward that
        writes no rows has none."""
        ids, positions = snapshot(batch.input_ids), snapshot(batch.positions)
        slots = None if batch.out_cache_loc is None else snapshot(batch.out_cache_loc)
        states, begin = None if hidden is None else snapshot(hidden), 0
        for n, length in enumerate(self.rows):
            kept = length if self.defined is None else max(0, min(self.defined[n], length))
            rows = slice(begin, begin + kept)
            tensors = {"input_ids": ids[rows], "positions": positions[rows]}
            if slots is not None:
                tensors["slots"] = slots[begin : begin + length]
            if states is not None:
                tensors["hidden_in"] = states[rows]
            self.tensors.append(tensors)
            begin += length
        return np.empty(0, np.int64) if slots is None else slots[:begin]  # in a graph rows of padding come after them

    def note_result(self, hidden: Tensor) -> None:
        """Note hidden states [n, H] that came out; all rows must be defined."""
        states, begin = snapshot(hidden), 0
        for tensors in self.tensors:
            rows = slice(begin, begin + len(tensors["input_ids"]))
            tensors["hidden_out"], begin = states[rows], rows.stop

    def record(self, writer: Writer) -> None:
        for name, of_layers in (("experts", self.experts), ("chosen", self.chosen)):
            if not of_layers:
                continue
            chosen, begin = np.stack([of_layer[: sum(self.rows)] for of_layer in of_layers], 1), 0
            for tensors, length in zip(self.tensors, self.rows, strict=True):
                tensors[name] = np.sort(chosen[begin : begin + len(tensors["input_ids"])], -1)
                begin += length
        for request, step, tensors in zip(self.requests, self.steps, self.tensors, strict=True):
            writer.add(request, self.stage, step, dict(self.used), tensors, self.layer)


# One draft(): what its steps chose, gathered while it runs.


@dataclass(slots=True)
class DraftPass:
    """Made when draft() begins, whole when it returns.

    decodes     forwards of draft decode that Python ran so far: j of the next is one more
    root        whether the first of them ran the bonus token before anything was proposed: that is step 0
    proposed    whether the root's children are known
    in_graph    whether all of them ran in a CUDA graph, and so none is seen
    expanded    [b, ..] parents of the nodes, without the root: the frontier of each step but the last
    selected    [b, D - 1] candidates that became nodes
    candidates  of each step: all tokens and their scores, [b, ..] each; of a tree only
    consumed    [b, (S - 1) * topk] tokens of the frontiers; of a tree in a graph only, where no forward shows them
    chosen      of each step in a graph, rows that it attends to [b, K], of a model with an indexer
    """

    decodes: int = 0
    root: bool = False
    proposed: bool = False
    in_graph: bool = False
    expanded: Array = field(default_factory=lambda: np.empty(0))
    selected: Array = field(default_factory=lambda: np.empty(0))
    candidates: list[tuple[Array, Array]] = field(default_factory=list)
    consumed: Array | None = None
    chosen: list[Array] = field(default_factory=list)

    def begins(self) -> int:
        """A forward of draft decode begins: its step. A plain language model proposes d[1] from the row of the bonus token."""
        self.decodes += 1
        return self.decodes - self.root

    def ran(self, of: Speculation) -> int:
        """Forwards of draft decode: none for the last step's slots, unless the bonus token has the first ones', and none of
        several layers."""
        return 0 if of.layers or not of.steps else of.steps - 1 + self.root

    def step_selects(self, result: Any) -> None:
        """select_top_k_tokens returned this."""
        scores, tokens, _ = result[3]
        self.candidates.append((flat(snapshot(tokens)), flat(snapshot(scores))))

    def grown(self, result: Any) -> None:
        """draft_forward returned this, run by Python: (parents, selected, tokens). A parent is -1 for the root."""
        self.expanded, self.selected = snapshot(result[0])[:, 1:].astype(np.int64), snapshot(result[1])

    def note_replay(self, result: Any, chosen: list[Array]) -> None:
        """The graph of draft decode returned the same three. chosen: of each forward in it, what its indexer chose."""
        self.in_graph, self.chosen = True, chosen
        self.expanded, self.selected = snapshot(result[0])[:, 1:], snapshot(result[1])

    def tree_of(self, n: int, of: Speculation) -> dict[str, Array]:
        """What request n of the batch chose its nodes from; nothing of a chain, whose parts SGLang does not always fill in."""
        if of.topk == 1:
            return {}
        tensors = {"expanded": self.expanded[n], "selected": self.selected[n]}
        if self.candidates and not of.layers:
            tokens, scores = (np.concatenate([step[n] for step in steps]) for steps in zip(*self.candidates, strict=True))
            tensors |= {"candidate_tokens": tokens, "candidate_scores": scores}
        return tensors


def flat(array: Array) -> Array:
    """[n, ..] -> [n, all the rest]."""
    return array.reshape(len(array), -1)


# One verify of the v2 worker: what it decided, and what it decided by.

Found = list[tuple[dict[str, int], dict[str, Array]]]  # of each request: numbers and tensors of its record


@dataclass(slots=True)
class VerifyPass:
    """Made when verify() begins, whole when it returns.

    lengths      committed tokens of each request before it, which verify moves on
    accept_lens  tokens that it commits, of each request: the accepted drafts and the bonus
    walked       v1 alone: what the walk along the trees returned: predicted, accept_index, correct
    """

    lengths: list[int]
    accept_lens: list[int] = field(default_factory=list)
    walked: tuple[Array, Array, Array] | None = None

    def note_result(self, result: Any, accepted: Array, coins: Coins, of: Speculation, *, states: bool = True) -> Found:
        """accepted: nodes as numbers in the whole batch [b, S + 1]; states: those of the path are recorded as well."""
        self.accept_lens = result.accept_lens.tolist()
        predicted = snapshot(result.next_token_ids).reshape(-1, of.width)
        bonus, new_lengths = workers.bonus_tokens(result.next_draft_input).tolist(), workers.new_seq_lens(result).tolist()
        path = None
        if states and of.topk > 1:
            path = snapshot(result.logits_output.hidden_states).reshape(len(self.lengths), of.width, -1)
        found = []
        for n, length in enumerate(self.lengths):
            accept_len = self.accept_lens[n]
            kept = max(0, min(accept_len, of.width))  # a wrong accept_len must reach the judge, not break the tap
            tensors = {"predicted": predicted[n, :kept], "accept_index": accepted[n, :kept] - n * of.width}
            tensors |= coins.of(n, tensors["accept_index"])
            if path is not None:  # a chain's path is in front as it is
                tensors["path_hidden"] = path[n, :kept]
            numbers = {"seq_len": length, "accept_len": accept_len, "bonus": bonus[n], "new_seq_len": new_lengths[n]}
            found.append((numbers, tensors))
        return found


# Draft extend after a verify: the draft takes over what was committed.


@dataclass(slots=True)
class ExtendPass:
    """Made when verify() returns, of what it decided; whole when the batch is done.

    requests  those that it runs for: v2 all of the batch, v1 those that have not ended
    rows      of each request in the forward: v2 all nodes of a tree, v1 the committed tokens
    defined   of these, how many at the front the sequence goes on with; None: all
    ends      v1 alone: length of each request when the round is over. v2 says so in the batch's result.
    in_graph  whether the layers of a multi-layer draft ran in CUDA graphs. A single head's graph is seen as one forward.
    """

    requests: list[Any]
    rows: list[int]
    defined: list[int] | None
    ends: list[int] | None = None
    in_graph: bool = False


# What draft extend leaves for the next round, after a prefill as after a verify.


def proposals_of(draft_input: Any, of: Speculation) -> list[dict[str, Array]]:
    """Of each request: what the root row of the next round proposes. Probabilities are a constant where topk is 1."""
    found = {"proposal": draft_input.topk_index}  # [n, topk], or of all layers [n, layers * topk]
    if not of.layers and of.states:  # several layers have drafted all there is, and hand nothing on
        found["proposal_hidden"] = draft_input.hidden_states
    if of.topk > 1:
        found["proposal_probabilities"] = draft_input.topk_p
    rows = [snapshot(tensor) for tensor in found.values()]
    return [dict(zip(found, parts, strict=True)) for parts in zip(*rows, strict=True)]


# What is under way: the batch that runs, and the phases of it that have begun. Boundary and inner taps share it.


@dataclass(slots=True)
class Underway:
    """A phase is None before it begins in this batch, and stays when it has ended, until the next batch.

    `drafting`, `verifying` and `extending` raise AssertionError where a worker does a thing before the phase that it belongs
    to: the run is then one that eagletwin cannot tell anything of.
    """

    requests: list[Any] = field(default_factory=list)
    draft: DraftPass | None = None
    verify: VerifyPass | None = None
    extend: ExtendPass | None = None
    forward: ForwardPass | None = None

    def batch_begins(self, requests: list[Any]) -> None:
        self.requests = requests
        self.draft = self.verify = self.extend = self.forward = None

    def drafting(self) -> DraftPass:
        assert self.draft is not None, "a step of a draft before draft() was called"
        return self.draft

    def verifying(self) -> VerifyPass:
        assert self.verify is not None, "trees were walked before verify() was called"
        return self.verify

    def extending(self) -> ExtendPass:
        assert self.extend is not None, "draft extend of a round before verify() returned"
        return self.extend


# The committed KV rows of requests, recorded where they are new or have changed.


class ChangedRows:
    """Remembers the rows that it found last, of each request in each pool."""

    def __init__(self, allocation: Allocation, pools: dict[str, Pool]) -> None:
        self._allocation = allocation
        self._pools = pools
        self._last: dict[tuple[str, str], Array] = {}  # (request, pool) -> [n, 2, L, G, D]

    def of(self, requests: list[Any], ends: list[int]) -> list[dict[str, Array]]:
        """For each request: its table up to ends[n], and the KV rows below ends[n] that differ from those last recorded for it.

        All of them are read each time: a row that was overwritten later is a change, and so a record.
        """
        tables = [self._allocation.table(request, end) for request, end in zip(requests, ends, strict=True)]
        found = [{"table": table} for table in tables]
        if self._allocation.has_windows:
            for tensors in found:
                tensors["window_table"] = self._allocation.window_slots(tensors["table"])
        for name, pool in self._pools.items():
            rows = pool.rows_of(tables)  # of each request [end, 2, L, G, D]
            for request, stored_now, tensors in zip(requests, rows, found, strict=True):
                at = changed_rows(stored_now, self._last.get((request.rid, name)))
                self._last[request.rid, name] = stored_now
                tensors |= {f"{name}_rows": at, f"{name}_kv": stored_now[at]}
                tensors |= pool.kept_of(memory.row(request), tensors["table"])
        return found


# How SGLang lays a draft tree out: slots in front of its branches, and the parts of its mask.


def holes_of(slots: Array, length: int, page: int) -> Array:
    """Slots [(topk - 1) * n] between the start of a page and where a branch begins in it, of branches 1..; slots [topk, S].

    length: of the committed prefix. Branch 0 begins in the page that it ends in, and has none of its own.
    """
    inside = length % page if len(slots) > 1 else 0
    if not inside:
        return np.empty(0, np.int64)
    # a wrong slot must reach the judge, not break the tap
    return np.maximum(slots[1:, :1] - inside + np.arange(inside), 0).ravel()


def tree_masks(mask: Array, mode: str, width: int, lengths: list[int]) -> list[Array]:
    """The tree's part of each request's mask [D, D]; D = width = num_draft_tokens. What lies before it belongs to the prefix.

    mode: name of SGLang's TreeMaskMode.
    """
    masks, begin = [], 0
    if mode == "QLEN_ONLY_BITPACKING":
        bits = mask.astype(np.int64).reshape(-1, width, 1) >> np.arange(width)
        return list((bits & 1).astype(np.bool_)[: len(lengths)])
    for length in lengths:
        row = width + (length if mode == "FULL_MASK" else 0)
        masks.append(mask[begin : begin + width * row].reshape(width, row)[:, row - width :])
        begin += width * row
    return masks


# The slots that a draft() borrows for its branches, and the KV rows that it leaves in them.


@dataclass(frozen=True, slots=True)
class Scratch:
    """Read when draft() returns, since verify writes over the rows. Of a draft without rows of its own there is nothing.

    slots  [b, topk, S], of each branch and step
    rows   of each request [steps that ran * topk, 2, L, G, D], by step; empty if no pool was read
    holes  of each request, rows of the slots in front of branches that begin inside a page [.., 2, L, G, D]; empty likewise
    """

    slots: Array = field(default_factory=lambda: np.empty(0, np.int64))
    rows: list[Array] = field(default_factory=list)
    holes: list[Array] = field(default_factory=list)


def scratch_of(batch: Any, lengths: list[int], pool: Pool | None, of: Speculation, ran: int) -> Scratch:
    """lengths: committed tokens of each request; pool: None where no rows are read; ran: forwards of draft decode."""
    if not of.steps:  # nothing was drafted, and nothing borrowed
        nothing = np.empty((len(lengths), of.topk, 0), np.int64)
        return Scratch(nothing, [] if pool is None else pool.rows_of([np.empty(0, np.int64)] * len(lengths)), [])
    slots = snapshot(batch.out_cache_loc).reshape(len(lengths), of.topk, -1)[:, :, : of.steps]
    if pool is None:
        return Scratch(slots, [], [])
    written = flat(slots[:, :, :ran].swapaxes(1, 2))
    holes = [holes_of(slots[n], length, of.page) for n, length in enumerate(lengths)]
    rows = pool.rows_of([*written, *holes])
    return Scratch(slots, rows[: len(lengths)], rows[len(lengths) :])
