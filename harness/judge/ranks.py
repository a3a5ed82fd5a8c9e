"""A worker of several ranks (tensor parallelism): what each must store, and what all must agree on.

Each rank is a scheduler and worker of its own, which holds a part of every layer. KV heads are dealt out, in order. All else
(hidden states, logits, choices, tables) is whole on each, since partial sums are added up over all ranks before anybody looks.
So a rank is judged like a worker that is alone, but for its slice of the rows; and what is an integer must be the same on all.
Of a pipeline the last stage is judged. The stages before it have no draft: what they count and what they send must be what the
last one counts and sends, and what they compute is in all that the last one goes on from. What they leave in the prefix cache,
rules/stored.py compares.
With DP attention each rank is judged as one that is alone, by the part of the case that is its own.
But for which stored rows a record has: a row that was computed again, after a retraction, is recorded where the bits of the
rank's own heads are others than before. That no row is missing is asked of each rank (completeness.py).
"""

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.records import Header, Record
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.families import RECIPES

from .compare import PHASE_OF, Findings, Place, divergence_of, order_of

_RULE, _GATHERED = "ranks.agree", "ranks.gathered"

_ROWS = {"target_kv", "draft_kv"}  # what a stage's own layers keep
_OF_EACH = ("iteration", "finished", "cached", "flushed")  # records that each stage of a pipeline makes
_LAST = 1 << 30  # of two divergences at one place, that of a rule that knows the right value comes first


def heads(header: Header, part: str) -> slice:
    """Which KV heads of the target or the draft the rank of this trace holds. Of latent attention each holds the whole row.

    Where heads are fewer than ranks the engine repeats them on a GPU and adds empty ones on a CPU; no case runs like that.
    """
    engine, recipe = header.engine, RECIPES[header.case.model]
    shape = recipe.target if part == "target" else recipe.draft
    if engine.tp == 1 or shape.latent is not None:
        return slice(None)
    count = shape.num_kv_heads
    each, left = divmod(count, engine.tp)
    if left or not each:
        raise ValueError(f"{count} KV heads for {engine.tp} ranks")
    return slice(engine.rank * each, (engine.rank + 1) * each)


def unlike(trace: Trace) -> str:
    """Why these are not the traces of all ranks of one run; empty if they are."""
    header = trace.header
    count = header.engine.tp * header.engine.dp
    if len(trace.ranks) != count:
        return f"a trace of rank {header.engine.rank}, of {count} ranks, with {len(trace.others)} others"
    if len(trace.processes) != count * header.engine.pp:
        return f"a trace of the last of {header.engine.pp} stages, with {len(trace.others)} of others"
    for rank, one in enumerate(trace.processes):
        if one.header.engine.rank != rank:
            return f"in place of rank {rank}'s trace there is one of rank {one.header.engine.rank}"
        alike = trace.earlier or header.engine.dp > 1  # a stage has no draft, and a rank of DP attention may have no request
        for name in ("case", "weights", "ending") if alike else ("case", "weights", "inner", "ending"):
            if getattr(one.header, name) != getattr(header, name):
                return f"rank {rank}'s trace is of another {name} than rank 0's"
        # what each stage of a pipeline says of itself alone
        own = {"first_layer": header.engine.first_layer, "worker": header.engine.worker} if header.engine.pp > 1 else {}
        if replace(one.header.engine, rank=0, **own) != header.engine:
            return f"rank {rank}'s trace is of another engine than rank 0's"
    return ""


def merge_ranks(trace: Trace, each: Sequence[Findings], without: frozenset[str]) -> Findings:
    """The results of all ranks, in the order in which data flows through all of them."""
    if len(each) == 1:
        for rank, earlier in enumerate(trace.earlier if _RULE not in without else (), 1):
            _agree(trace, earlier, rank, each[0])
        return each[0]
    findings = Findings()
    for rank, one in enumerate(each):
        findings.divergences += [((*order, rank), replace(divergence, rank=rank)) for order, divergence in one.divergences]
        findings.exhibits |= {(*order, rank): shown for order, shown in one.exhibits.items()}
        for (request, stage), scope in one.scopes.items():
            own = findings.scope(request, stage)
            own += scope
        findings.impossible |= one.impossible
        findings.choices += one.choices
        findings.ties += one.ties
        findings.adopted += one.adopted
        findings.excuses += [((*order, rank), excuse) for order, excuse in one.excuses]
        findings.relaxed += one.relaxed
        findings.headroom = max(findings.headroom, one.headroom)
    if trace.header.engine.dp > 1:
        if _GATHERED not in without:
            _compare_gathered(trace, findings)
    elif _RULE not in without:
        for rank, other in enumerate(trace.others, 1):
            _agree(trace, other, rank, findings)
    return findings


