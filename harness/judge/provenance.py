"""Whose number a wrong one is: looked up among the rows, tokens and slots of all requests, and poison.

A row of floats that equals another's within the bound is that row: no two agree by chance. A token or a slot that equals
another's may do so by chance, and is told as such.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

import numpy as np

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.records import KEY_POISON, LATENT_POISON, VALUE_POISON, EngineInfo, Record
from eagletwin.harness.core.signature import STAGES
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.core.verdict import DECLARED_VIEW, Divergence, Verdict, View

from .bounds import FLOAT32, Bounds, bounds_of
from .compare import Exhibit
from .judge import all_divergences, compare_trace
from .model import model_of
from .replay import RequestReplay
from .rules.sessions import with_full_prompts

# A diverged trace looked at once more, with all that a verdict leaves out: every divergence, the numbers around the first, and
# what the reference says of each request. For the argument and the page; what is judged is the same.


@dataclass(frozen=True, slots=True)
class DivergenceContext:
    """trace        the rank that the first divergence is on; of a pipeline the last stage
    divergences  all, in the order in which data flows
    exhibit      the numbers of the first; None: it has none but those that it names
    replays      the requests of that rank
    failure      why there is no second look; empty if there is one
    """

    trace: Trace
    divergences: tuple[Divergence, ...]
    exhibit: Exhibit | None
    replays: dict[str, RequestReplay]
    failure: str = ""


def rejudge_with_context(trace: Trace, verdict: Verdict) -> DivergenceContext | None:
    """None of a verdict without a divergence, and of one that is not what this trace says by itself."""
    first, without = verdict.first, frozenset(verdict.without)
    if first is None:
        return None
    try:
        trace = with_full_prompts(trace)
        # a verdict names a view that is not what is declared
        view: View = next((view for view in get_args(View) if view == verdict.view), DECLARED_VIEW)
        findings, by_rank = compare_trace(trace, without, view)
    except Exception as error:  # the verdict stands, so a report of it must come out, and say what it lacks
        failure = f"the judge failed when it looked at the trace again: {type(error).__name__}: {error}"
        return DivergenceContext(trace, (first,), None, {}, failure)
    divergences = all_divergences(trace, findings, without)
    if not divergences or divergences[0].place != first.place:
        return None
    order = min((order for order, _ in findings.divergences), default=())
    rank = 0 if trace.earlier else first.rank or 0
    return DivergenceContext(trace.judged_of(first.rank), tuple(divergences), findings.exhibits.get(order), by_rank[rank])


MOST = 3  # owners that are named
NOBODYS = "no row that the reference or the trace has of any request, round or layer"
_WRONG_ROWS = 64  # rows of one comparison whose owners are looked up


@dataclass(frozen=True, slots=True)
class _Row:
    """A row that somebody has. request, row: whose, as far as it is one of a request's"""

    text: str
    request: str
    row: int


@dataclass(frozen=True, slots=True)
class Provenance:
    """The owner of the wrong numbers.

    sure     whether it is beyond chance
    text     of the first wrong row, for a sentence that begins with "it is" or "may be"; "" if nobody has it
    by_row   the same of each wrong row of the comparison that was looked up
    failure  why no owner was searched for; empty if the search ran
    """

    sure: bool
    text: str
    by_row: dict[int, str]
    failure: str = ""


def find_provenance(trace: Trace, verdict: Verdict) -> Provenance | None:
    """Whose the first wrong numbers of a verdict are; None: there are none that anybody could own."""
    context = rejudge_with_context(trace, verdict)
    return provenance_of(context) if context is not None else None


def provenance_of(context: DivergenceContext) -> Provenance | None:
    """Whose the wrong numbers of the first divergence are; None: it has none that anybody could own."""
    exhibit = context.exhibit
    if context.failure:
        return Provenance(False, "", {}, context.failure)
    if exhibit is None:
        return None
    found = context.divergences[0]
    if isinstance(exhibit.actual, list):
        return _of_integers(context, found, exhibit)
    if exhibit.actual.ndim != 2 or exhibit.actual.shape[1] < _LEAST_WIDE:
        return None
    return _of_rows(context, found, exhibit)


# Rows of fewer numbers, such as a score, agree by chance.
_LEAST_WIDE = 8


# -- rows of floats ------------------------------------------------------------------------------------------------------


