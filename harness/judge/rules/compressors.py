"""What compressors keep of rows whose groups have not ended: `target.compressor`."""

import numpy as np

from eagletwin.harness.families import RECIPES

from ..compare import Place
from ..context import Rules
from . import rule


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
