"""The time line of a page: what happened to each request in each iteration of the scheduler, as the trace has it."""

from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.core.records import Key, Record, accept_lengths
from eagletwin.harness.core.terminal import count
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.core.verdict import Divergence

from .document import Lane, Mark, Timeline

SCHEDULER = "scheduler"
_MOST_ROUNDS = 20_000  # that have their tokens: 100 bytes each, and a page stays below 5 MB
_MOST_TOKENS = 40  # of a round that are listed

_Marks = dict[str, dict[int, list[Mark]]]  # by lane and iteration


def timeline_of(traces: Sequence[Trace], divergences: Sequence[Divergence] = ()) -> Timeline:
    """The time line of one trace, or of the recordings of one server. divergences: of the first trace, in order."""
    marks: _Marks = {}
    rounds = 0
    notes: dict[str, str] = {}
    for number, trace in enumerate(traces):
        for request in trace.header.case.requests:
            name = request.id if len(traces) == 1 else f"{request.id} ({number + 1})"
            notes[name] = _asked(request)
        rounds += _read(trace, "" if len(traces) == 1 else f" ({number + 1})", marks, brief=rounds >= _MOST_ROUNDS)
        if number == 0:
            _mark_wrong(divergences, "" if len(traces) == 1 else " (1)", marks)
    notes[SCHEDULER] = "events, and what belongs to no request"
    columns = sorted({iteration for lane in marks.values() for iteration in lane})
    place = {iteration: n for n, iteration in enumerate(columns)}
    lanes = tuple(
        Lane(name=name, note=note, marks=_placed(marks.get(name, {}), place))
        for name, note in notes.items()
        if name != SCHEDULER or name in marks
    )
    first = place.get(divergences[0].iteration, -1) if divergences else -1
    return Timeline(columns=tuple(columns), lanes=lanes, first=first, brief=max(0, rounds - _MOST_ROUNDS))


def _placed(lane: dict[int, list[Mark]], place: dict[int, int]) -> tuple[Mark, ...]:
    return tuple(replace(mark, at=place[iteration]) for iteration in sorted(lane) for mark in lane[iteration])


def _asked(request: Request) -> str:
    sampled = ", samples" if request.sampling is not None else ""
    return f"prompt {len(request.prompt)}, new {request.max_new_tokens}{sampled}"


def _read(trace: Trace, suffix: str, marks: _Marks, *, brief: bool) -> int:
    """Add the marks of a trace; how many rounds it has."""
    case, rounds = trace.header.case, 0
    numbers = {record.key: number for number, record in enumerate(trace.header.records)}
    prefilled: Counter[str] = Counter()
    for number, record in enumerate(trace.header.records):
        mark = None
        if record.stage == "prefill":
            again = record.numbers["start"] < prefilled[record.request] or record.attempt > 0
            prefilled[record.request] = record.numbers["end"]
            mark = _chunk(trace, number, record, again=again)
        elif record.stage == "verify":
            rounds += 1
            mark = _round(trace, number, record, numbers, brief=brief)
        elif record.stage == "finished":
            mark = _end(trace, number, record)
        elif record.stage == "abort":
            more = (f"While the batch before this iteration ran: {_EVENTS['abort']}.",)
            mark = Mark(at=0, kind="event", text="abort", more=more)
        if mark is not None:
            _add(marks, record.request + suffix, record.iteration, mark)
    _events(case, marks, suffix)
    return rounds


def _add(marks: _Marks, lane: str, iteration: int, mark: Mark) -> None:
    marks.setdefault(lane, {}).setdefault(iteration, []).append(mark)


