"""The draft of several layers (MTP): every `draft.*` rule, layer by layer.

What each extend must have computed is worked out in the order in which the extends ran, since a row that was fed a draft is
never fed again by a worker that does not repair it: the *book* holds, for each layer and slot, the row that was last fed to it.
In the view `last_fed` the rows of an extend attend to those; in the view `committed` to what they should be by now, and a
stored row is wrong as soon as its token is committed and it is not that token's (DESIGN 3.7, reference/mtp.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.records import GONE, Key, Record
from eagletwin.harness.families import RECIPES
from eagletwin.reference.eagle import DraftRows, Head
from eagletwin.reference.mtp import draft_extend, is_provisional, layer_tokens

from ..compare import Place
from ..context import Rules
from ..ranks import heads
from ..replay import RequestReplay, Round, reference_heads, stored_rows
from . import rule
from .cached_rows import carry, pairs_of

# Which token each stored row of each layer of a multi-layer draft consumed when it was last fed.
#
# A request that takes rows over from the prefix cache takes over what they consumed. A key of the cache is a pair of
# neighbouring tokens, so where a request took over n rows in a row that another had fed, x[0..n] is the same in both: each of
# them that consumed one of these tokens must have consumed this request's. Later tokens are beyond the key. What the last rows
# of the layers above the first consumed of the other request's stays; the engine accepts that (boundary-kv), as it does a row
# that was fed a draft and never repaired.


class FedTokens:
    """By layer: slot -> the token that its row consumed; slots whose row was fed a draft are left out."""

    def __init__(self, layers: int) -> None:
        self._tokens: list[dict[int, int]] = [{} for _ in range(layers)]
        self._feeder: dict[int, str] = {}  # slot -> the request that fed it
        self._on_host: list[dict[int, int]] = [{} for _ in range(layers)]
        self._feeder_on_host: dict[int, str] = {}

    def copy(self, pairs: list[tuple[int, int]], restore: bool) -> None:
        """Rows of these (slot of the device, slot of the host) went to the host, or came back."""
        for tokens, host in zip(self._tokens, self._on_host, strict=True):
            carry(pairs, restore, tokens, host)
        carry(pairs, restore, self._feeder, self._feeder_on_host)

    def write(self, request: str, layer: int, rows: range, slots: Sequence[int], consumed: Sequence[int], known: int) -> None:
        """An extend of a request fed these rows, when x[0..known] was known."""
        for row, slot, token in zip(rows, slots, consumed, strict=False):  # a last round has rows without a slot
            if slot == 0:  # it has left the window
                continue
            self._feeder[slot] = request
            if is_provisional(row, layer, known):
                self._tokens[layer].pop(slot, None)
            else:
                self._tokens[layer][slot] = token

    def reused_rows(self, table: Sequence[int], count: int, tokens: Sequence[int]) -> list[tuple[list[int], list[int]]]:
        """Of each layer the first `count` rows of a request whose tokens these are, which were there already: what they must
        have consumed, and what they did. Both are alike for a row of which that is not known."""
        ends = self._ends(table[:count])
        found = []
        for layer, fed in enumerate(self._tokens):
            expected, consumed = list[int](), list[int]()
            for row, end in enumerate(ends[: max(0, count - layer)]):
                token = tokens[row + 1 + layer]
                expected.append(token)
                consumed.append(fed.get(table[row], token) if row + 1 + layer <= end else token)
            found.append((expected, consumed))
        return found

    def _ends(self, slots: Sequence[int]) -> list[int]:
        """Of each row, where the run of rows ends that its feeder fed."""
        ends, end = [0] * len(slots), len(slots)
        for row in reversed(range(len(slots))):
            if row + 1 < len(slots) and self._feeder.get(slots[row]) != self._feeder.get(slots[row + 1]):
                end = row + 1
            ends[row] = end
        return ends


# Which row was last fed to each slot of each layer of a multi-layer draft.
#
# Slots are those that the draft's rows lie in: of layers with a window, the window's. The prefix cache may have a slot of the
# request's lead to another request's row of the window, which came later.
#
# A row that was fed a draft is never fed again by a worker that does not repair it, so what a slot holds depends on the order
# in which the extends ran.


class LayerRowStore:
    """parts: what a trace calls the layers; heads: the reference's, in the same order.

    of_record  (record, part) -> keys and values [L, G, D] of the record's slots, as the book had them at that record; None: of
               a slot that was never written
    """

    def __init__(self, parts: Sequence[str], heads: Sequence[Head]) -> None:
        self._parts, self._heads = parts, heads
        self._slots: list[dict[int, tuple[Tensor, Tensor]]] = [{} for _ in heads]  # slot -> keys, values [L, G, D]
        self._on_host: list[dict[int, tuple[Tensor, Tensor]]] = [{} for _ in heads]
        self.of_record: dict[tuple[int, str], list[tuple[Tensor, Tensor] | None]] = {}

    def write(self, slots: Sequence[tuple[int, int]], rows: range, layers: Sequence[DraftRows]) -> None:
        """An extend wrote these (row, slot) of `rows`; layers: what each layer computed for all of them."""
        for book, layer in zip(self._slots, layers, strict=True):
            for row, slot in slots:
                n = row - rows.start
                book[slot] = layer.keys[:, n], layer.values[:, n]

    def copy(self, pairs: list[tuple[int, int]], restore: bool) -> None:
        """Rows of these (slot of the device, slot of the host) went to the host, or came back."""
        for book, host in zip(self._slots, self._on_host, strict=True):
            carry(pairs, restore, book, host)

    def look_up(self, number: int, slots: Sequence[Sequence[int]]) -> None:
        """Keep what the book has now of the slots of each layer, for record `number`: others write them again later."""
        for part, book, listed in zip(self._parts, self._slots, slots, strict=True):
            self.of_record[number, part] = [book.get(slot) for slot in listed]

    def rows(self, slots: Sequence[int]) -> list[DraftRows | None]:
        """The stored rows in these slots, of each layer. One that was never written is of zeros: reading it is reported."""
        if not slots:
            return [None] * len(self._heads)
        of_layers: list[DraftRows | None] = []
        for book, head in zip(self._slots, self._heads, strict=True):
            shape = head.shape
            nothing = torch.zeros(shape.num_layers, shape.num_kv_heads, shape.head_dim, dtype=torch.float64)
            rows = [book.get(slot, (nothing, nothing)) for slot in slots]
            keys, values = (torch.stack(parts, 1) for parts in zip(*rows, strict=True))
            of_layers.append(DraftRows(torch.empty(0), torch.empty(0), keys, values))
        return of_layers


@dataclass(frozen=True, slots=True)
class _Extend:
    """One extend of one request, all layers.

    known      M, the last token that was known; tokens x[0..M]
    proposals  what each layer proposed, followed; empty if the run ended before anybody saw them
    layers     rows of each layer; empty likewise
    """

    rows: range
    known: int
    tokens: Tensor
    proposals: list[int]
    layers: list[DraftRows]


@dataclass(slots=True)
class LayerState:
    """What is known of one request, while its records are gone through.

    extends        by the boundary record that ends each
    recorded       (part, row) -> the row as it was last recorded [2, L, G, D]
    compared       part -> rows below this were compared since they are due
    proposed       what its last extend proposed, and proposed_from: the logits that it did so from [S, V]
    of_the_end     rows of each layer, as they are once all is committed
    """

    extends: dict[Key, _Extend] = field(default_factory=dict)
    recorded: dict[tuple[str, int], Array] = field(default_factory=dict)
    compared: dict[str, int] = field(default_factory=dict)
    proposed: list[int] | None = None
    proposed_from: Array | None = None
    of_the_end: list[DraftRows] | None = None


class Layers(Rules):
    """Compares the layers of one trace, for inputs.py, stored.py and trees.py."""

    def begin(self) -> None:
        trace, model = self._trace, self._model
        self._committed = self._context.view == "committed"
        self._heads: tuple[Head, ...] = ()  # none of a recording, whose numbers the reference cannot compute
        self._chained = False
        if model.numbers:
            self._heads = reference_heads(self._case.model, trace.header.engine.dtype)[: self._case.num_steps]
            self._own_heads = heads(trace.header, "draft")
            self._chained = RECIPES[self._case.model].chained
        # the slots that the draft's rows lie in: those of the window, where its layers have one
        self._own = "window_" if model.numbers and RECIPES[self._case.model].draft.window(0) else ""
        self._vocabulary = model.vocab_size
        self.parts = model.drafts[: self._case.num_steps]
        self._book = LayerRowStore(self.parts, self._heads)
        self._fed = FedTokens(len(self.parts))
        self._reused: dict[int, list[tuple[list[int], list[int]]]] = {}  # by the number of a prefill record
        self._states = {request.id: LayerState() for request in self._case.requests}
        for number, record in enumerate(self._records):
            if record.stage == "cached":
                self._book.look_up(number, [trace.integers(number, f"{self._own}slots")] * len(self.parts))
            elif record.stage == "copy":
                pairs, restore = pairs_of(trace, number, self._own), bool(record.numbers["restore"])
                self._book.copy(pairs, restore)
                self._fed.copy(pairs, restore)
            elif record.stage in ("prefill", "extend") and (extend := self._work_out(number, record)) is not None:
                self._states[record.request].extends[record.key] = extend

    # -- what must have been computed ------------------------------------------------------------------------------------

    def _work_out(self, number: int, record: Record) -> _Extend | None:
        """None: no token is told behind its rows."""
        replay = self._replays[record.request]
        if record.stage == "prefill":
            rows = range(record.numbers["start"], record.numbers["end"])
        else:
            round = replay.rounds[record.round]
            rows = range(round.committed, round.end)
        known = replay.known[number]
        if not replay.goes_on_behind(rows.stop - 1):
            return None
        tokens = torch.tensor(replay.tokens[: known + 1]).clamp(0, self._vocabulary - 1)
        best = self._trace.integers(number, "proposal")[:: self._case.topk]  # of each layer: the one that goes on
        proposals = [max(0, min(token, self._vocabulary - 1)) for token in best]
        table = self._trace.integers(number, f"{self._own}table")
        if record.stage == "prefill":
            self._reused[number] = self._fed.reused_rows(table, rows.start, tokens.tolist())
        for layer in range(len(self.parts)):
            ids = layer_tokens(tokens, proposals, layer, rows).tolist()
            self._fed.write(record.request, layer, rows, table[rows.start :], ids, known)
        if not self._heads:
            return _Extend(rows, known, tokens, proposals, [])
        hidden = _hidden(replay)
        if self._committed:
            all_rows = draft_extend(
                self._heads, self._chained, tokens, hidden, range(rows.stop), [None] * len(self._heads), proposals
            )
            layers = [_cut(layer, rows) for layer in all_rows]
        else:
            before = self._book.rows(table[: rows.start])
            layers = draft_extend(self._heads, self._chained, tokens, hidden, rows, before, proposals)
        self._book.write([(row, table[row]) for row in rows if row < len(table)], rows, layers)
        self._book.look_up(
            number, [[table[row] for row in self._trace.integers(number, f"{part}_rows")] for part in self.parts]
        )
        return _Extend(rows, known, tokens, proposals, layers)

    def _of_the_end(self, replay: RequestReplay) -> list[DraftRows]:
        """Rows of each layer once x is all committed; the last ones of a layer, which look past it, are left out."""
        state = self._states[replay.name]
        if state.of_the_end is None:
            tokens = torch.tensor(replay.tokens).clamp(0, self._vocabulary - 1)
            count, layers = len(tokens) - 1, len(self._heads)
            nothing = [0] * layers  # drafts of tokens that were never committed: rows that consume them are not judged
            state.of_the_end = draft_extend(
                self._heads, self._chained, tokens, _hidden(replay), range(count), [None] * layers, nothing
            )
        return state.of_the_end

    # -- single forwards -------------------------------------------------------------------------------------------------

    @rule("draft.runner", "3.7", weights="no", also=("draft.extend", "draft.extend_decode"))
    def inputs(self, number: int, record: Record) -> None:
        """The forward of layer k of a multi-layer draft uses layer k's own attention backend and pools."""
        prefills = record.stage == "draft.extend"
        replay, layer, place = self._replay(record), record.layer, self._place(record, layer=record.layer)
        # before everything else: with another layer's pool, the rows of that layer are wrong as well
        place_of_all, used = self._place(record, -1, layer=layer), [record.numbers.get(name, -1) for name in _USED]
        name = f"layer whose {', '.join(_USED)} is used, entry"
        self._compare.integers(place_of_all, "draft.runner", [layer] * len(_USED), used, name, 0)
        boundary = ("prefill", record.step) if prefills else ("extend", 0)
        key = Key(record.request, record.round, *boundary, attempt=record.attempt)
        extend = self._states[record.request].extends.get(key)
        if extend is None:  # the run ended before anybody saw what was proposed: tokens that are known, and positions
            round = None if prefills else self._round(record)
            rows = self._context.chunk(number, record) if round is None else range(round.committed, round.end)
            shown = replay.tokens[rows.start + 1 + layer : rows.stop + 1 + layer]
            ids = self._trace.integers(number, "input_ids")
            self._compare.integers(place, "draft.input_ids", shown, ids[: len(shown)], "row", rows.start)
            return
        rows = extend.rows
        expected = layer_tokens(extend.tokens, extend.proposals, layer, rows).tolist()
        why = self._why(replay, extend, layer) if prefills else ""
        ids, positions = self._trace.integers(number, "input_ids"), self._trace.integers(number, "positions")
        self._compare.integers(place, "draft.input_ids", expected, ids, "row", rows.start, why)
        self._compare.integers(place, "draft.positions", list(rows), positions, "row", rows.start)
        if not extend.layers:
            return
        of_target = replay.target.hidden[rows.start : rows.stop]
        below = extend.layers[layer - 1].hidden.numpy() if self._chained and layer else of_target
        hidden = self._trace.array(number, "hidden_in")
        self._compare.floats(place, "draft.hidden_in", below, hidden, lambda n: f"row {rows[n]}")

    @staticmethod
    def _why(replay: RequestReplay, extend: _Extend, layer: int) -> str:
        stop, prompt = extend.rows.stop, len(replay.prompt)
        if stop >= prompt:
            return ""
        first = max(extend.rows.start, stop - 1 - layer)
        rows = f"row {stop - 1}" if first == stop - 1 else f"rows {first} to {stop - 1}"
        tokens = f"x[{first + 1 + layer}]" if first == stop - 1 else f"x[{first + 1 + layer}] to x[{stop + layer}]"
        text = f"The chunk ends at {stop} and is not the last: its tail {rows} must consume {tokens} of the prompt"
        if stop + layer > extend.known:
            text += f", which ends at {extend.known + 1}: past it, the drafts of the layers below"
        return text + "."

    # -- when an extend is over ------------------------------------------------------------------------------------------

    def check_extend(self, number: int, record: Record) -> None:
        """The rows that were taken over, the stored rows of every layer, and what each proposes."""
        state = self._states[record.request]
        for layer, (expected, consumed) in enumerate(
            self._reused.get(number, ())
        ):  # of the prefix cache, or of an earlier chunk
            place, rows = self._place(record, layer=layer), "token consumed by what was there already, row"
            self._compare.integers(place, "draft.kv", expected, consumed, rows, 0)
        extend = state.extends.get(record.key)
        if extend is None:  # no token is told behind its rows
            return
        for layer, part in enumerate(self.parts if extend.layers else ()):
            place = self._place(record, layer=layer)
            self._check_stored_rows(number, place, part, extend)
        if record.stage == "prefill" and not record.numbers["final"]:
            return  # what is proposed behind a chunk in between is of no use but to the layers above, which were looked at
        proposed, topk = self._trace.integers(number, "proposal"), self._case.topk
        state.proposed = proposed
        if extend.layers:
            state.proposed_from = torch.cat([rows.logits[-1:] for rows in extend.layers]).numpy()
        if self._case.draws_drafts(record.request):
            self._compare.not_seen(("draft.proposal",), len(self.parts))  # by which coins; sampling.py has what from
            return
        for layer, computed in enumerate(extend.layers):
            place, own = self._place(record, layer=layer, output=True), proposed[layer * topk : (layer + 1) * topk]

            def name(_: int, rank: int, layer: int = layer) -> str:
                return f"d[{layer + 1}]" if topk == 1 else f"d[{layer + 1}], choice {rank}"

            self._compare.choices(place, "draft.proposal", computed.logits[-1:].numpy(), [own], name)

    def _check_stored_rows(self, number: int, place: Place, part: str, extend: _Extend) -> None:
        at, stored = self._rows(number, part)
        if not self._committed:
            self._compare_with_the_book(number, place, part, stored, lambda n: f"row {at[n]}")
            return
        state = self._states[place.record.request]
        for n, row in enumerate(at):
            state.recorded[part, row] = stored[n]
        # rows whose token is committed by now: those that were written, and those that were provisional until now
        due = [row for row in range(extend.known) if not is_provisional(row, place.layer, extend.known)]
        since = state.compared.get(part, 0)
        fresh = [row for row in due if (row >= since or row in at) and (part, row) in state.recorded]
        state.compared[part] = len(due)
        self._pure_rows(place, part, fresh, [state.recorded[part, row] for row in fresh], "row")

    def _rows(self, number: int, part: str) -> tuple[list[int], Array]:
        stored = self._trace.array(number, f"{part}_kv")
        at = self._trace.integers(number, f"{part}_rows")
        if len(at) != stored.shape[0]:
            raise ValueError(f"{len(at)} positions of {len(stored)} rows of {part}")
        return at, stored

    def _compare_with_the_book(self, number: int, place: Place, part: str, stored: Array, name: Callable[[int], str]) -> None:
        booked = self._book.of_record[number, part]
        gone = (stored == GONE).all((1, 2, 3, 4)).tolist()  # out of the window: nothing is there
        unknown = [n for n, row in enumerate(booked) if row is None and not gone[n]]
        if unknown and self._compare.on("draft.kv"):
            self._compare.report(place, "draft.kv", name(unknown[0]), "no row: its slot was never written", "a row")
        known = [n for n, row in enumerate(booked) if row is not None]
        if known:
            expected = torch.stack([torch.stack(row) for row in booked if row is not None])[
                ..., self._own_heads, :
            ]  # [n, 2, L, G, D]
            self._compare.stored_rows(place, "draft.kv", expected.numpy(), stored[known], lambda n: name(known[n]))
        else:
            self._compare.on("draft.kv")

    def _pure_rows(self, place: Place, part: str, at: list[int], stored: list[Array], name: str) -> None:
        layer = self.parts.index(part)
        rows = self._of_the_end(self._replays[place.record.request])[layer]
        if at:
            expected = stored_rows(rows.keys[:, at], rows.values[:, at])[..., self._own_heads, :]
            self._compare.stored_rows(place, "draft.kv", expected, np.stack(stored), lambda n: f"{name} {at[n]}")

    def cached(self, number: int, record: Record) -> None:
        replay, slots = self._replays[record.request], self._trace.integers(number, "slots")
        for layer, part in enumerate(self.parts):
            place = Place(record, "finished", layer=layer)
            stored = self._trace.array(number, f"{part}_kv")
            if not self._committed:
                self._compare_with_the_book(number, place, part, stored, lambda n: f"cached row {n}")
            else:
                at = [row for row in range(len(slots)) if not is_provisional(row, layer, len(replay.tokens) - 1)]
                self._pure_rows(place, part, at, [stored[row] for row in at], "cached row")

    def proposed_from(self, request: str) -> Array:
        """The logits that the layers' last extend proposed from [S, V]."""
        logits = self._states[request].proposed_from
        if logits is None:
            raise ValueError(f"nothing was proposed for request {request} before it was verified")
        return logits

    # -- draft() ---------------------------------------------------------------------------------------------------------

    def check_draft(self, place: Place, round: Round) -> None:
        """draft() runs no forward: its tokens are those that the layers proposed."""
        proposed = self._states[place.record.request].proposed
        if proposed is not None:  # candidate n is the n-th of all that was proposed, layer by layer
            expected = [proposed[node] if 0 <= node < len(proposed) else -1 for node in round.selected]
            self._compare.integers(place, "draft.proposal", expected, round.drafted, "token of node", 1)


# What a forward is seen to use, of the layer's own runner.
_USED = ("attention", "kv_pool", "req_pool")


def _hidden(replay: RequestReplay) -> Tensor:
    """h[0..T-2] of a request."""
    return torch.from_numpy(replay.target.hidden)


def _cut(layer: DraftRows, rows: range) -> DraftRows:
    at = slice(rows.start, rows.stop)
    return DraftRows(layer.hidden[at], layer.logits[at], layer.keys[:, at], layer.values[:, at])
