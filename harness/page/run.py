"""The page of one run: a trace, its verdict, and the argument that the terminal has. Also of a recorded request."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Protocol

from eagletwin.harness.core.records import Header
from eagletwin.harness.core.signature import place_of
from eagletwin.harness.core.terminal import asked_the_impossible, compared_in_part, count, others_in_plain_decode
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.core.verdict import DECLARED_VIEW, Divergence, Verdict
from eagletwin.harness.judge.model import model_of
from eagletwin.harness.judge.provenance import DivergenceContext, Provenance, provenance_of, rejudge_with_context
from eagletwin.harness.judge.rules import sentence_of

from .document import Document, DocumentSection, Fields, TableCell, table
from .numbers import tables_of
from .render import NAME, write_page
from .timeline import timeline_of
from .trees import trees_of

_MOST_LATER = 300  # divergences that are listed


class Concluded(Protocol):
    """What a command has of a run when it is over: check's Outcome."""

    @property
    def folder(self) -> Path: ...
    @property
    def trace(self) -> Trace: ...
    @property
    def verdict(self) -> Verdict: ...
    @property
    def report(self) -> str: ...
    @property
    def again(self) -> str: ...
    @property
    def known(self) -> str: ...


def write_run(outcome: Concluded) -> Path | None:
    """report.html in the run folder of an outcome, as write_page does."""
    folder = outcome.folder

    def page() -> Document:
        return run_page(
            outcome.trace,
            outcome.verdict,
            argument=outcome.report,
            again=(outcome.again,) if outcome.again else (),
            known=outcome.known,
            files=files_of(folder),
        )

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
        timeline=timeline_of([trace.judged_of(found.rank if found is not None else None)], divergences),
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
    yield "SGLang", engine.version
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
