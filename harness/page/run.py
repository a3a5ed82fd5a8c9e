"""The page of one run: a trace, its verdict, and the argument that the terminal has. Also of a recorded request."""

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

import numpy as np

from eagletwin.harness.core.records import Header, Key
from eagletwin.harness.core.signature import place_of
from eagletwin.harness.core.terminal import asked_the_impossible, compared_in_part, count, others_in_plain_decode
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.core.verdict import DECLARED_VIEW, Divergence, Verdict
from eagletwin.harness.judge.bounds import FLOAT32, bounds_of
from eagletwin.harness.judge.compare import Exhibit
from eagletwin.harness.judge.model import model_of
from eagletwin.harness.judge.provenance import (
    DivergenceContext,
    Provenance,
    provenance_of,
    rejudge_with_context,
    slot_owners,
    tables_at,
)
from eagletwin.harness.judge.rules import sentence_of
from eagletwin.harness.judge.trees import parents_of
from eagletwin.reference.tree import ancestor_mask

from .document import Document, DocumentSection, Fields, Table, TableCell, row, table
from .render import NAME, write_page
from .timeline import timeline_of, trees_of

# The tables of a page: the rows, masks or slots around the first wrong number, with their neighbours.

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


def _select_rows(wrong: Sequence[int], count: int) -> list[int]:
    """Rows around the wrong ones, the first ones first if they are too many."""
    near = sorted({n for at in wrong[:_MOST] for n in range(at - _AROUND, at + _AROUND + 1) if 0 <= n < count})
    return near[:_MOST]


def _note(shown: int, count: int, wrong: int) -> str:
    left = f"{shown} of {count} rows are shown" if shown < count else ""
    return f"{left}{'; ' if left else ''}{wrong} of {count} differ."


def _integers(exhibit: Exhibit, whose: dict[int, str], slots: dict[int, str]) -> Table:
    assert isinstance(exhibit.actual, list)
    at, wrong = _select_rows(exhibit.wrong, len(exhibit.actual)), {*exhibit.wrong}
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
    at, wrong, parts = _select_rows(exhibit.wrong, len(exhibit.actual)), {*exhibit.wrong}, exhibit.parts
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
    for n in _select_rows([exhibit.element], len(actual)):
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
    at = _select_rows(columns, max(most, max(columns) + 1))[:_MOST_COLUMNS]
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


_MOST_LATER = 300  # divergences that are listed


def write_run(folder: Path, trace: Trace, verdict: Verdict, argument: str, again: str, known: str) -> Path | None:
    """report.html in a run folder, as write_page does. argument: as the terminal has it; known: as in run_page."""

    def page() -> Document:
        commands = (again,) if again else ()
        return run_page(trace, verdict, argument=argument, again=commands, known=known, files=files_of(folder))

    return write_page(folder, page)


def files_of(folder: Path) -> tuple[str, ...]:
    """Names of what lies beside a page, for a person to open."""
    names = sorted(file.name for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))
    return tuple(name for name in names if name != NAME)


TREE_NOTE = (
    "Each node: its number, or · for a candidate that was not selected, and below it its token. ✓ was accepted; ≠ differs. "
    "The engine's choices before the first wrong one are followed, so Expected is what it should have made of them."
)


def run_page(
    trace: Trace, verdict: Verdict, *, argument: str, again: Sequence[str] = (), known: str = "", files: Sequence[str] = ()
) -> Document:
    """The page. known: the bug of the ledger that it may be; files: names of the run folder's files."""
    header, context = trace.header, rejudge_with_context(trace, verdict)
    owners = provenance_of(context) if context is not None else None
    if context is not None and context.failure:
        context = None
    model = model_of(header, "shifted" if verdict.view == "shifted" else DECLARED_VIEW)
    found, layers = verdict.first, model.mtp_layers > 0
    divergences = context.divergences if context is not None else (found,) if found is not None else ()
    rule = sentence_of(found.rule, layers, not model.ahead) if found is not None else None
    return Document(
        title=header.case.name,
        status=verdict.status,
        headline=_headline(header, verdict, layers),
        facts=tuple(_facts(header, verdict)),
        fields=_fields(found, owners, known) if found is not None else (),
        sentence=f"{rule.sentence} (design, {rule.section})" if rule is not None else "",
        why=found.why if found is not None else "",
        reason=verdict.reason or verdict.not_seen,
        timeline=timeline_of(trace.judged_of(found.rank if found is not None else None), divergences),
        trees=trees_of(context) if context is not None else (),
        tree_note=TREE_NOTE,
        tables=tables_of(context, owners) if context is not None else (),
        sections=tuple(_sections(header, verdict, context, layers)),
        argument=argument,
        again=tuple(again),
        files=tuple(files),
    )


