"""A verdict as a short argument: what happened, what must hold, why it cannot both be, and how to see it again."""

from collections.abc import Iterator, Mapping, Sequence

from eagletwin.harness.core.differs import Differs
from eagletwin.harness.core.records import EngineInfo, Header
from eagletwin.harness.core.signature import place_of
from eagletwin.harness.core.terminal import asked_the_impossible, compared_in_part, count, fold, others_in_plain_decode
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.core.verdict import DECLARED_VIEW, MOST_EXCUSES, Divergence, Verdict, View
from eagletwin.harness.judge.model import model_of
from eagletwin.harness.judge.provenance import Provenance, find_provenance
from eagletwin.harness.judge.rules import catalogue, sentence_of
from eagletwin.harness.judge.trees import ROOT, DraftTree, tree_of

# The draft tree of a divergence as text, with the nodes that it is about marked.
#
# docs/explanation/trees.md shows how to read it.

# A tree of more nodes is cut down to what is marked or accepted, the way there, and its siblings if they fit.
MOST_LINES = 12


def draw(trace: Trace, found: Divergence) -> list[str]:
    """Lines of the tree that a divergence is about; none where it is about none."""
    tree = tree_of(trace, found)
    if tree is None:
        return []
    behind = f"{count(len(tree.node) - 1, 'node')} behind the bonus token at position {tree.committed}"
    head = f"The tree of request {found.request}, round {found.round}: {behind}."
    return [head, "", *_lines(tree)]


def _lines(tree: DraftTree) -> Iterator[str]:
    shown = {candidate for known in (tree.node, tree.expanded, tree.marks) for candidate in known if candidate != ROOT}
    for candidate in list(shown):
        shown.update(tree.way_to(candidate))
    hidden = 0
    if len(shown) > MOST_LINES:
        ends = {*tree.marks, *(candidate for candidate, node in tree.node.items() if node in tree.accepted)} - {ROOT}
        kept = {candidate for end in ends for candidate in tree.way_to(end)}
        parents = {ROOT, *(tree.parent(candidate) for candidate in kept)}
        near = kept | {candidate for candidate in shown if tree.parent(candidate) in parents}
        kept = near if len(near) <= MOST_LINES else kept
        hidden, shown = len(shown) - len(kept), kept
    children: dict[int, list[int]] = {}
    for candidate in sorted(shown):
        children.setdefault(tree.parent(candidate), []).append(candidate)
    rows = [("", ROOT)]
    waiting = [("", candidate) for candidate in reversed(children.get(ROOT, []))]
    while waiting:
        before, candidate = waiting.pop()
        last = candidate == children[tree.parent(candidate)][-1]
        rows.append((before + ("└─ " if last else "├─ "), candidate))
        waiting += [(before + ("   " if last else "│  "), child) for child in reversed(children.get(candidate, []))]
    names = [f"{line}{tree.node.get(candidate, '·')}: {tree.token.get(candidate, '?')}" for line, candidate in rows]
    width = max(map(len, names))
    for name, (_, candidate) in zip(names, rows, strict=True):
        accepted = "*" if tree.node.get(candidate) in tree.accepted else " "
        marks = "".join(f"   <── {mark}" for mark in tree.marks.get(candidate, []))
        yield f"{name:{width}} {accepted}  {_origin(tree, candidate)}{marks}".rstrip()
    yield ""
    yield "node: token, · for a candidate that was not selected" + ("; * accepted" if tree.accepted else "")
    if hidden:
        yield f"{hidden} more are not drawn"


def _origin(tree: DraftTree, candidate: int) -> str:
    if candidate == ROOT:
        return "root"
    at = tree.expanded.index(candidate) if candidate in tree.expanded else -1
    branch = f", step {at // tree.topk + 1} branch {at % tree.topk}" if at >= 0 else ""
    return f"candidate {candidate}{branch}"


WIDTH = 112  # columns of a report in a file
_EXCUSES = 3  # that a report names


