"""Two traces of one case, number for number: what did two engines (or two runs) do differently?

Not the judge: nothing here says which of the two is right. Records are matched by key (request, round, stage, step).
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from msgspec.structs import replace as changed
from torch import Tensor

from eagletwin.harness.check.confirm import Outcome, brief
from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.differs import Watch, doubts_of
from eagletwin.harness.core.errors import EXIT_DIVERGED, EXIT_EQUAL, EXIT_UNKNOWN, InputError
from eagletwin.harness.core.records import Key
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.core.terminal import count, show
from eagletwin.harness.core.trace import Trace, on_host
from eagletwin.harness.engines.source import Source, TooMany, between
from eagletwin.harness.judge.bounds import bounds_of
from eagletwin.harness.judge.distances import Distances
from eagletwin.harness.judge.model import model_of

from ..matrix import Matrix, Question, hosts_of
from ..options import tell
from ..result import DifferenceFacts, DiffFacts, tell_result


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """One tensor or number that differs. `bits` only: floats which differ within the judge's bound."""

    where: str
    left: str
    right: str
    bits: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """compared: how many tensors and numbers were looked at; largest: largest float difference, relative to what the judge's
    bound scales with."""

    differences: list[TensorDifference]
    compared: int
    largest: float

    @property
    def same(self) -> bool:
        return all(difference.bits for difference in self.differences)


def diff(left: Trace, right: Trace) -> Comparison:
    """Compare two traces of the same case, rank by rank. Raises InputError if the cases differ, or how many ranks or stages
    there are."""
    if left.header.case.requests != right.header.case.requests or left.header.weights != right.header.weights:
        raise InputError(
            "the two traces are not of the same requests and weights",
            consequence="nothing was compared",
            remedy="record the same case on both engines",
        )
    if _of_each(left) != _of_each(right):
        raise InputError(
            f"one trace is of {_of_each(left)}, the other of {_of_each(right)}",
            consequence="nothing was compared: each holds another part of the rows",
            remedy="record both with the same --tp and --pp",
        )
    found: list[TensorDifference] = []
    compared, largest = 0, 0.0
    for rank, (one, two) in enumerate(zip(left.processes, right.processes, strict=True)):
        of_rank = _diff_rank(one, two, f"rank {rank}, " if left.others else "")
        found += of_rank.differences
        compared, largest = compared + of_rank.compared, max(largest, of_rank.largest)
    return Comparison(found, compared, largest)


def _of_each(trace: Trace) -> str:
    """Of how many ranks or stages a trace is."""
    return count(len(trace.processes), "stage" if trace.earlier else "rank")


def _diff_rank(left: Trace, right: Trace, rank: str) -> Comparison:
    ours = {record.key: n for n, record in enumerate(left.header.records)}
    theirs = {record.key: n for n, record in enumerate(right.header.records)}
    found: list[TensorDifference] = []
    compared, largest = 0, 0.0
    both = (bounds_of(trace.header.engine.dtype, left.header.case.model) for trace in (left, right))
    bounds = max(both, key=lambda bounds: bounds.relative)
    distances, latent = Distances(left, right, bounds), model_of(left.header).latent
    unknown = set[str]() if left.header.has_logits and right.header.has_logits else {"target_logits"}  # to an older eagletwin
    for key in ours | theirs:
        where = rank + _where(key)
        if key not in ours or key not in theirs:
            found.append(_presence(where, key in ours, key in theirs))
            continue
        a, b = left.header.records[ours[key]], right.header.records[theirs[key]]
        for name in sorted(a.numbers.keys() | b.numbers.keys()):
            compared += 1
            if a.numbers.get(name) != b.numbers.get(name):
                found.append(
                    TensorDifference(f"{where}, {name}", str(a.numbers.get(name)), str(b.numbers.get(name)), bits=False)
                )
        for name in sorted({*a.tensors, *b.tensors} - unknown):
            if name not in a.tensors or name not in b.tensors:
                compared += 1
                found.append(_presence(f"{where}, {name}", name in a.tensors, name in b.tensors))
                continue
            for part, one, two in _parts(name, left.tensor(ours[key], name), right.tensor(theirs[key], name), latent):
                compared += 1
                if one.shape != two.shape:
                    shapes = f"shape {tuple(one.shape)}", f"shape {tuple(two.shape)}"
                    found.append(TensorDifference(f"{where}, {part}", *shapes, bits=False))
                elif not torch.equal(one, two):
                    one, two = _without_shared(one, two)
                    if torch.equal(one, two):
                        continue
                    share = None
                    if one.is_floating_point():
                        share = distances.shares(ours[key], theirs[key], name, on_host(one), on_host(two))
                    largest = largest if share is None else max(largest, float(share.max()) * bounds.relative)
                    found.append(_difference(f"{where}, {part}", one, two, share))
    return Comparison(found, compared, largest)