def _of_rows(context: DivergenceContext, found: Divergence, exhibit: Exhibit) -> Provenance:
    assert not isinstance(exhibit.actual, list)
    header, wrong = context.trace.header, exhibit.wrong[:_WRONG_ROWS]
    bounds = bounds_of(header.engine.dtype, header.case.model) if model_of(header).numbers else FLOAT32
    stored, width = exhibit.parts > 1, exhibit.actual.shape[1]
    known = [(row, numbers) for row, numbers in _rows(context, stored) if numbers.size == width]
    names = [row for row, _ in known]
    everybodys = np.array([numbers.ravel() for _, numbers in known], np.float64).reshape(len(known), width)
    by_row = {}
    for n in wrong:
        own = _Row("", found.request, _number(exhibit.name(n)))
        actual, half = exhibit.actual[n].astype(np.float64), exhibit.parts // 2
        alike = _alike(everybodys, actual, bounds, exhibit.parts)

        def owners(parts: Array, own: _Row = own) -> str:
            """The nearest of the rows that agree in all these parts."""
            return _describe_nearest([names[at] for at in np.flatnonzero(parts.all(1))], own)

        by_row[n] = owners(alike) or _poison(actual, exhibit.parts, header.engine)
        if not by_row[n] and stored:  # the keys of all layers are the first half of a row
            halves = (("keys", owners(alike[:, :half])), ("values", owners(alike[:, half:])))
            by_row[n] = "; ".join(f"its {which} are {row}" for which, row in halves if row)
    return Provenance(True, by_row[exhibit.wrong[0]] or NOBODYS, {n: text for n, text in by_row.items() if text})


def _alike(everybodys: Array, actual: Array, bounds: Bounds, parts: int) -> Array:
    """Which parts of which rows are `actual`'s within the bound [N, parts]."""
    count = len(everybodys)
    repeated = np.broadcast_to(actual, everybodys.shape)
    share = (
        bounds.error_of(everybodys.reshape(count * parts, -1), repeated.reshape(count * parts, -1)) if count else np.empty(0)
    )
    alike: Array = share.reshape(count, parts) <= 1
    return alike


def _describe_nearest(rows: list[_Row], own: _Row) -> str:
    """The nearest of these rows, in words: of the same request first. Its own is none: it would not be wrong."""

    def distance(row: _Row) -> tuple[bool, int]:
        return row.request != own.request, abs(row.row - own.row)

    ordered = sorted(rows, key=distance)
    if not ordered:
        return ""
    same = [row for row in ordered if (row.request, row.row) == (ordered[0].request, ordered[0].row)]
    others = {(row.request, row.row) for row in ordered if row.row >= 0} - {(same[0].request, same[0].row)}
    text = same[0].text
    if same[0].request == own.request and own.row >= 0 and 0 < abs(same[0].row - own.row) <= 1:
        text += f", the row {'before' if same[0].row < own.row else 'after'} its own"
    if others:
        text += f" (and so {'is' if len(others) == 1 else 'are'} {len(others)} more)"
    return text


def _poison(actual: Array, parts: int, engine: EngineInfo) -> str:
    """Poison in a stored row is the row's own; values of that size elsewhere come from a slot that was read."""
    if parts > 1:
        keys, values = np.split(actual, 2)
        if (keys == KEY_POISON).all() and (values == VALUE_POISON).all():
            return "poison: the slot was never written, or was freed"
        if (keys == KEY_POISON).all() or (values == VALUE_POISON).all():
            return "poison in its " + ("keys" if (keys == KEY_POISON).all() else "values")
    elif (actual == LATENT_POISON).all():
        return "poison: the slot was never written, or was freed"
    if not np.isfinite(actual).all():
        tapes = engine.device == "cpu" and engine.graphs
        return "not finite" + ": memory of a graph that a graph captured before it may write over" * bool(tapes)
    if not actual.any():
        return "all zeros: nobody wrote it"
    if np.abs(actual).max() > VALUE_POISON / 100:
        return f"of poison's size ({np.abs(actual).max():.3g}): what it was computed from read a slot that nobody wrote"
    return ""


def _rows(context: DivergenceContext, stored: bool) -> Iterator[tuple[_Row, Array]]:
    """Every row that anybody has: of the reference first, then as the worker left it."""
    for name, replay in context.replays.items():
        yield from _of_reference(name, replay, stored)
    for number, record in _before(context):
        if record.request:
            yield from _recorded_rows(context.trace, number, record, stored)


def _before(context: DivergenceContext) -> Iterator[tuple[int, Record]]:
    """The records before that of the first divergence: later ones may hold what is wrong because of it."""
    found = context.divergences[0]
    for number, record in enumerate(context.trace.header.records):
        if record.key[:5] == found.place[1:6] and record.iteration == found.iteration:
            return
        yield number, record