def argue(
    header: Header, verdict: Verdict, *, again: str = "", trace: Trace | None = None, columns: int = WIDTH, known: str = ""
) -> str:
    """The argument, plain text, some ten lines. `again` is the command that repeats the run.

    trace    what the verdict is about: then a divergence says whose number the wrong one is, and one in a draft tree comes with
             a drawing of it
    columns  of a line; a drawing and a command may be longer
    known    the id of the bug of the ledger that it may be
    """
    lines = [_title(header, verdict)]
    changes = trace.changes if trace is not None else (header.differs,) if header.differs else ()
    if verdict.not_seen:
        lines += fold(f"NOT SEEN  {verdict.not_seen}", columns, "", " " * 10)
    if verdict.first is not None:
        owners = find_provenance(trace, verdict) if trace is not None else None
        view: View = "shifted" if verdict.view == "shifted" else DECLARED_VIEW
        lines += ["", *_divergence(verdict.first, header, view, columns, owners)]
        drawn = draw(trace.judged_of(verdict.first.rank), verdict.first) if trace is not None else []
        lines += ["", *(f"  {line}".rstrip() for line in drawn)] if drawn else []
    if verdict.reason:
        lines += ["", *fold(f"{verdict.rule or 'cannot tell'}: {verdict.reason}", columns)]
        if verdict.exercised:
            lines += fold(f"Exercised: {', '.join(verdict.exercised)}.", columns)
    if verdict.later:
        more = count(sum(verdict.later.values()), "more comparison")
        lines += ["", *fold(f"After it {more} diverged, which may follow from it: {by_name(verdict.later)}.", columns)]
    if known:
        text = f"It may be {known}: with its remedy this case is equal (`eagletwin info ledger {known}` says what it is)."
        lines += ["", *fold(text, columns)]
    if header.ending.kind != "finished" and verdict.status == "diverged":
        ended = "" if header.ending.kind == "unseen" else f"the worker {header.ending.kind}: "
        lines += ["", *fold(f"Then {ended}{header.ending.detail}.", columns)]
    if verdict.status == "equal":
        compared, reached = sum(verdict.checked.values()), ", ".join(verdict.exercised) or "nothing named"
        text = (
            f"{count(compared, 'comparison')} in {count(len(verdict.checked), 'rule')}; "
            f"{count(verdict.choices, 'choice')}, of them {count(verdict.ties, 'tie')}; "
        )
        text += f"largest float error {verdict.headroom:.2g} of its bound. Exercised: {reached}."
        if verdict.relaxed:
            text += f" {others_in_plain_decode(verdict.relaxed)}"
        lines += ["", *fold(text, columns)]
    notes = [line for text in _notes(header, verdict, trace, changes) for line in fold(text, columns)]
    lines += ["", *notes] if notes else []
    if again:
        lines += ["", f"  again: {again}"]
    return "\n".join(lines)


def _title(header: Header, verdict: Verdict) -> str:
    """The verdict, the case, and how it was run and judged."""
    engine = header.engine
    changed = f", with {', '.join(engine.patches)}" if engine.patches else ""
    mode = (f", {engine.mode}" if engine.mode else "") + engine.several
    off = f", not checked: {', '.join(verdict.without)}" if verdict.without else ""
    off += f", judged by {verdict.view}" if verdict.view else ""
    return (
        f"{verdict.status.upper()}  {header.case.name} on {engine.title} {engine.version} ({engine.device}{mode}{changed}{off})"
    )