_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _without_shared(one: Tensor, two: Tensor) -> tuple[Tensor, Tensor]:
    """Both with 0 where both have the same bits of no finite number: a NaN is unequal to itself, and here it is the same."""
    if one.dtype != two.dtype or not one.is_floating_point():
        return one, two
    integers = _BITS[one.element_size()]
    shared = (one.view(integers) == two.view(integers)) & ~one.isfinite()
    return one.masked_fill(shared, 0), two.masked_fill(shared, 0)


def _where(key: Key) -> str:
    return (
        f"{key.stage} step {key.step}"
        + (f", layer {key.layer}" if key.layer else "")
        + (f", attempt {key.attempt}" if key.attempt else "")
        + (f" of request {key.request}, round {key.round}" if key.request else "")
    )


def _parts(name: str, one: Tensor, two: Tensor, latent: int) -> list[tuple[str, Tensor, Tensor]]:
    """What of a tensor is compared by itself, under which name: keys and values are not of one magnitude, nor are the two parts
    of a latent row, of which the first is `latent` wide."""
    if not name.endswith("_kv") or one.shape != two.shape:
        return [(name, one, two)]
    if latent:
        parts = ("latent vector", slice(latent)), ("turned key", slice(latent, None))
        return [(f"{name} ({part})", one[:, 0, ..., at], two[:, 0, ..., at]) for part, at in parts]
    return list(zip((f"{name} (keys)", f"{name} (values)"), one.unbind(1), two.unbind(1), strict=True))


def _difference(where: str, one: Tensor, two: Tensor, share: Array | None) -> TensorDifference:
    """Two tensors of one shape, where they differ most. share [R]: of floats, how far their rows are apart, in bounds."""
    error = (one.double() - two.double()).abs().nan_to_num(torch.inf).flatten()
    at = int(error.argmax())
    if share is not None:
        width = len(error) // len(share)
        row = int(share.argmax())
        at = row * width + int(error[row * width : (row + 1) * width].argmax())
    numbers = str(one.flatten()[at].item()), str(two.flatten()[at].item())
    return TensorDifference(f"{where}, element {at}", *numbers, bits=share is not None and bool(share.max() <= 1))


def comparison_text(result: Comparison, lines: int) -> str:
    """The first `lines` differences, left | right, those beyond the bound first, and the sum."""
    shown = sorted(result.differences, key=lambda difference: difference.bits)[:lines]
    text = [f"{one.where}: {one.left} | {one.right}" + ("  (within the bound)" if one.bits else "") for one in shown]
    hidden = len(result.differences) - lines
    text += [f"… and {hidden} more"] if hidden > 0 else []
    exact = "identical" if not result.differences else f"largest relative float difference {result.largest:.3g}"
    exact = exact if result.compared else "no number"
    word = "UNKNOWN" if not result.compared and result.same else "SAME" if result.same else "DIFFERENT"
    return "\n".join([*text, f"{word}: {result.compared} compared, {len(result.differences)} differ; {exact}"])


def _presence(where: str, left: bool, right: bool) -> TensorDifference:
    left_word, right_word = ("recorded" if there else "absent" for there in (left, right))
    return TensorDifference(where, left_word, right_word, bits=False)


def compare_runs(left: str, right: str, lines: int) -> int:
    """Compare two run folders number for number. Raises InputError."""
    from eagletwin.harness.families.traces import strangers_trace

    return _report([strangers_trace(Path(left)), strangers_trace(Path(right))], (left, right), lines)