def _chunk(trace: Trace, number: int, record: Record, *, again: bool) -> Mark:
    start, end, final = (record.numbers[name] for name in ("start", "end", "final"))
    more = [f"Prefill of rows {start} to {end - 1}, {'the last chunk' if final else 'not the last chunk'}."]
    if start > 0 and record.round == 0 and not again and record.step == start:
        more += [f"Rows before {start} were prefilled, or found in the prefix cache."]
    if again:
        more += ["Prefilled again: the request was retracted."]
    bonus = None
    if final and "next_token" in record.tensors:
        bonus = trace.integers(number, "next_token")[0]
    return Mark(at=0, kind="chunk", text=f"{'↺ ' if again else ''}{start} to {end - 1}", more=tuple(more), bonus=bonus)


def _round(trace: Trace, number: int, record: Record, numbers: dict[Key, int], *, brief: bool) -> Mark:
    (length,), committed = accept_lengths([record]), record.numbers["seq_len"]
    nodes = record.numbers["steps"] + 1 if "steps" in record.numbers else trace.header.case.verify_nodes
    text = f"{length - 1} of {nodes - 1}"
    if brief:
        return Mark(at=0, kind="round", text=text)
    more = [
        f"Round {record.round}: M = {committed}; {count(length - 1, 'draft')} of {nodes - 1} accepted, and the bonus token."
    ]
    draft = numbers.get(Key(record.request, record.round, "draft"))
    drafted = [] if draft is None else trace.integers(draft, "tokens")
    path = {node for node in trace.integers(number, "accept_index") if 0 < node < len(drafted)}
    rejected = [token for node, token in enumerate(drafted) if node and node not in path]
    if len(rejected) > _MOST_TOKENS:
        more.append(f"{len(rejected) - _MOST_TOKENS} more were rejected.")
    return Mark(
        at=0,
        kind="round",
        text=text,
        more=tuple(more),
        accepted=tuple(drafted[node] for node in sorted(path)),
        rejected=tuple(rejected[:_MOST_TOKENS]),
        bonus=record.numbers.get("bonus"),
    )


def _end(trace: Trace, number: int, record: Record) -> Mark:
    emitted = len(trace.integers(number, "tokens"))
    if record.numbers["aborted"]:
        return Mark(at=0, kind="abort", text="✕ abort", more=(f"Aborted; {count(emitted, 'token')} were emitted.",))
    return Mark(at=0, kind="end", text=f"■ {emitted}", more=(f"Finished: {count(emitted, 'token')} were emitted.",))


_EVENTS = {
    "abort": "the client hangs up",
    "retract": "all running requests lose their slots and go back to the queue",
    "pause": "nothing is scheduled until the next resume",
    "resume": "scheduling goes on",
    "flush": "the prefix cache is to be emptied",
    "close": "the client ends its session",
}


def _events(case: Case, marks: _Marks, suffix: str) -> None:
    for event in case.events:
        if event.step:  # the trace has a record of it
            continue
        lane = f"{event.request}{suffix}" if event.request else SCHEDULER
        sign = "↺ " if event.kind == "retract" else ""
        more = (f"Before this iteration: {_EVENTS[event.kind]}.",)
        _add(marks, lane, event.at, Mark(at=0, kind="event", text=f"{sign}{event.kind}", more=more))
    for request in case.requests:
        if request.arrive:
            more = ("It is handed to the scheduler before this iteration.",)
            _add(marks, f"{request.id}{suffix}", request.arrive, Mark(at=0, kind="event", text="arrives", more=more))


def _mark_wrong(divergences: Sequence[Divergence], suffix: str, marks: _Marks) -> None:
    """The records that hold divergences: in the mark of their iteration, or in one of their own."""
    wrong = Counter((f"{one.request}{suffix}" if one.request else SCHEDULER, one.iteration) for one in divergences)
    for (lane, iteration), number in wrong.items():
        here = marks.setdefault(lane, {}).setdefault(iteration, [])
        at = next((n for n, mark in enumerate(here) if mark.kind in ("chunk", "round")), 0)
        if not here:
            here.append(Mark(at=0, kind="other", text="", more=()))
        first = divergences[0]
        is_first = (lane, iteration) == (f"{first.request}{suffix}" if first.request else SCHEDULER, first.iteration)
        here[at] = replace(here[at], wrong=number, first=is_first)