def _headline(header: Header, verdict: Verdict, layers: bool) -> str:
    if verdict.first is not None:
        return f"{verdict.first.rule}: {place_of(verdict.first, header.case.num_steps, layers)}"
    if verdict.status == "equal":
        return f"{count(sum(verdict.checked.values()), 'comparison')} hold"
    return verdict.rule or "cannot tell"


def _fields(found: Divergence, owners: Provenance | None, known: str) -> Fields:
    fields = [("scheduler iteration", str(found.iteration)), ("index", found.index)]
    fields += [("expected", found.expected), ("actual", found.actual)]
    if owners is not None and owners.text:
        fields.append(("the actual one is" if owners.sure else "the actual one may be", owners.text))
    if owners is not None and owners.failure:
        fields.append(("whose the actual one is", f"unknown: {owners.failure}"))
    if known:
        fields.append(("known", f"it may be {known}: with its remedy this case is equal"))
    return tuple(fields)


def _facts(header: Header, verdict: Verdict) -> Iterator[tuple[str, str]]:
    case, engine = header.case, header.engine
    yield engine.title, engine.version
    yield "changed", ", ".join(engine.patches) or "nothing"
    yield "device", f"{engine.device}, {engine.dtype}{f', {engine.mode}' if engine.mode else ''}{engine.several}"
    yield "worker", engine.worker
    yield "model", case.model
    sizes = f"num_steps {case.num_steps}, topk {case.topk}, {case.verify_nodes} nodes, page_size {case.page_size}"
    yield "sizes", f"{sizes}, chunked_prefill_size {case.chunked_prefill_size}"
    yield "exercised", ", ".join(verdict.exercised) or "nothing named"
    yield "choices", f"{verdict.choices}, of them {count(verdict.ties, 'tie')}"
    if case.engine.sglang.plain_decode:
        yield "plain decode", others_in_plain_decode(verdict.relaxed)
    if verdict.impossible:
        yield "not judged", f"{asked_the_impossible(verdict.impossible)}: what it asks for together allows no token there"
    if text := compared_in_part(verdict.shares):
        yield "compared in part", text
    if verdict.excuses:
        more = sum(verdict.excused.values()) - len(verdict.excuses)
        yield "excused", "; ".join([*map(str, verdict.excuses), *([f"{more} more"] if more else [])])
    if verdict.without:
        yield "not checked", ", ".join(verdict.without)
    if verdict.view:
        yield "judged by", verdict.view
    ending = header.ending
    if ending.kind != "finished":
        yield "the run", f"{ending.kind}: {ending.detail}"


def _sections(header: Header, verdict: Verdict, context: DivergenceContext | None, layers: bool) -> Iterator[DocumentSection]:
    if context is not None and len(context.divergences) > 1:
        yield _later(header, context.divergences, layers)
    rows = ((rule, str(number), str(verdict.unseen.get(rule, ""))) for rule, number in sorted(verdict.checked.items()))
    rules = table("Comparisons by rule", ("rule", "comparisons", "could not be made"), rows, searched=True)
    yield DocumentSection(heading="What was compared", tables=(rules,))


def _later(header: Header, divergences: Sequence[Divergence], layers: bool) -> DocumentSection:
    """All divergences by their record, in the order in which data flows."""
    rows = list[tuple[str | TableCell, ...]]()

    def record_of(one: Divergence) -> tuple[int, str]:
        return one.iteration, place_of(one, header.case.num_steps, layers)

    for (iteration, place), group in groupby(divergences[1 : 1 + _MOST_LATER], record_of):
        for n, one in enumerate(group):
            actual = TableCell(one.actual, "wrong")
            rows.append((str(iteration), place if not n else "", one.rule, one.index, one.expected, actual))
    left = len(divergences) - 1 - len(rows)
    header_names = ("iteration", "record", "rule", "index", "expected", "actual")
    note = f"{left} more are not listed." if left > 0 else ""
    later = table("Divergences after the first, by record", header_names, rows, note=note, searched=True)
    lines = ("They come after the first in the order in which data flows, and may follow from it.",)
    return DocumentSection(heading="What diverged after it", lines=lines, tables=(later,))
