"""The draft of several layers (MTP): every `draft.*` rule, layer by layer. Called by rules.py.

What each extend must have computed is worked out in the order in which the extends ran, since a row that was fed a draft is
never fed again by a worker that does not repair it: the *book* holds, for each layer and slot, the row that was last fed to it.
In the view `last_fed` the rows of an extend attend to those; in the view `committed` to what they should be by now, and a
stored row is wrong as soon as its token is committed and it is not that token's (DESIGN 3.7, reference/mtp.py).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from eagletwin.harness.case import Case
from eagletwin.harness.models.recipes import RECIPES
from eagletwin.harness.slot_runs import Array
from eagletwin.harness.trace import Record, Trace
from eagletwin.reference.eagle import DraftRows, Head
from eagletwin.reference.mtp import consumed, draft_extend, is_provisional

from .compare import Compare, Phase, Place
from .ranks import heads
from .story import Round, Story, recorded_rows, reference_heads, stored_rows

StoredView = Literal["last_fed", "committed"]


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


class Layers:
    """Compares the layers of one trace. `chunk(number, record)` names the rows of a prefill forward."""

    def __init__(
        self, trace: Trace, stories: dict[str, Story], compare: Compare, view: StoredView, chunk: Callable[[int, Record], range]
    ) -> None:
        self._trace, self._stories, self._compare, self._view, self._chunk = trace, stories, compare, view, chunk
        self._case: Case = trace.header.case
        recipe = RECIPES[self._case.model]
        self._heads: tuple[Head, ...] = reference_heads(self._case.model, trace.header.engine.dtype)[: self._case.num_steps]
        self._mine = heads(trace.header, "draft")
        self._chained, self._vocabulary = recipe.chained, recipe.target.vocab_size
        self.parts = recipe.drafts[: self._case.num_steps]
        self._book: list[dict[int, tuple[Tensor, Tensor]]] = [{} for _ in self._heads]  # slot -> keys, values [L, G, D]
        self._booked: dict[tuple[int, str], list[tuple[Tensor, Tensor] | None]] = {}  # record, part -> its rows, as booked then
        self._pure: dict[str, list[DraftRows]] = {}  # request -> rows of each layer, as they are once all is committed
        self._last: dict[tuple[str, str, int], Array] = {}  # request, part, row -> as it was last recorded [2, L, G, D]
        self._due: dict[tuple[str, str], int] = {}  # request, part -> rows below this were compared since they are due
        self._proposed: dict[str, list[int]] = {}  # request -> what its last extend proposed
        self._from: dict[str, Array] = {}  # request -> the logits that it proposed from [S, V]
        self._extends: dict[tuple[str, int, str, int, int], _Extend] = {}
        for number, record in enumerate(trace.header.records):
            if record.stage == "cached":
                self._look_up(number, [trace.integers(number, "slots")] * len(self.parts))
            elif record.stage in ("prefill", "extend"):
                self._extends[record.request, record.round, record.stage, record.step, record.attempt] = self._work_out(
                    number, record
                )

    # -- what must have been computed ------------------------------------------------------------------------------------

    def _work_out(self, number: int, record: Record) -> _Extend:
        story = self._stories[record.request]
        if record.stage == "prefill":
            rows = range(record.numbers["start"], record.numbers["end"])
        else:
            round = story.rounds[record.round]
            rows = range(round.committed, round.end)
        known = story.known[number]
        tokens, hidden = torch.tensor(story.tokens[: known + 1]).clamp(0, self._vocabulary - 1), _hidden(story)
        best = self._trace.integers(number, "proposal")[:: self._case.topk]  # of each layer: the one that goes on
        proposals = [max(0, min(token, self._vocabulary - 1)) for token in best]
        if self._view == "committed":
            all_rows = draft_extend(
                self._heads, self._chained, tokens, hidden, range(rows.stop), [None] * len(self._heads), proposals
            )
            layers = [_cut(layer, rows) for layer in all_rows]
        else:
            before = self._before(self._trace.integers(number, "table")[: rows.start])
            layers = draft_extend(self._heads, self._chained, tokens, hidden, rows, before, proposals)
        table = self._trace.integers(number, "table")
        for book, layer in zip(self._book, layers, strict=True):
            for n, row in enumerate(rows):
                if row < len(table):
                    book[table[row]] = layer.keys[:, n], layer.values[:, n]
        self._look_up(number, [[table[row] for row in self._trace.integers(number, f"{part}_rows")] for part in self.parts])
        return _Extend(rows, known, tokens, proposals, layers)

    def _look_up(self, number: int, slots: list[list[int]]) -> None:
        """What the book says now of the slots of each layer; they are written again later, for others."""
        for part, book, mine in zip(self.parts, self._book, slots, strict=True):
            self._booked[number, part] = [book.get(slot) for slot in mine]

    def _before(self, slots: list[int]) -> list[DraftRows | None]:
        """The stored rows in these slots, of each layer. One that nobody ever wrote is of zeros: reading it is reported."""
        if not slots:
            return [None] * len(self._heads)
        found: list[DraftRows | None] = []
        for book, head in zip(self._book, self._heads, strict=True):
            shape = head.shape
            nothing = torch.zeros(shape.num_layers, shape.num_kv_heads, shape.head_dim, dtype=torch.float64)
            rows = [book.get(slot, (nothing, nothing)) for slot in slots]
            keys, values = (torch.stack(parts, 1) for parts in zip(*rows, strict=True))
            found.append(DraftRows(torch.empty(0), torch.empty(0), keys, values))
        return found

    def _of_the_end(self, story: Story) -> list[DraftRows]:
        """Rows of each layer once x is all committed; the last ones of a layer, which look past it, are left out."""
        found = self._pure.get(story.name)
        if found is None:
            tokens = torch.tensor(story.tokens).clamp(0, self._vocabulary - 1)
            count, layers = len(tokens) - 1, len(self._heads)
            nothing = [0] * layers  # drafts of tokens that were never committed: rows that consume them are nobody's
            found = draft_extend(self._heads, self._chained, tokens, _hidden(story), range(count), [None] * layers, nothing)
            self._pure[story.name] = found
        return found

    # -- single forwards -------------------------------------------------------------------------------------------------

    def forward(self, number: int, record: Record, phase: Phase, boundary: str, step: int, round: Round | None) -> Place:
        """The inputs of one layer's forward. Returns its place."""
        story, layer, place = self._stories[record.request], record.layer, Place(record, phase, layer=record.layer)
        # before everything else: with another layer's pool, the rows of that layer are wrong as well
        self._compare.integers(
            Place(record, phase, step=-1, layer=layer),
            "draft.runner",
            [layer] * len(_USED),
            [record.numbers.get(name, -1) for name in _USED],
            f"layer whose {', '.join(_USED)} is used, entry",
            0,
        )
        extend = self._extends.get((record.request, record.round, boundary, step, record.attempt))
        if extend is None:  # the run ended before anybody saw what was proposed: tokens that are known, and positions
            rows = range(round.committed, round.end) if round is not None else self._chunk(number, record)
            shown = story.tokens[rows.start + 1 + layer : rows.stop + 1 + layer]
            ids = self._trace.integers(number, "input_ids")
            self._compare.integers(place, "draft.input_ids", shown, ids[: len(shown)], "row", rows.start)
            return place
        rows = extend.rows
        expected = consumed(extend.tokens, extend.proposals, layer, rows).tolist()
        why = self._why(story, extend, layer) if boundary == "prefill" else ""
        ids, positions = self._trace.integers(number, "input_ids"), self._trace.integers(number, "positions")
        self._compare.integers(place, "draft.input_ids", expected, ids, "row", rows.start, why)
        self._compare.integers(place, "draft.positions", list(rows), positions, "row", rows.start)
        assert story.target is not None
        of_target = story.target.hidden[rows.start : rows.stop]
        below = extend.layers[layer - 1].hidden.numpy() if self._chained and layer else of_target
        hidden = self._trace.array(number, "hidden_in")
        self._compare.floats(place, "draft.hidden_in", below, hidden, lambda n: f"row {rows[n]}")
        return place

    @staticmethod
    def _why(story: Story, extend: _Extend, layer: int) -> str:
        stop, prompt = extend.rows.stop, len(story.prompt)
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

    def extended(self, number: int, record: Record, phase: Phase) -> None:
        """The stored rows of every layer, and what each proposes."""
        extend = self._extends[record.request, record.round, record.stage, record.step, record.attempt]
        for layer, part in enumerate(self.parts):
            place = Place(record, phase, layer=layer)
            self._stored(number, place, part, extend)
        if record.stage == "prefill" and not record.numbers["final"]:
            return  # what is proposed behind a chunk in between is of no use but to the layers above, which were looked at
        proposed, topk = self._trace.integers(number, "proposal"), self._case.topk
        self._proposed[record.request] = proposed
        if extend.layers:
            self._from[record.request] = torch.cat([rows.logits[-1:] for rows in extend.layers]).numpy()
        if self._case.draws_drafts(record.request):
            self._compare.not_seen(("draft.proposal",), len(self.parts))  # by which coins; sampling.py has what from
            return
        for layer, rows in enumerate(extend.layers):
            place, mine = Place(record, phase, layer=layer, output=True), proposed[layer * topk : (layer + 1) * topk]

            def name(_: int, rank: int, layer: int = layer) -> str:
                return f"d[{layer + 1}]" if topk == 1 else f"d[{layer + 1}], choice {rank}"

            self._compare.choices(place, "draft.proposal", rows.logits[-1:].numpy(), [mine], name)

    def _stored(self, number: int, place: Place, part: str, extend: _Extend) -> None:
        at, stored = self._rows(number, part)
        request = place.record.request
        if self._view == "last_fed":
            self._compare_with_the_book(number, place, part, stored, lambda n: f"row {at[n]}")
            return
        for n, row in enumerate(at):
            self._last[request, part, row] = stored[n]
        # rows whose token is committed by now: those that were written, and those that were provisional until now
        due = [row for row in range(extend.known) if not is_provisional(row, place.layer, extend.known)]
        since = self._due.get((request, part), 0)
        fresh = [row for row in due if (row >= since or row in at) and (request, part, row) in self._last]
        self._due[request, part] = len(due)
        self._pure_rows(place, part, fresh, [self._last[request, part, row] for row in fresh], "row")

    def _rows(self, number: int, part: str) -> tuple[list[int], Array]:
        stored = recorded_rows(self._trace, number, part)
        at = self._trace.integers(number, f"{part}_rows")
        if len(at) != stored.shape[0]:
            raise ValueError(f"{len(at)} positions of {len(stored)} rows of {part}")
        return at, stored

    def _compare_with_the_book(self, number: int, place: Place, part: str, stored: Array, name: Callable[[int], str]) -> None:
        booked = self._booked[number, part]
        unknown = [n for n, row in enumerate(booked) if row is None]
        if unknown and self._compare.on("draft.kv"):
            self._compare.report(place, "draft.kv", name(unknown[0]), "no row: its slot was never written", "a row")
        known = [n for n, row in enumerate(booked) if row is not None]
        if known:
            expected = torch.stack([torch.stack(row) for row in booked if row is not None])[
                ..., self._mine, :
            ]  # [n, 2, L, G, D]
            self._compare.floats(place, "draft.kv", expected.numpy(), stored[known], lambda n: name(known[n]))
        else:
            self._compare.on("draft.kv")

    def _pure_rows(self, place: Place, part: str, at: list[int], stored: list[Array], name: str) -> None:
        layer = self.parts.index(part)
        rows = self._of_the_end(self._stories[place.record.request])[layer]
        if at:
            expected = stored_rows(rows.keys[:, at], rows.values[:, at])[..., self._mine, :]
            self._compare.floats(place, "draft.kv", expected, np.stack(stored), lambda n: f"{name} {at[n]}")

    def cached(self, number: int, record: Record) -> None:
        """Rows that the prefix cache keeps."""
        story, slots = self._stories[record.request], self._trace.integers(number, "slots")
        for layer, part in enumerate(self.parts):
            place = Place(record, "finished", layer=layer)
            stored = recorded_rows(self._trace, number, part)
            if self._view == "last_fed":
                self._compare_with_the_book(number, place, part, stored, lambda n: f"cached row {n}")
            else:
                at = [row for row in range(len(slots)) if not is_provisional(row, layer, len(story.tokens) - 1)]
                self._pure_rows(place, part, at, [stored[row] for row in at], "cached row")

    def proposed_from(self, request: str) -> Array:
        """The logits that the layers' last extend proposed from [S, V]."""
        return self._from[request]

    # -- draft() ---------------------------------------------------------------------------------------------------------

    def drafted(self, place: Place, round: Round) -> None:
        """draft() runs no forward: its tokens are those that the layers proposed."""
        proposed = self._proposed.get(place.record.request)
        if proposed is not None:  # candidate n is the n-th of all that was proposed, layer by layer
            expected = [proposed[node] if 0 <= node < len(proposed) else -1 for node in round.selected]
            self._compare.integers(place, "draft.proposal", expected, round.drafted, "token of node", 1)


# What a forward is seen to use, of the layer's own runner.
_USED = ("attention", "kv_pool", "req_pool")


def _hidden(story: Story) -> Tensor:
    """h[0..T-2] of a request."""
    assert story.target is not None
    return torch.from_numpy(story.target.hidden)


def _cut(layer: DraftRows, rows: range) -> DraftRows:
    at = slice(rows.start, rows.stop)
    return DraftRows(layer.hidden[at], layer.logits[at], layer.keys[:, at], layer.values[:, at])
