"""The tables of a page: the rows, masks or slots around the first wrong number, with their neighbours."""

import re
from collections.abc import Sequence

import numpy as np

from eagletwin.harness.core.records import Key
from eagletwin.harness.judge.bounds import FLOAT32, bounds_of
from eagletwin.harness.judge.compare import Exhibit
from eagletwin.harness.judge.model import model_of
from eagletwin.harness.judge.provenance import DivergenceContext, Provenance, slot_owners, tables_at
from eagletwin.harness.judge.trees import parents_of
from eagletwin.reference.tree import ancestor_mask

from .document import Table, TableCell, TableRow

_AROUND = 5  # neighbours on each side of what is wrong
_MOST = 60  # rows of a table
_MOST_COLUMNS = 24  # of req_to_token
_MOST_NODES = 64  # of a mask that is shown whole
_RANKED = 6  # of the best logits


def tables_of(context: DivergenceContext, owners: Provenance | None) -> tuple[Table, ...]:
    """Tables around the first divergence; none where it has no numbers but those that it names."""
    exhibit, first = context.exhibit, context.divergences[0]
    if exhibit is None:
        return ()
    whose = owners.by_row if owners is not None else {}
    if first.rule == "tree.mask":
        masks = _mask(context)
        if masks is not None:
            return (masks, _integers(exhibit, whose, {}))
    if exhibit.logits is not None:
        return (_integers(exhibit, whose, {}), _choice(exhibit))
    if isinstance(exhibit.actual, list):
        if first.rule == "draft.slots":
            return (_integers(exhibit, whose, slot_owners(context)), *_slots(context, exhibit))
        return (_integers(exhibit, whose, {}),)
    return (_rows(context, exhibit, whose), _elements(exhibit))


def _shown(wrong: Sequence[int], count: int) -> list[int]:
    """Rows around the wrong ones, the first ones first if they are too many."""
    near = sorted({n for at in wrong[:_MOST] for n in range(at - _AROUND, at + _AROUND + 1) if 0 <= n < count})
    return near[:_MOST]


def _note(shown: int, count: int, wrong: int) -> str:
    left = f"{shown} of {count} rows are shown" if shown < count else ""
    return f"{left}{'; ' if left else ''}{wrong} of {count} differ."


def _integers(exhibit: Exhibit, whose: dict[int, str], slots: dict[int, str]) -> Table:
    assert isinstance(exhibit.actual, list)
    at, wrong = _shown(exhibit.wrong, len(exhibit.actual)), {*exhibit.wrong}
    named = bool(slots) or any(n in whose for n in at)
    rows = []
    for n in at:
        expected, actual, bad = str(exhibit.expected[n]), str(exhibit.actual[n]), n in wrong
        cells = [TableCell(exhibit.name(n)), TableCell(expected), TableCell(actual, "wrong" if bad else "right")]
        if named:
            cells.append(TableCell(whose.get(n, "") or slots.get(int(exhibit.actual[n]), "")))
        rows.append(TableRow(tuple(cells), "wrong" if bad else ""))
    return Table(
        caption="Around the first wrong number",
        header=("", "expected", "actual", *(["whose the actual one is"] if named else [])),
        rows=tuple(rows),
        note=_note(len(at), len(exhibit.actual), len(exhibit.wrong)),
    )


def _choice(exhibit: Exhibit) -> Table:
    """The best tokens by the reference's logits, and what was chosen."""
    assert exhibit.logits is not None
    logits, expected, actual = exhibit.logits, list(map(int, exhibit.expected)), list(map(int, exhibit.actual))
    best = np.argsort(-logits, kind="stable")[: _RANKED + len(expected)].tolist()
    tokens = best + [token for token in actual if token not in best and 0 <= token < len(logits)]
    rows = []
    for token in tokens:
        place, should = (f"place {some.index(token)}" if token in some else "" for some in (actual, expected))
        bad = place != should
        rows.append(
            TableRow(
                (
                    TableCell(str(token)),
                    TableCell(f"{float(logits[token]):.6g}"),
                    TableCell(should),
                    TableCell(place, "wrong" if bad else ""),
                ),
                "wrong" if bad else "",
            )
        )
    return Table(
        caption="The reference's logits of this row, the largest first",
        header=("token", "logit", "must be", "was chosen as"),
        rows=tuple(rows),
    )


