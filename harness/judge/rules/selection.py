"""The rows that a row attends to, where an indexer chooses them: `target.selection`, `draft.selection`."""

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.records import Key

from ..compare import Place
from ..context import Rules
from ..experts import committed_rows, is_dense
from . import rule

# The forward that chose for the rows of a boundary record.
_FORWARDS = {
    ("target", "prefill"): "target.extend",
    ("target", "extend"): "target.verify",
    ("draft", "prefill"): "draft.extend",
    ("draft", "extend"): "draft.extend_decode",
}


class Selection(Rules):
    """Of every row of each layer. A choice that another one ties with, within the roundings of scores (bounds.py), is followed
    by the reference (experts.py): what differs here is no tie."""

    @rule(
        "target.selection",
        "3.6",
        weights="yes",
        sentence="Row i of each of the target's layers attends to the rows among 0..i that the layer's indexer scores best.",
        also=("prefill", "extend"),
    )
    @rule(
        "draft.selection",
        "3.1-3.3",
        weights="yes",
        sentence=(
            "Row i of the draft attends to the rows among 0..i that its indexer scores best; the row of draft decode step j "
            "to those among 0..M+j-1, its own and those of earlier steps among them."
        ),
        also=("prefill", "extend", "draft"),
    )
    def check(self, part: str, place: Place, layer: int) -> None:
        """Of the rows that a boundary record says a forward stored."""
        boundary, replay = place.record, self._replay(place.record)
        stage = _FORWARDS[part, boundary.stage]
        step = boundary.step if boundary.stage == "prefill" else 0
        number = self._context.numbers[Key(boundary.request, boundary.round, stage, step, attempt=boundary.attempt)]
        if is_dense(self._trace, number, self._model.chosen):
            return
        forward = self._records[number]
        expected, actual = replay.chosen[part], self._trace.array(number, "chosen")
        rows = [(row, at) for row, at in committed_rows(forward, replay, len(actual)) if row < len(expected)]
        self._compare_rows(part, place, layer, [(row, expected[row], actual[at]) for row, at in rows])

    def check_step(self, place: Place, expected: Array) -> None:
        """Of the rows [k, L, K] of a step of draft decode."""
        record, first = place.record, self._round(place.record).committed
        if "chosen" in record.tensors:  # its steps ran in a graph
            chosen = self._trace.array(self._context.numbers[record.key], "chosen")[place.step - 1 : place.step]
        else:
            number = self._context.numbers[Key(record.request, record.round, "draft.decode", place.step)]
            chosen = self._trace.array(number, "chosen")
        rows = [(first + place.step - 1, *both) for both in zip(expected, chosen, strict=True)]
        for layer in range(expected.shape[1]):
            self._compare_rows("draft", place, layer, rows)

    def _compare_rows(self, part: str, place: Place, layer: int, rows: list[tuple[int, Array, Array]]) -> None:
        """rows: which row each is, and what it attends to in each layer [L, K]: as it should, and by the trace."""
        rule = f"{part}.selection"
        if not self._compare.on(rule):
            return
        if odd := [both for _, *both in rows if both[0].shape != both[1].shape]:
            self._compare.report(place, rule, "shape", *(one.shape for one in odd[0]))
            return
        wrong = [(row, wanted[layer], chosen[layer]) for row, wanted, chosen in rows if (wanted[layer] != chosen[layer]).any()]
        if wrong:
            row, wanted, chosen = wrong[0]
            more = f", and {len(wrong) - 1} more rows" if len(wrong) > 1 else ""
            expected, actual = (f"rows {', '.join(str(at) for at in one.tolist() if at >= 0)}" for one in (wanted, chosen))
            self._compare.report(place, rule, f"row {row}, layer {layer}{more}", expected, actual)
