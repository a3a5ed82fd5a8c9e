"""What compressors keep of rows whose groups have not ended: `target.compressor`."""

import numpy as np

from eagletwin.harness.core.records import Record
from eagletwin.harness.families import RECIPES

from ..compare import Place
from ..context import Rules
from . import rule, stages
from .stored import OF_TARGET


class Compressors(Rules):
    """Of each layer with compressed rows, after a prefill and after a round."""

    @rule("target.compressor", "3.6", weights="yes")
    @stages("prefill", "extend")
    def kept(self, number: int, record: Record) -> None:
        """Of each row that a later compressed row is made of, the compressor keeps what follows from x[0..i] alone."""
        shape = RECIPES[self._case.model].target if self._model.numbers else None
        if shape is None or shape.compressed is None or not (record.stage == "extend" or self._has_output(record)):
            return
        replay, place = self._replay(record), Place(record, OF_TARGET[record.stage])
        end = record.numbers["end"] if record.stage == "prefill" else self._round(record).end
        for layer, ratio in enumerate(shape.compressed.ratios):
            if not ratio:
                continue
            first = max(0, end - end % ratio - (ratio if ratio == 4 else 0))
            kept, expected = self._trace.array(number, f"compressor{layer}_state"), replay.compressors[layer][first:end]
            if kept.shape != expected.shape:
                if self._compare.on("target.compressor"):
                    self._compare.report(place, "target.compressor", f"layer {layer}", expected.shape, kept.shape)
                continue
            begin = 0
            for name, width in shape.compressed.kept(ratio, shape.head_dim):
                part, begin = slice(begin, begin + width), begin + width

                def named(n: int, first: int = first, layer: int = layer, name: str = name) -> str:
                    return f"row {first + n}, layer {layer}, {name}"

                self._compare.floats(place, "target.compressor", expected[:, part], np.ascontiguousarray(kept[:, part]), named)
