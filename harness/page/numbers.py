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

from .document import Table, TableCell, row, table

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
        owner = (whose.get(n, "") or slots.get(int(exhibit.actual[n]), ""),) if named else ()
        said = TableCell(actual, "wrong" if bad else "right")
        rows.append(row(exhibit.name(n), expected, said, *owner, kind="wrong" if bad else ""))
    header = ("", "expected", "actual", *(["whose the actual one is"] if named else []))
    note = _note(len(at), len(exhibit.actual), len(exhibit.wrong))
    return table("Around the first wrong number", header, rows, note=note)


def _choice(exhibit: Exhibit) -> Table:
    """The best tokens by the reference's logits, and what was chosen."""
    assert exhibit.logits is not None
    logits, expected, actual = exhibit.logits, list(map(int, exhibit.expected)), list(map(int, exhibit.actual))
    best = np.argsort(-logits, kind="stable")[: _RANKED + len(expected)].tolist()
    tokens = best + [token for token in actual if token not in best and 0 <= token < len(logits)]
    rows = []
    for token in tokens:
        place, should = (f"place {some.index(token)}" if token in some else "" for some in (actual, expected))
        kind = "wrong" if place != should else ""
        rows.append(row(str(token), f"{float(logits[token]):.6g}", should, TableCell(place, kind), kind=kind))
    header = ("token", "logit", "must be", "was chosen as")
    return table("The reference's logits of this row, the largest first", header, rows)


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
        off = TableCell(f"{float(share[n]):.3g} times the bound", "wrong" if bad else "right")
        numbers = (f"{float(side[n, element]):.6g}" for side in (expected, actual))
        where, owner = _element(exhibit, element), whose.get(one, "")
        rows.append(row(exhibit.name(one), off, where, *numbers, owner, kind="wrong" if bad else ""))
    header_names = ("", "largest error", "in", "expected", "actual", "whose the actual row is")
    note = _note(len(at), len(exhibit.actual), len(exhibit.wrong))
    return table("Rows around the first wrong one", header_names, rows, note=note)


def _elements(exhibit: Exhibit) -> Table:
    """Numbers of the first wrong row, around the one that is farthest off."""
    assert not isinstance(exhibit.actual, list)
    assert not isinstance(exhibit.expected, list)
    first = exhibit.wrong[0]
    expected, actual = exhibit.expected[first], exhibit.actual[first].astype(np.float64)
    rows = []
    for n in _shown([exhibit.element], len(actual)):
        off = abs(float(actual[n]) - float(expected[n]))
        farthest = "wrong" if n == exhibit.element else ""
        said = TableCell(f"{float(actual[n]):.6g}", farthest)
        rows.append(row(_element(exhibit, n), f"{float(expected[n]):.6g}", said, f"{off:.3g}", kind=farthest))
    caption = f"The numbers of {exhibit.name(first)} around the one that is farthest off"
    return table(caption, ("", "expected", "actual", "difference"), rows)


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
    most = max((len(own) for own in tables.values()), default=0)
    if not columns or not most:
        return ()
    wrong = {int(exhibit.actual[n]) for n in exhibit.wrong}
    at = _shown(columns, max(most, max(columns) + 1))[:_MOST_COLUMNS]
    rows = []
    for request, own in tables.items():
        slots = [own[column] if column < len(own) else None for column in at]
        cells = (TableCell("" if slot is None else str(slot), "wrong" if slot in wrong else "") for slot in slots)
        rows.append(row(request, *cells))
    note = "≠ marks the slots that were written in place of the expected ones, wherever a row names them."
    return (table("Rows of req_to_token around it, by request and column", ("request", *map(str, at)), rows, note=note),)


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
    if [len(one) for one in mask] != [len(one) for one in exact]:
        return None
    rows = []
    for node, (expected, actual) in enumerate(zip(exact, mask, strict=True)):
        cells = [TableCell(f"node {node}")]
        for must, does in zip(expected, actual, strict=True):
            cells.append(TableCell("●" if must else "·") if must == bool(does) else TableCell("●" if does else "·", "wrong"))
        rows.append(row(*cells, kind="wrong" if expected != [bool(one) for one in actual] else ""))
    note = "● is seen, · is not; ≠ marks what must be the other way round."
    return table("The mask: what each node sees", ("", *map(str, range(len(exact)))), rows, note=note, narrow=True)
