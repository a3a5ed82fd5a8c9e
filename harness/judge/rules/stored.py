"""The rows that the pools hold: `target.kv`, `draft.kv`, and those of `commit.path`; and `target.compressor`."""

import numpy as np

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.records import Record
from eagletwin.harness.families import RECIPES

from ..compare import Phase, Place
from ..context import Rules
from . import rule, stages
from .multi_layer_draft import Layers
from .selection import Selection

_OF_TARGET: dict[str, Phase] = {"prefill": "target.extend", "extend": "target.verify"}  # the phase of its forward
_NEVER = "no row: its token was never committed"


class PoolRows(Rules):
    # KV rows that were written, or written over, since the last boundary.

    @rule("target.kv", "3.6", weights="yes", also=("cached",))
    @stages("prefill", "extend")
    def target(self, number: int, record: Record) -> None:
        """The target's stored row i is a function of x[0..i] alone, for every committed position."""
        if self._model.numbers and self._has_rows(record):
            self._stored_in("target", number, Place(record, _OF_TARGET[record.stage]), self._replay(record).stored["target"])

    @rule(
        "draft.kv",
        "3.1",
        weights="in part",
        also=("cached",),
        of_layers=(
            "3.7",
            "Layer k's stored row i is the row of the token that the layer was last fed there: x[i+1+k], or what stood for it"
            " before it was known. With `--view committed` it is always the row of x[i+1+k]. A row that a request takes over "
            "from another consumed this request's token, as far as the keys of the prefix cache tell the two apart.",
        ),
        of_plain=("3.10", "The draft's stored row i is a function of x[0..i] alone, for every committed position."),
    )
    @stages("prefill", "extend")
    def draft(self, number: int, record: Record) -> None:
        """The draft's stored row i is a function of x[0..i+1] alone, for every committed position."""
        numbers = self._model.numbers
        if numbers and not self._has_rows(record):
            return
        if self._model.mtp_layers:
            self._context.of(Layers).check_extend(number, record)
        elif numbers and self._model.memory:
            self._stored_in("draft", number, self._place(record), self._replay(record).stored["draft"])

    def _has_rows(self, record: Record) -> bool:
        return record.stage == "extend" or self._has_output(record)

    def _stored_in(self, part: str, number: int, place: Place, reference: Array) -> None:
        at = self._trace.array(number, f"{part}_rows")
        stored = self._trace.array(number, f"{part}_kv")
        if len(at) != len(stored) or (at < 0).any():
            raise ValueError(f"{len(at)} positions of {len(stored)} rows of the {part}, the smallest {at.min(initial=0)}")
        known = at < len(reference)  # a row past everything that was committed has no reference
        if not known.all():
            if self._compare.on(f"{part}.kv"):
                self._compare.report(place, f"{part}.kv", f"row {int(at[~known][0])}", _NEVER, "a row")
            at, stored = at[known], stored[known]
        if part == "target" and place.record.stage == "extend" and self._case.topk > 1:
            moved = at >= self._round(place.record).committed  # rows of the accepted path, wherever verify wrote them
            self._rows(place, "commit.path", reference, at[moved], stored[moved])
            at, stored = at[~moved], stored[~moved]
        by_layer = self._model.chosen or self._model.ratios
        if not by_layer:
            self._rows(place, f"{part}.kv", reference, at, stored)
        for layer in range(reference.shape[2]) if by_layer else ():  # rows choose by their own keys, and are of what is kept
            of_layer = slice(layer, layer + 1)
            if self._model.ratios and part == "target":
                self._context.of(Compressors).check(number, place, layer)
            self._rows(place, f"{part}.kv", reference[:, :, of_layer], at, stored[:, :, of_layer])
            if self._model.chosen:
                self._context.of(Selection).check(part, place, layer)

    def _rows(self, place: Place, rule: str, reference: Array, at: Array, stored: Array) -> None:
        self._compare.stored_rows(place, rule, reference[at], stored, lambda n: f"row {int(at[n])}")

    @stages("cached")
    def cached(self, number: int, record: Record) -> None:
        """Rows that the prefix cache keeps must be what a request that reuses them would have computed."""
        replay, place, count = self._replay(record), self._place(record), len(self._trace.array(number, "slots"))
        for part, reference in replay.stored.items():
            stored = self._trace.array(number, f"{part}_kv")
            known = min(count, len(reference))
            # Keys of single tokens end with the last token, whose row of the target another request may have computed: it is
            # compared there. EAGLE's keys, pairs, end one before it.
            others = part == "target" and not self._model.states and count == len(replay.tokens)
            if known < count and not others and self._compare.on(f"{part}.kv"):
                self._compare.report(place, f"{part}.kv", f"cached row {known}", _NEVER, "a row")
            self._compare.stored_rows(place, f"{part}.kv", reference[:known], stored[:known], lambda n: f"cached row {n}")
        if replay.earlier is not None:
            self._cached_in_earlier_stages(record, replay.earlier)
        if self._model.mtp_layers:
            self._context.of(Layers).cached(number, record)

    def _cached_in_earlier_stages(self, record: Record, reference: Array) -> None:
        """The same of a pipeline's earlier stages: what they keep there, nothing that the last one computed need have read."""
        for rank, earlier in enumerate(self._trace.earlier, 1):
            at = next((n for n, one in enumerate(earlier.header.records) if one.key == record.key), None)
            if at is None:  # which `ranks.agree` says
                continue
            stored, first = earlier.array(at, "target_kv"), earlier.header.engine.first_layer
            known = min(len(stored), len(reference))

            def name(n: int, rank: int = rank) -> str:
                return f"cached row {n} of rank {rank}"

            expected = reference[:known, :, first : first + stored.shape[2]]
            self._compare.stored_rows(Place(record, "finished"), "target.kv", expected, stored[:known], name)


class Compressors(Rules):
    """Of each layer with compressed rows, after a prefill and after a round."""

    @rule(
        "target.compressor",
        "3.6",
        weights="yes",
        sentence=(
            "Of each row that a later compressed row is made of, the layer's compressor keeps what follows from x[0..i] alone, "
            "whichever drafts were rejected there before."
        ),
        also=("prefill", "extend"),
    )
    def check(self, number: int, place: Place, layer: int) -> None:
        """Of a layer, at a boundary record: before the rows that are made of it."""
        record, shape = place.record, RECIPES[self._case.model].target
        ratio = self._model.ratios[layer]
        if shape.compressed is None or not ratio:
            return
        end = record.numbers["end"] if record.stage == "prefill" else self._round(record).end
        first = max(0, end - end % ratio - (ratio if ratio == 4 else 0))
        kept = self._trace.array(number, f"compressor{layer}_state")
        expected = self._replay(record).compressors[layer][first:end]
        if kept.shape != expected.shape:
            if self._compare.on("target.compressor"):
                self._compare.report(place, "target.compressor", f"layer {layer}", expected.shape, kept.shape)
            return
        begin = 0
        for name, width in shape.compressed.kept(ratio, shape.head_dim):
            part, begin = slice(begin, begin + width), begin + width

            def named(n: int, name: str = name) -> str:
                return f"row {first + n}, layer {layer}, {name}"

            self._compare.floats(place, "target.compressor", expected[:, part], np.ascontiguousarray(kept[:, part]), named)