def _notes(header: Header, verdict: Verdict, trace: Trace | None, changes: Sequence[Differs]) -> Iterator[str]:
    """What ran of the changes, and what was not compared, in sentences."""
    for change in changes:
        if not change.patch or verdict.status == "equal":
            yield from change.lines()
    if verdict.effect:
        yield verdict.effect
    if verdict.unseen:
        yield f"Not seen ({_why_unseen(header.engine, verdict.unseen)}): {by_name(verdict.unseen)}."
    if verdict.impossible:
        parts = by_name(verdict.unjudged)
        where = asked_the_impossible(verdict.impossible) + (f": {parts}" if parts else "")
        yield f"Not judged (what it asks for together allows no token there): {where}."
    if text := compared_in_part(verdict.shares):
        yield f"Compared in part: {text}."
    if verdict.excuses:
        more = sum(verdict.excused.values()) - _EXCUSES
        rest = f"; {more} more, of which verdict.json names the first {MOST_EXCUSES}" if more > 0 else ""
        yield f"Excused: {'; '.join(map(str, verdict.excuses[:_EXCUSES]))}{rest}."
    headers = [header, *(one.header for one in (trace.others if trace is not None else ()))]
    if unchecked := sorted({name for one in headers for name in one.fallbacks}):
        yield f"Not checked by kernel.*, since Triton's interpreter ran it: {'; '.join(unchecked)}."


def by_name(numbers: Mapping[str, int]) -> str:
    """How often each of some things was there, such as rules."""
    return ", ".join(f"{name} {number}" for name, number in sorted(numbers.items()))


def _why_unseen(engine: EngineInfo, unseen: Mapping[str, int]) -> str:
    """What hides numbers in this mode."""
    if all(catalogue()[rule].stages == ("finished",) for rule in unseen):  # what a message says
        return f"this {engine.title} does not send them, or the trace is older than the rule"
    drawn = "it depends on what a request that samples drew, and the coins that were recorded do not tell"
    return f"it ran in a CUDA graph, or {drawn}" if engine.mode.startswith("graphs ") and engine.device == "cuda" else drawn


def headline(header: Header, verdict: Verdict) -> str:
    """Rule and place in one line, and why it is unknown: for lists that have one line for each finding."""
    found, reason = verdict.first, " ".join(verdict.reason.split())
    if found is None:
        return f"{verdict.rule or verdict.status}: {reason}" if reason else verdict.status
    line = f"{found.rule}, {place_of(found, header.case.num_steps, model_of(header).mtp_layers > 0)}"
    return f"{line}; unknown: {reason}" if verdict.status == "unknown" else line


def _divergence(found: Divergence, header: Header, view: View, columns: int, owners: Provenance | None) -> list[str]:
    model, num_steps = model_of(header, view), header.case.num_steps
    layers = model.mtp_layers > 0
    rule = sentence_of(found.rule, layers, not model.ahead)
    return [
        f"  {found.rule}",
        *_field("at", f"{place_of(found, num_steps, layers)} (scheduler iteration {found.iteration})", columns),
        *_field("index", found.index, columns),
        *_field("expected", found.expected, columns),
        *_field("actual", found.actual, columns),
        *([] if owners is None or not owners.text else _field("it is" if owners.sure else "may be", owners.text, columns)),
        *(_field("whose", f"unknown: {owners.failure}", columns) if owners is not None and owners.failure else []),
        *([*fold(found.why, columns)] if found.why else []),
        *fold(f"Must hold (eagletwin's design, {rule.section}): {rule.sentence}", columns),
    ]


def _field(name: str, value: str, columns: int) -> list[str]:
    """A line with a name; what is too long goes on below its beginning."""
    return fold(value, columns, f"  {name:10}", " " * 12) or [f"  {name}"]


# Lines of a log that GitHub shows beside a pull request: `::error file=…,line=…,title=…::message`.
#
# What stands in them comes from trees and exceptions that others wrote, so each part is escaped as GitHub reads it back: no
# text ends the line, or a property, before its end.


def error(message: str, title: str, file: str = "", line: int = 0) -> str:
    """An error, at a line of a file if one is named."""
    where = [f"file={_property(file)}"] if file else []
    where += [f"line={line}"] if file and line else []
    return f"::error {','.join([*where, f'title={_property(title)}'])}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
