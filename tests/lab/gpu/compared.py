"""Two runs of one case compared: with pauses between the streams of a GPU, and in two types of numbers."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from msgspec import Struct, field
from torch import Tensor

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.records import Jitter, Jittered, Pause, Record, accept_lengths
from eagletwin.harness.core.run_spec import Limits
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.engines.host import EngineProcess
from eagletwin.harness.judge.trace_diff import diff

# Races between the streams of a GPU: a case that was judged runs again with pauses, and must be answered alike.
#
# The taps wait for the GPU, and so hide a missing wait. A second run has none of them (engines/sglang/drive.py); of it is known
# what requests were sent (tokens, why they ended, counts, how many drafts each round accepted, logprobs) and which rows the
# prefix cache keeps. Greedy tokens do not depend on drafts: a draft that was raced shows in the accepted ones, or in the rows.

RACE = "race"  # of a case that was answered otherwise with pauses: in the place of a rule, which it is not
TOLD = ("finished", "cached")  # stages of what requests were sent, and of what the prefix cache keeps
_PLACES = ("slots", "window_slots")  # which slots rows have is nobody's answer
_LIMITS = Limits(step=20.0, case=60.0)


class Race(Struct, frozen=True, kw_only=True):
    """A run with pauses.

    points, pauses  where there might have been one, and where there was: a point's number, place, microseconds
    compared        numbers and tensors
    differs         the first that is not as it was without pauses, or how the run ended; empty: nothing
    """

    jitter: Jitter
    points: int = 0
    pauses: tuple[Pause, ...] = ()
    compared: int = 0
    differs: str = ""


def jitter_of(seed: int) -> Jitter:
    """Pauses for the run of this seed: many short ones, and for odd seeds few long ones, which outlast a batch's way through
    Python."""
    return Jitter(seed, share=0.05, longest=60_000) if seed % 2 else Jitter(seed)


def race(engine: EngineProcess, case: Case, judged: Trace, jitter: Jitter, folder: Path) -> Race:
    """Run a case once more with pauses, its trace in `folder`. judged: the run that was judged, and is equal."""
    return raced(judged, engine.run(case, folder, _LIMITS, jitter=jitter), jitter)


def raced(judged: Trace, other: Trace, jitter: Jitter) -> Race:
    """What became of a run with pauses: `other`."""
    found = other.header.jittered
    jittered = found if isinstance(found, Jittered) else Jittered(jitter, 0, ())
    result = Race(jitter=jitter, points=jittered.points, pauses=jittered.pauses)
    ending = other.header.ending
    if ending.kind != "finished":
        return msgspec.structs.replace(result, differs=f"{ending.kind} {ending.detail}".strip())
    compared = diff(told(judged), told(other))
    wrong = next((one for one in compared.differences if not one.bits), None)
    differs = f"{wrong.where}: {wrong.left} | {wrong.right}" if wrong is not None else ""
    return msgspec.structs.replace(result, compared=compared.compared, differs=differs)


def told(trace: Trace) -> Trace:
    """What requests were sent, and the rows that the prefix cache keeps; of each rank."""
    records, tensors = list[Record](), dict[str, Tensor | Array]()
    for number, record in enumerate(trace.header.records):
        if record.stage in TOLD:
            names = tuple(name for name in record.tensors if name not in _PLACES)
            tensors |= {f"{len(records)}.{name}": trace.tensors[f"{number}.{name}"] for name in names}
            records.append(msgspec.structs.replace(record, tensors=names))
    header = msgspec.structs.replace(trace.header, records=tuple(records))
    return Trace(header, tensors, [told(other) for other in trace.others])


# How far apart two engines are that compute in different types: the rows they store, the tokens they choose, what they accept.
#
# Two traces of one case. A row or a choice is compared where both engines had seen the same tokens; from the first token that
# they decide otherwise on, they run different texts. Nothing here says which of the two is right.

# Width of a bin of differences, as a share of a row's largest number: an eighth of what one rounding to bfloat16 may be off.
BIN = 2.0**-11


class Rows(Struct):
    """Differences of rows of one kind, each relative to the row's largest number: counts by bins of BIN, and the largest."""

    bins: dict[int, int] = field(default_factory=dict)
    largest: float = 0.0

    def quantile(self, share: float) -> float:
        """The middle of the bin below which this share of the rows is."""
        left = share * sum(self.bins.values())
        for number, count in sorted(self.bins.items()):
            left -= count
            if left <= 0:
                return (number + 0.5) * BIN
        return 0.0