def _of_reference(name: str, replay: RequestReplay, stored: bool) -> Iterator[tuple[_Row, Array]]:
    of, states = (
        f"of request {name}",
        ((replay.target_rows, "the target's state h[{}]"), (replay.draft_rows, "the draft's state")),
    )
    committed = [(rows.hidden, what) for rows, what in states if rows is not None]
    if stored:
        committed = [(rows, f"as the {part} stores it") for part, rows in replay.stored.items()]
    for rows, what in committed:
        for i, row in enumerate(rows):
            yield _Row(f"row {i} {of}, {what.format(i)}", name, i), row
    for round, growth in enumerate(replay.growths):
        first = replay.rounds[round].committed
        for step, rows in enumerate(growth.scratch if stored else growth.handed_on):
            for branch, row in enumerate(rows):
                at = f"draft decode step {step + 1}, round {round}" + (f", branch {branch}" if len(rows) > 1 else "")
                what = f"as {at} stores it" if stored else f"the draft's state of {at}"
                yield _Row(f"row {first + step} {of}, {what}", name, first + step), row


_STATES = ("hidden_in", "hidden_out", "path_hidden")
_ENTRIES = {"target.verify": "node", "verify": "accepted node", "draft.decode": "branch"}  # what a forward's rows are called


def _recorded_rows(trace: Trace, number: int, record: Record, stored: bool) -> Iterator[tuple[_Row, Array]]:
    """Rows of a record, as it has them: rejected nodes, rows of a draft's upper layers, and wrong ones that were handed on."""
    when = f"{STAGES.get(record.stage, record.stage)} of round {record.round}" + (
        f", layer {record.layer}" if record.layer else ""
    )
    of = f"of request {record.request}"
    for name in record.tensors:
        if stored and name.endswith("_kv"):
            part, at = name.removesuffix("_kv"), f"{name.removesuffix('_kv')}_rows"
            rows = trace.integers(number, at) if at in record.tensors else []
            for n, row in enumerate(trace.array(number, name)):
                own = rows[n] if n < len(rows) else -1
                which = f"row {own}" if own >= 0 else f"stored row {n}"
                yield _Row(f"{which} {of} in the pool of the {part}, {when}", record.request, own), row
        elif not stored and name in _STATES:
            for n, row in enumerate(trace.array(number, name)):
                own = record.step + n if record.stage in ("target.extend", "draft.extend") else -1
                which = f"row {own}" if own >= 0 else f"{_ENTRIES.get(record.stage, 'entry')} {n}"
                verb = "consumes" if name == "hidden_in" else "hands on"
                yield _Row(f"the state that {which} {of} {verb} in {when}", record.request, own), row
        elif not stored and name == "proposal_hidden":
            yield _Row(f"the state {of} that is proposed from, {when}", record.request, -1), trace.array(number, name)


# -- integers ------------------------------------------------------------------------------------------------------------

_TOKENS = ("draft.input_ids", "verify.inputs", "target.inputs", "tree.tokens", "output.tokens", "commit.path", "draft.proposal")


def _of_integers(context: DivergenceContext, found: Divergence, exhibit: Exhibit) -> Provenance | None:
    assert isinstance(exhibit.actual, list)
    assert isinstance(exhibit.expected, list)
    if exhibit.logits is not None:
        return _of_choice(exhibit)
    if found.rule == "draft.slots":
        return _of_slots(context, exhibit)
    name = exhibit.name(exhibit.wrong[0])
    if found.rule in ("draft.positions", "tree.positions") or name.startswith("position of"):
        return _of_positions(exhibit)
    if found.rule in _TOKENS and not name.startswith(("seq_len", "number", "length")):
        shift = _shift(context, found, exhibit)
        if shift:
            return Provenance(True, shift, {})
        by_row = {n: _of_token(context, found, exhibit.actual[n], exhibit.name(n)) for n in exhibit.wrong[:_WRONG_ROWS]}
        return Provenance(False, by_row[exhibit.wrong[0]], {n: text for n, text in by_row.items() if text})
    return None


def _of_choice(exhibit: Exhibit) -> Provenance:
    assert exhibit.logits is not None
    by_row = {}
    for n in exhibit.wrong:
        token = int(exhibit.actual[n])
        if 0 <= token < len(exhibit.logits):
            better = int((exhibit.logits > exhibit.logits[token]).sum())
            by_row[n] = f"number {better + 1} of {len(exhibit.logits)} by the reference's logits"
    return Provenance(True, by_row.get(exhibit.wrong[0], ""), by_row)


def _of_positions(exhibit: Exhibit) -> Provenance:
    assert isinstance(exhibit.actual, list)
    by_row = {n: int(exhibit.actual[n]) - int(exhibit.expected[n]) for n in exhibit.wrong}
    words = {n: f"{abs(off)} too {'large' if off > 0 else 'small'}" for n, off in by_row.items()}
    first = words[exhibit.wrong[0]]
    if len(by_row) > 1 and len(set(by_row.values())) == 1:
        first += f", as all {len(by_row)} that are wrong"
    return Provenance(True, first, words)