def compare_case(
    case: Case, sglangs: tuple[str, str], sources: tuple[Source, Source], lines: int, folder: Path, run: RunSpec
) -> int:
    """Run a case on two SGLangs, such as a pull request and its base, and compare what they recorded.

    Each engine watches the functions in which its SGLang differs from the other, by content: a branch whose changes are
    committed is looked at like one that is dirty.
    """
    matrix, outcomes = Matrix(), list[Outcome]()
    with hosts_of(sources, run.mode, watches(sources) or (None, None)) as hosts:
        for side, host, sglang in zip(("left", "right"), hosts, sglangs, strict=True):
            question = Question(what=case, name=side, out=folder, run=changed(run, sglang=sglang))
            answer = matrix.ask(host, question)
            if (outcome := answer.run) is None:
                print(f"UNKNOWN  {case.name} on SGLang {sglang}\n\n  {answer.error}\n\n  folder: {folder}")
                return EXIT_UNKNOWN
            outcomes.append(outcome)
    left, right = (_line(outcome) for outcome in outcomes)
    return _report([outcome.trace for outcome in outcomes], (left, right), lines)


def _line(outcome: Outcome) -> str:
    """How the run ended, on one line."""
    verdict = outcome.verdict
    word = "" if verdict.status == "equal" else f" {brief(verdict)}"
    return f"SGLang {outcome.trace.header.engine.version}: {verdict.status}{word} ({outcome.folder})"


def watches(sources: tuple[Source, Source]) -> tuple[Watch | None, Watch | None] | None:
    """What each engine looks for: in what it differs from the other; two None: in what it differs from what it was made from,
    since both are releases, or differ in too much. None alone: no file differs."""
    if all(source.difference is None and not source.tree for source in sources):
        return None, None  # two releases
    try:
        return between(*sources)
    except TooMany as error:
        tell(f"{error}, more than are listed: which of their functions run is looked at in each tree by itself")
        return None, None


def _report(traces: list[Trace], sides: tuple[str, str], lines: int) -> int:
    result = diff(*traces)
    print(f"left:  {sides[0]}\nright: {sides[1]}")
    print(comparison_text(result, lines))
    changes = _changes(traces, lines)
    if changes:
        print(changes)
    differences = [DifferenceFacts(where=one.where, left=one.left, right=one.right) for one in result.differences]
    tell_result(DiffFacts(left=sides[0], right=sides[1], same=result.same, compared=result.compared, differences=differences))
    return _exit_code(result, traces)


def _exit_code(result: "Comparison", traces: "list[Trace]") -> int:
    """What the comparison says, where it says anything; else why it does not, printed."""
    if any(one.header.ending.kind != "finished" for trace in traces for one in trace.processes):
        print("One of the two runs did not finish: what is the same until then says nothing about the rest.")
        return EXIT_UNKNOWN
    if result.same and not result.compared:
        print("Nothing was compared: neither trace holds a number.")
        return EXIT_UNKNOWN
    doubts = _doubts(traces)
    if result.same and doubts:
        show("\n".join(f"That says nothing about a change: {doubt}." for doubt in doubts))
        return EXIT_UNKNOWN
    return EXIT_EQUAL if result.same else EXIT_DIVERGED


def _doubts(traces: "list[Trace]") -> list[str]:
    """Why two traces that are the same say nothing about what differs between the two SGLangs; [] if they do."""
    if traces[0].header.engine.version == traces[1].header.engine.version:
        return []
    return doubts_of([trace.differs for trace in traces if trace.differs is not None], mutual=_mutual(traces))


def _mutual(traces: "list[Trace]") -> bool:
    """Whether each trace says in what its SGLang differs from the other's."""
    bases = [trace.differs.base if trace.differs is not None else "" for trace in traces]
    return bases == [trace.header.engine.version for trace in reversed(traces)]


def _changes(traces: "list[Trace]", lines: int) -> str:
    """The functions in which the two SGLangs differ, run and not run, `lines` of each; "" if they were not compared."""
    if not _mutual(traces):
        return ""
    text = ["The two SGLangs differ, file by file:"]
    for side, trace in zip(("left:  ", "right: "), traces, strict=True):
        assert trace.differs is not None
        listed = trace.differs.listed(shown=lines, gone="Only in the other") or [
            "Nothing but comments, documentation, and what the other has alone."
        ]
        text += [f"  {side if number == 0 else '       '}{line}" for number, line in enumerate(listed)]
    return "\n".join(text)