class Apart(Struct):
    """Sums over cases. Of pairs, the first is the first engine's.

    rows      by kind
    proposed, decided  draft tokens of a committed row, rank by rank, and tokens that the target decided: how many were compared
              after the same tokens, and how many of them are different
    tokens    of the outputs (the second engine's), and how many of them come before the first that differs; requests likewise
    rounds    verify rounds; accepted: tokens that they committed, the bonus token counted
    """

    rows: dict[str, Rows] = field(default_factory=dict)
    proposed: tuple[int, int] = (0, 0)
    decided: tuple[int, int] = (0, 0)
    tokens: tuple[int, int] = (0, 0)
    requests: tuple[int, int] = (0, 0)
    rounds: tuple[int, int] = (0, 0)
    accepted: tuple[int, int] = (0, 0)

    def __add__(self, other: "Apart") -> "Apart":
        kinds = {**self.rows, **other.rows}
        return Apart(
            {kind: _merged([part.rows[kind] for part in (self, other) if kind in part.rows]) for kind in kinds},
            *(_plus(getattr(self, name), getattr(other, name)) for name in Apart.__struct_fields__[1:]),
        )


def _plus(one: tuple[int, int], other: tuple[int, int]) -> tuple[int, int]:
    return one[0] + other[0], one[1] + other[1]


def _merged(parts: list[Rows]) -> Rows:
    bins: dict[int, int] = {}
    for part in parts:
        for number, count in part.bins.items():
            bins[number] = bins.get(number, 0) + count
    return Rows(bins, max(part.largest for part in parts))


def apart(one: Trace, other: Trace) -> Apart:
    """Compare what one engine did with what another did (whose numbers are what differences are relative to)."""
    result = Apart(rounds=(_rounds(one), _rounds(other)), accepted=(_accepted(one), _accepted(other)))
    other_number = {record.key: (number, before) for number, record, before in _with_context(other)}
    for own_number, record, before in _with_context(one):
        if record.key not in other_number or record.stage not in _STAGES:
            continue
        number, context = other_number[record.key]
        if record.stage == "finished":
            _outputs(result, one.integers(own_number, "tokens"), other.integers(number, "tokens"))
        elif before == context:
            for kind, left, right in _rows(record, one, own_number, other, number):
                _note(result.rows.setdefault(kind, Rows()), left, right)
            _choices(result, record, one, own_number, other, number)
    return result


_STAGES = ("target.extend", "prefill", "draft", "target.verify", "verify", "extend", "finished")


def _with_context(trace: Trace) -> Iterator[tuple[int, Record, list[int]]]:
    """Each record of a request, with the tokens that were committed when it was over (of verify, when it began)."""
    tokens = {request.id: list(request.prompt) for request in trace.header.case.requests}
    for number, record in enumerate(trace.header.records):
        if record.request not in tokens:
            continue
        own_number = tokens[record.request]
        if record.stage == "prefill" and record.numbers["final"]:
            # what the prompt is followed by is a choice of this record: the target's rows are the prompt's alone
            yield number, record, own_number[: record.numbers["end"]]
            tokens[record.request] = [*own_number[: record.numbers["end"]], *trace.integers(number, "next_token")]
            continue
        yield number, record, list(own_number)
        if record.stage == "verify":
            tokens[record.request] = own_number + trace.integers(number, "predicted")


def _rounds(trace: Trace) -> int:
    return sum(record.stage == "verify" for record in trace.header.records)


def _accepted(trace: Trace) -> int:
    return sum(accept_lengths(trace.header.records))