def _shift(context: DivergenceContext, found: Divergence, exhibit: Exhibit) -> str:
    """Several wrong tokens in a row that are those of other rows, all by the same distance: no chance."""
    replay, wrong, own = context.replays.get(found.request), exhibit.wrong, _number(exhibit.name(exhibit.wrong[0]))
    if replay is None or len(wrong) < 3 or own < 0 or found.rule == "draft.proposal":
        return ""
    expected = _places(replay.tokens, [int(exhibit.expected[n]) for n in wrong])
    for other in context.replays.values():
        actual = _places(other.tokens, [int(exhibit.actual[n]) for n in wrong])
        if expected >= 0 and actual >= 0:
            return f"x[{actual}] to x[{actual + len(wrong) - 1}] of request {other.name}, in place of x[{expected}] on"
    return ""


def _places(tokens: list[int], some: list[int]) -> int:
    """Where these tokens stand in a row; -1: nowhere."""
    return next((n for n in range(len(tokens) - len(some) + 1) if tokens[n : n + len(some)] == some), -1)


def _of_token(context: DivergenceContext, found: Divergence, token: int, name: str) -> str:
    """Where a token stands: in its own request near by first, then what the target would have said, then in other requests."""
    own, hits = _number(name), list[tuple[tuple[int, int], str]]()
    for replay in context.replays.values():
        mine = replay.name == found.request
        of = "" if mine else f" of request {replay.name}"
        for i, committed in enumerate(replay.tokens):
            if committed == token:
                hits.append(((0 if mine else 2, abs(i - own - 1)), f"x[{i}]{of}"))
        if mine and replay.target_rows is not None and 0 <= own < len(replay.target_rows.logits):
            for i in range(max(0, own - 1), min(len(replay.target_rows.logits), own + 2)):
                if int(replay.target_rows.logits[i].argmax()) == token:
                    hits.append(((1, abs(i - own)), f"what the target says after row {i}"))
    if not hits and token == 0:
        return "0, as padding has it"
    hits.sort(key=lambda hit: hit[0])
    more = f" and {len(hits) - MOST} more" if len(hits) > MOST else ""
    return ", ".join(text for _, text in hits[:MOST]) + more


def _of_slots(context: DivergenceContext, exhibit: Exhibit) -> Provenance:
    held = slot_owners(context)
    assert isinstance(exhibit.actual, list)
    by_row = {n: held.get(int(exhibit.actual[n]), "nobody's that the trace knows of") for n in exhibit.wrong[:_WRONG_ROWS]}
    return Provenance(True, by_row[exhibit.wrong[0]], by_row)


def slot_owners(context: DivergenceContext) -> dict[int, str]:
    """Slot -> the request and the column of its row of req_to_token that name it, and the prefix cache's."""
    held = {0: "slot 0, which takes padding"}
    for number, record in _earlier_records(context):
        if record.stage == "batch" and "cached" in record.tensors:
            held |= dict.fromkeys(context.trace.integers(number, "cached"), "the prefix cache's")
            break  # the newest batch says what is cached now
    for request, table in tables_at(context).items():
        for column, slot in enumerate(table):
            if slot:
                held.setdefault(slot, f"column {column} of request {request}")
    for number, record in _earlier_records(context):
        for name in ("scratch_slots", "slots"):
            if record.request and name in record.tensors:  # of a row that is recorded as far as its tokens are committed
                for slot in context.trace.integers(number, name):
                    held.setdefault(slot, f"request {record.request}'s, {STAGES[record.stage]} of its round {record.round}")
    return held


def _earlier_records(context: DivergenceContext) -> Iterator[tuple[int, Record]]:
    """The records up to the iteration of the first divergence, the newest first; of the request that it is about, those before
    it."""
    found, before = context.divergences[0], {number for number, _ in _before(context)}
    for number, record in reversed(list(enumerate(context.trace.header.records))):
        if record.iteration <= found.iteration and (record.request != found.request or number in before):
            yield number, record


def tables_at(context: DivergenceContext) -> dict[str, list[int]]:
    """Each live request's row of req_to_token: the newest up to the iteration of the first divergence; of the request that this
    is about, the newest before it."""
    tables, gone = dict[str, list[int]](), set[str]()
    for number, record in _earlier_records(context):
        if record.stage == "finished":
            gone.add(record.request)
        if "table" in record.tensors and record.request not in gone:
            tables.setdefault(record.request, context.trace.integers(number, "table"))
    return {request: tables[request] for request in context.replays if request in tables}


def _number(name: str) -> int:
    """The row that a name names; -1: none."""
    found = re.search(r"\brow (\d+)", name)
    return int(found[1]) if found else -1