def _rows(context: DivergenceContext, exhibit: Exhibit, whose: dict[int, str]) -> Table:
    """Rows of floats by their largest error, as a share of the bound."""
    assert not isinstance(exhibit.actual, list)
    assert not isinstance(exhibit.expected, list)
    header = context.trace.header
    bounds = bounds_of(header.engine.dtype, header.case.model) if model_of(header).numbers else FLOAT32
    at, wrong, parts = _shown(exhibit.wrong, len(exhibit.actual)), {*exhibit.wrong}, exhibit.parts
    expected, actual = exhibit.expected[at], exhibit.actual[at].astype(np.float64)
    scale = None if exhibit.scale is None else exhibit.scale[at]
    share = bounds.error_of(expected.reshape(len(at) * parts, -1), actual.reshape(len(at) * parts, -1), scale)
    share = share.reshape(-1, parts).max(1)
    error = np.nan_to_num(np.abs(actual - expected), nan=np.inf).argmax(1)
    rows = []
    for n, one in enumerate(at):
        bad, element = one in wrong, int(error[n])
        cells = (
            TableCell(exhibit.name(one)),
            TableCell(f"{float(share[n]):.3g} times the bound", "wrong" if bad else "right"),
            TableCell(_element(exhibit, element)),
            TableCell(f"{float(expected[n, element]):.6g}"),
            TableCell(f"{float(actual[n, element]):.6g}"),
            TableCell(whose.get(one, "")),
        )
        rows.append(TableRow(cells, "wrong" if bad else ""))
    return Table(
        caption="Rows around the first wrong one",
        header=("", "largest error", "in", "expected", "actual", "whose the actual row is"),
        rows=tuple(rows),
        note=_note(len(at), len(exhibit.actual), len(exhibit.wrong)),
    )


def _elements(exhibit: Exhibit) -> Table:
    """Numbers of the first wrong row, around the one that is farthest off."""
    assert not isinstance(exhibit.actual, list)
    assert not isinstance(exhibit.expected, list)
    row = exhibit.wrong[0]
    expected, actual = exhibit.expected[row], exhibit.actual[row].astype(np.float64)
    rows = []
    for n in _shown([exhibit.element], len(actual)):
        off = abs(float(actual[n]) - float(expected[n]))
        farthest = "wrong" if n == exhibit.element else ""
        cells = (
            TableCell(_element(exhibit, n)),
            TableCell(f"{float(expected[n]):.6g}"),
            TableCell(f"{float(actual[n]):.6g}", farthest),
            TableCell(f"{off:.3g}"),
        )
        rows.append(TableRow(cells, farthest))
    return Table(
        caption=f"The numbers of {exhibit.name(row)} around the one that is farthest off",
        header=("", "expected", "actual", "difference"),
        rows=tuple(rows),
    )


def _element(exhibit: Exhibit, element: int) -> str:
    """A number of a row; of a stored row, whether it is of its keys or its values, and of which layer."""
    if exhibit.parts == 1:
        return f"element {element}"
    assert not isinstance(exhibit.actual, list)
    part, inside = divmod(element, exhibit.actual.shape[1] // exhibit.parts)
    layers = exhibit.parts // 2
    layer = f" of layer {part % layers}" if layers > 1 else ""
    return f"{'keys' if part < layers else 'values'}{layer}, element {inside}"


def _slots(context: DivergenceContext, exhibit: Exhibit) -> tuple[Table, ...]:
    """The requests' rows of req_to_token around the columns that differ, as they were when the first number went wrong."""
    tables = tables_at(context)
    columns = [int(found[1]) for n in exhibit.wrong[:_MOST] if (found := re.search(r"column (\d+)", exhibit.name(n)))]
    most = max((len(table) for table in tables.values()), default=0)
    if not columns or not most:
        return ()
    wrong = {int(exhibit.actual[n]) for n in exhibit.wrong}
    at = _shown(columns, max(most, max(columns) + 1))[:_MOST_COLUMNS]
    rows = []
    for request, table in tables.items():
        slots = [table[column] if column < len(table) else None for column in at]
        cells = tuple(TableCell("" if slot is None else str(slot), "wrong" if slot in wrong else "") for slot in slots)
        rows.append(TableRow((TableCell(request), *cells)))
    return (
        Table(
            caption="Rows of req_to_token around it, by request and column",
            header=("request", *map(str, at)),
            rows=tuple(rows),
            note="≠ marks the slots that were written in place of the expected ones, wherever a row names them.",
        ),
    )


def _mask(context: DivergenceContext) -> Table | None:
    """Who sees whom in the whole tree; None where the trace has no mask of this shape."""
    found, trace = context.divergences[0], context.trace
    numbers = {record.key: n for n, record in enumerate(trace.header.records) if "mask" in record.tensors}
    number = numbers.get(Key(found.request, found.round, "draft"))
    replay = context.replays.get(found.request)
    parents = parents_of(trace.header.case, replay.rounds[found.round]) if replay is not None else None
    if number is None or parents is None or len(parents) > _MOST_NODES:
        return None
    exact, mask = ancestor_mask(parents).tolist(), trace.array(number, "mask").tolist()
    if [len(row) for row in mask] != [len(row) for row in exact]:
        return None
    rows = []
    for node, (expected, actual) in enumerate(zip(exact, mask, strict=True)):
        cells = [TableCell(f"node {node}")]
        for must, does in zip(expected, actual, strict=True):
            cells.append(TableCell("●" if must else "·") if must == bool(does) else TableCell("●" if does else "·", "wrong"))
        rows.append(TableRow(tuple(cells), "wrong" if expected != [bool(one) for one in actual] else ""))
    return Table(
        caption="The mask: what each node sees",
        header=("", *map(str, range(len(exact)))),
        rows=tuple(rows),
        note="● is seen, · is not; ≠ marks what must be the other way round.",
        narrow=True,
    )