def _rows(record: Record, one: Trace, own_number: int, other: Trace, other_number: int) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Rows [R, ..] of the two that are of the same tokens, by kind."""

    def same(*names: str) -> bool:
        """Whether these tensors are the same in both; names that a record of this kind lacks are left out."""
        return all(
            one.integers(own_number, name) == other.integers(other_number, name) for name in names if name in record.tensors
        )

    def both(name: str) -> tuple[Tensor, Tensor]:
        return one.tensor(own_number, name), other.tensor(other_number, name)

    def stored(part: str) -> tuple[Tensor, Tensor]:
        """Keys and values [R, 2, L, ..] of each engine, as rows."""
        left, right = both(f"{part}_kv")
        return left.flatten(1), right.flatten(1)

    if record.stage == "target.extend" and same("input_ids"):
        yield "target.hidden", *both("hidden_out")
    elif record.stage == "target.verify" and "hidden_out" in record.tensors:
        left, right = both("hidden_out")
        yield "target.hidden", left[:1], right[:1]  # of the bonus token; the tree that grows from it may differ
    elif record.stage in ("prefill", "extend"):
        for part in ("target", "draft"):
            if same(f"{part}_rows", *(() if part == "target" else ("next_token",))):  # which the draft's last row consumes
                yield f"{part}.kv", *stored(part)
        if same("next_token") and "proposal_hidden" in record.tensors:
            left, right = both("proposal_hidden")
            yield "draft.hidden", left[None], right[None]
    elif "scratch_kv" in record.tensors and same("tokens", "expanded", "selected", "candidate_tokens"):
        yield "draft.scratch_kv", *stored("scratch")


def _note(rows: Rows, left: Tensor, right: Tensor) -> None:
    if left.shape != right.shape or not left.numel():
        return
    left, right = left.double().flatten(1), right.double().flatten(1)
    share = (left - right).abs().amax(1) / right.abs().amax(1).clamp(min=1e-30)
    rows.largest = max(rows.largest, float(share.max()))
    for number in (share / BIN).long().tolist():
        rows.bins[number] = rows.bins.get(number, 0) + 1


def _choices(result: Apart, record: Record, one: Trace, own_number: int, other: Trace, other_number: int) -> None:
    if record.stage == "verify":
        found = [trace.integers(number, "predicted")[:1] for trace, number in ((one, own_number), (other, other_number))]
        result.decided = _plus(result.decided, _differing(*found))
    elif record.stage == "extend" or (record.stage == "prefill" and record.numbers["final"]):
        if record.stage == "prefill":
            found = [trace.integers(number, "next_token") for trace, number in ((one, own_number), (other, other_number))]
            result.decided = _plus(result.decided, _differing(*found))
            if found[0] != found[1]:
                return  # its draft consumed another token
        found = [trace.integers(number, "proposal") for trace, number in ((one, own_number), (other, other_number))]
        result.proposed = _plus(result.proposed, _differing(*found))


def _differing(left: list[int], right: list[int]) -> tuple[int, int]:
    pairs = list(zip(left, right, strict=False))
    return len(pairs), sum(a != b for a, b in pairs)


def _outputs(result: Apart, left: list[int], right: list[int]) -> None:
    same = next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    result.tokens = _plus(result.tokens, (len(right), same))
    result.requests = _plus(result.requests, (1, int(left != right)))


def apart_text(parts: Iterable[Apart]) -> str:
    """The figures of all jobs together, as text."""
    total = sum(parts, Apart())
    lines = [
        f"{kind:17} {sum(rows.bins.values()):8} rows, difference: median {rows.quantile(0.5):.4f}, "
        f"99 % {rows.quantile(0.99):.4f}, largest {rows.largest:.4f}"
        for kind, rows in sorted(total.rows.items())
    ]
    for word, (count, otherwise) in (("proposed", total.proposed), ("decided", total.decided)):
        lines.append(f"tokens {word} after the same tokens: {otherwise} of {count} otherwise")
    (requests, otherwise), (tokens, same) = total.requests, total.tokens
    lines.append(f"outputs: {otherwise} of {requests} otherwise; {same} of {tokens} tokens before the first that differs")
    lengths = [accepted / max(1, rounds) for accepted, rounds in zip(total.accepted, total.rounds, strict=True)]
    lines.append(f"accept length: {lengths[0]:.3f} and {lengths[1]:.3f}, in {total.rounds[0]} and {total.rounds[1]} rounds")
    return "\n".join(lines)