def _compare_gathered(trace: Trace, findings: Findings) -> None:
    """With DP attention: compare what each rank counts before each forward, of the tokens of all ranks, with what rank 0 does.
    Where the run ended early, one of them may have got further."""
    gathered = [[n for n, one in enumerate(rank.header.records) if one.stage == "gathered"] for rank in trace.processes]
    if trace.header.ending.kind == "finished" and len({*map(len, gathered)}) > 1:
        each, record = ", ".join(str(len(own)) for own in gathered), trace.header.records[0]
        _report(trace, findings, record, 0, "forwards of each rank", "as many on all", each, _GATHERED)
    for rank, other in enumerate(trace.others, 1):
        for first, number in zip(gathered[0], gathered[rank], strict=False):
            records = trace.header.records[first], other.header.records[number]
            models = [("draft", "target")[record.numbers["target"]] for record in records]
            counts = trace.integers(first, "counts"), other.integers(number, "counts")
            for index, (expected, actual) in {"model": models, "tokens of each rank": counts}.items():
                if expected != actual:
                    _report(trace, findings, records[1], rank, index, f"{expected}, as on rank 0", str(actual), _GATHERED)


def _agree(trace: Trace, other: Trace, rank: int, findings: Findings) -> None:
    """Compare every integer of a rank with rank 0's. Where the run ended early, one of them may have got further.

    Of an earlier stage of a pipeline what it counted and sent is compared with what the last one did. It relays what is sent:
    floats, too, are the same to the bit."""
    stage = bool(trace.earlier)
    whose = "as of the last stage" if stage else "as on rank 0"
    theirs = {record.key: number for number, record in enumerate(other.header.records)}
    finished = trace.header.ending.kind == "finished"
    for number, record in enumerate(trace.header.records):
        at = theirs.pop(record.key, None)
        if at is None:
            if finished and (record.stage in _OF_EACH or not stage):
                _report(trace, findings, record, rank, "the record", f"there, {whose}", "absent")
            continue
        findings.scope("", "ranks").checked[_RULE] += 1
        one = other.header.records[at]
        for name in sorted(record.numbers.keys() | one.numbers.keys()):
            expected, actual = record.numbers.get(name), one.numbers.get(name)
            if expected != actual:
                _report(trace, findings, record, rank, name, f"{expected}, {whose}", str(actual))
        for name in sorted({*record.tensors, *one.tensors} - (_ROWS if stage else set())):
            if name not in record.tensors or name not in one.tensors:
                said = ("there", "absent") if name in record.tensors else ("absent", "there")
                _report(trace, findings, record, rank, name, f"{said[0]}, {whose}", said[1])
                continue
            own = stage or not (name.endswith("_rows") or trace.tensor(number, name).is_floating_point())
            if own and (found := _unequal(name, trace.array(number, name), other.array(at, name))):
                index, right, wrong = found
                _report(trace, findings, record, rank, index, f"{right}, {whose}", wrong)
    for at in theirs.values() if finished else ():
        _report(trace, findings, other.header.records[at], rank, "the record", f"absent, {whose}", "there")


def _unequal(name: str, expected: Array, actual: Array) -> tuple[str, str, str] | None:
    """Where an array is another than the right one, what it must be there, and what it is; None: it is the same."""
    if expected.shape != actual.shape:
        return f"shape of {name}", str(list(expected.shape)), str(list(actual.shape))
    if np.array_equal(expected, actual, equal_nan=expected.dtype.kind == "f"):
        return None
    pairs = zip(expected.ravel().tolist(), actual.ravel().tolist(), strict=True)
    at, (right, wrong) = next((n, pair) for n, pair in enumerate(pairs) if repr(pair[0]) != repr(pair[1]))
    return f"{name} {at}", str(right), str(wrong)


def _report(
    trace: Trace, findings: Findings, record: Record, rank: int, index: str, expected: str, actual: str, rule: str = _RULE
) -> None:
    # what draft() and verify leave comes after all their steps
    step = record.step if record.stage == "draft.decode" else _LAST if record.stage in ("draft", "verify") else 0
    place = Place(record, PHASE_OF[record.stage], step, True, record.layer)
    requests = {request.id: n for n, request in enumerate(trace.header.case.requests)}
    divergence = divergence_of(record, rule, index, expected, actual, rank=rank)
    findings.divergences.append(((*order_of(place, requests), _LAST, rank), divergence))
