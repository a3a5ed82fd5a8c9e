"""The pictures of a page: what happened to each request in each iteration, and the draft tree of a divergence."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.core.records import Key, Record, accept_lengths
from eagletwin.harness.core.terminal import count
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.core.verdict import Divergence
from eagletwin.harness.judge.compare import Exhibit
from eagletwin.harness.judge.provenance import DivergenceContext
from eagletwin.harness.judge.trees import ROOT, DraftTree, tree_of

from .document import Lane, Mark, Node, Timeline, TreePicture

# The time line, as the trace has it.

SCHEDULER = "scheduler"
_MOST_ROUNDS = 20_000  # that have their tokens: 100 bytes each, and a page stays below 5 MB
_MOST_TOKENS = 40  # of a round that are listed

_Marks = dict[str, dict[int, list[Mark]]]  # by lane and iteration


def timeline_of(trace: Trace, divergences: Sequence[Divergence] = ()) -> Timeline:
    """The time line of a trace. divergences: its own, in order."""
    notes = {request.id: _describe_request(request) for request in trace.header.case.requests}
    notes[SCHEDULER] = "events, and what belongs to no request"
    marks, rounds = _read(trace)
    _mark_wrong(divergences, marks)
    columns = sorted({iteration for lane in marks.values() for iteration in lane})
    place = {iteration: n for n, iteration in enumerate(columns)}
    lanes = []
    for name, note in notes.items():
        lane = marks.get(name, {})
        if lane or name != SCHEDULER:
            placed = (replace(mark, at=place[iteration]) for iteration in sorted(lane) for mark in lane[iteration])
            lanes.append(Lane(name=name, note=note, marks=tuple(placed)))
    first = place.get(divergences[0].iteration, -1) if divergences else -1
    return Timeline(columns=tuple(columns), lanes=tuple(lanes), first=first, brief=max(0, rounds - _MOST_ROUNDS))


def _describe_request(request: Request) -> str:
    sampled = ", samples" if request.sampling is not None else ""
    return f"prompt {len(request.prompt)}, new {request.max_new_tokens}{sampled}"


def _read(trace: Trace) -> tuple[_Marks, int]:
    """The marks of a trace, and how many rounds it has."""
    marks, rounds = _Marks(), 0
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
            mark = _round(trace, number, record, numbers, brief=rounds > _MOST_ROUNDS)
        elif record.stage == "finished":
            mark = _end(trace, number, record)
        elif record.stage == "abort":
            more = (f"While the batch before this iteration ran: {_EVENTS['abort']}.",)
            mark = Mark(at=0, kind="event", text="abort", more=more)
        if mark is not None:
            _add(marks, record.request, record.iteration, mark)
    _events(trace.header.case, marks)
    return marks, rounds


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


def _events(case: Case, marks: _Marks) -> None:
    for event in case.events:
        if event.step:  # the trace has a record of it
            continue
        lane = event.request or SCHEDULER
        sign = "↺ " if event.kind == "retract" else ""
        more = (f"Before this iteration: {_EVENTS[event.kind]}.",)
        _add(marks, lane, event.at, Mark(at=0, kind="event", text=f"{sign}{event.kind}", more=more))
    for request in case.requests:
        if request.arrive:
            more = ("It is handed to the scheduler before this iteration.",)
            _add(marks, request.id, request.arrive, Mark(at=0, kind="event", text="arrives", more=more))


def _mark_wrong(divergences: Sequence[Divergence], marks: _Marks) -> None:
    """The records that hold divergences: in the mark of their iteration, or in one of their own."""
    wrong = Counter((one.request or SCHEDULER, one.iteration) for one in divergences)
    for (lane, iteration), number in wrong.items():
        here = marks.setdefault(lane, {}).setdefault(iteration, [])
        at = next((n for n, mark in enumerate(here) if mark.kind in ("chunk", "round")), 0)
        if not here:
            here.append(Mark(at=0, kind="other", text="", more=()))
        first = divergences[0]
        is_first = (lane, iteration) == (first.request or SCHEDULER, first.iteration)
        here[at] = replace(here[at], wrong=number, first=is_first)


# The draft tree of a divergence, drawn twice: as it must be and as it was. A chain is a tree of one branch.
#
# The engine's choices before the first wrong one are followed, so the expected tree is what the engine should have drawn from
# what it had until then.

_ACROSS, _DOWN, _EDGE = 74, 78, 44  # pixels between nodes, and to the border
_MOST_NODES = 120  # that are drawn
_OF_A_ROUND = ("draft.decode", "draft", "target.verify", "verify", "draft.extend_decode", "extend")


@dataclass(slots=True)
class _Side:
    """One of the two drawings. accepted: nodes. notes, wrong: by candidate"""

    tree: DraftTree
    notes: dict[int, str] = field(default_factory=dict)
    wrong: set[int] = field(default_factory=set)


def trees_of(context: DivergenceContext) -> tuple[TreePicture, ...]:
    """The tree that must be and the one that was; none where the divergence is about no round."""
    found = context.divergences[0]
    actual = tree_of(context.trace, found) or _chain(context, found)
    if actual is None:
        return ()
    expected = DraftTree(
        actual.topk, actual.committed, {**actual.node}, {**actual.token}, [*actual.expanded], [*actual.accepted]
    )
    sides = _Side(expected), _Side(actual)
    _choices(context, found, sides)
    if context.exhibit is not None:
        _annotate(found, context.exhibit, sides)
    for candidate in actual.marks:
        if not any(side.wrong for side in sides):
            sides[1].wrong.add(candidate)
            sides[0].notes.setdefault(candidate, _short(found.expected))
            sides[1].notes.setdefault(candidate, _short(found.actual))
    return _draw_tree("Expected", sides[0]), _draw_tree("Actual", sides[1])


def _short(text: str) -> str:
    """A value as a note below a node: what is long is said elsewhere."""
    return text if len(text) <= 10 else ""


def _chain(context: DivergenceContext, found: Divergence) -> DraftTree | None:
    """The drafts of a round with topk = 1: candidate n is d[n + 1] and node n + 1."""
    trace = context.trace
    if trace.header.case.topk > 1 or found.stage not in _OF_A_ROUND or not found.request:
        return None
    numbers = {record.key: number for number, record in enumerate(trace.header.records)}
    number = numbers.get(Key(found.request, found.round, "draft"))
    if number is None or "tokens" not in trace.header.records[number].tensors:
        return None
    tokens, drafts = trace.integers(number, "tokens"), range(len(trace.integers(number, "tokens")) - 1)
    verify = numbers.get(Key(found.request, found.round, "verify"))
    accepted = [] if verify is None else trace.integers(verify, "accept_index")
    node = {ROOT: 0} | {n: n + 1 for n in drafts}
    token = {ROOT: tokens[0]} | {n: tokens[n + 1] for n in drafts}
    committed = trace.header.records[number].numbers["seq_len"]
    tree = DraftTree(1, committed, node, token, list(drafts)[:-1], accepted)
    if where := re.match(r"d\[(\d+)\]", found.index):
        tree.marks[int(where[1]) - 1] = ["here"]
    elif found.stage in ("draft.decode", "draft") and found.step:
        tree.marks[found.step - 1] = ["here"]
    elif where := re.search(r"(?:node|token) (\d+)", found.index):
        tree.marks[int(where[1]) - 1] = ["here"]
    return tree


def _choices(context: DivergenceContext, found: Divergence, sides: tuple[_Side, _Side]) -> None:
    """What the reference chooses otherwise: a frontier, the final selection, the token of a candidate."""
    expected, actual = sides
    replay = context.replays.get(found.request)
    if found.rule == "draft.proposal":
        for candidate in actual.tree.marks:
            if found.expected.isdigit():
                expected.tree.token[candidate] = int(found.expected)
                expected.wrong.add(candidate)
                actual.wrong.add(candidate)
    if replay is None or found.round >= len(replay.choices) or found.rule not in ("tree.parents", "tree.tokens"):
        return
    choices = replay.choices[found.round]
    if found.rule == "tree.tokens" and choices.selected is not None and choices.selected.wrong:
        should, did = {*choices.selected.expected}, {*choices.selected.actual}
        expected.tree.node = {ROOT: 0} | {candidate: n for n, candidate in enumerate(sorted(should), 1)}
        expected.wrong |= should - did
        actual.wrong |= did - should
    for step, ranked in enumerate(choices.frontiers, 1):
        if found.rule == "tree.parents" and ranked.wrong:
            topk = actual.tree.topk
            expected.tree.expanded[step * topk : (step + 1) * topk] = ranked.expected
            expected.wrong |= {*ranked.expected} - {*ranked.actual}
            actual.wrong |= {*ranked.actual} - {*ranked.expected}
            break
    for candidate in expected.wrong:
        if candidate < len(choices.tokens):
            expected.tree.token.setdefault(candidate, choices.tokens[candidate])


def _annotate(found: Divergence, exhibit: Exhibit, sides: tuple[_Side, _Side]) -> None:
    """Values of nodes, where the comparison was of nodes: below each whose value differs, and the accepted path."""
    if not isinstance(exhibit.actual, list) or not isinstance(exhibit.expected, list):
        return
    candidates = {node: candidate for candidate, node in sides[1].tree.node.items()}
    if found.index.startswith("accepted node"):
        sides[0].tree.accepted = [*exhibit.expected]
        for side, path in zip(sides, (exhibit.expected, exhibit.actual), strict=True):
            side.wrong |= {candidates[node] for node in {*exhibit.expected} ^ {*exhibit.actual} if node in candidates and path}
        return
    if "node" not in exhibit.name(0):
        return
    for n in exhibit.wrong:
        node = re.search(r"node (\d+)$", exhibit.name(n))
        candidate = candidates.get(int(node[1])) if node else None
        if candidate is not None:
            for side, values in zip(sides, (exhibit.expected, exhibit.actual), strict=True):
                side.notes[candidate] = str(values[n])
                side.wrong.add(candidate)


def _draw_tree(title: str, side: _Side) -> TreePicture:
    tree = side.tree
    shown = {one for known in (tree.node, tree.expanded, tree.marks, side.wrong) for one in known if one != ROOT}
    for candidate in list(shown):
        shown.update(tree.way_to(candidate))
    kept = sorted(shown)[:_MOST_NODES]
    children: dict[int, list[int]] = {}
    for candidate in kept:
        children.setdefault(tree.parent(candidate), []).append(candidate)
    at = _node_places(children)
    nodes = tuple(_node(side, candidate, at[candidate]) for candidate in sorted(at))
    edges = tuple((*at[parent], *at[child]) for parent, own in children.items() for child in own if parent in at)
    width, height = max(x for x, _ in at.values()) + _EDGE, max(y for _, y in at.values()) + _EDGE
    return TreePicture(
        title=title, width=width, height=height, nodes=nodes, edges=edges, words=_words(title, nodes, len(shown))
    )


def _node_places(children: Mapping[int, list[int]]) -> dict[int, tuple[int, int]]:
    """Where each node stands: leaves side by side, each parent over the middle of its children, whatever the depth."""
    order, waiting = list[tuple[int, int]](), [(ROOT, 0)]
    while waiting:
        candidate, depth = waiting.pop()
        order.append((candidate, depth))
        waiting += [(child, depth + 1) for child in reversed(children.get(candidate, []))]
    across: dict[int, int] = {}
    leaves = 0
    for candidate, _ in order:
        if not children.get(candidate):
            across[candidate] = _EDGE + leaves * _ACROSS
            leaves += 1
    for candidate, _ in reversed(order):
        if candidate not in across:
            own = [across[child] for child in children[candidate]]
            across[candidate] = (min(own) + max(own)) // 2
    return {candidate: (across[candidate], 32 + depth * _DOWN) for candidate, depth in order}


def _node(side: _Side, candidate: int, at: tuple[int, int]) -> Node:
    tree = side.tree
    number = tree.node.get(candidate)
    return Node(
        x=at[0],
        y=at[1],
        label="·" if number is None else str(number),
        token=str(tree.token.get(candidate, "?")),
        note=side.notes.get(candidate, ""),
        accepted=number in tree.accepted,
        selected=number is not None,
        wrong=candidate in side.wrong,
    )


def _words(title: str, nodes: tuple[Node, ...], shown: int) -> str:
    """The drawing in words."""
    each = []
    for node in nodes:
        marks = [word for word, on in (("accepted", node.accepted), ("differs", node.wrong)) if on]
        marks += [f"value {node.note}"] if node.note else []
        said = f" ({', '.join(marks)})" if marks else ""
        name = f"node {node.label}" if node.selected else "a candidate that was not selected"
        each.append(f"{name}: token {node.token}{said}")
    hidden = shown - (len(nodes) - 1)
    more = f"; {hidden} more are not drawn" if hidden else ""
    return f"{title}: {'; '.join(each)}{more}."
