"""How far apart two engines are that compute in different types: the rows they store, the tokens they choose, what they accept.

Two traces of one case. A row or a choice is compared where both engines had seen the same tokens; from the first token that
they decide otherwise on, they run different texts. Nothing here says which of the two is right.
"""

from collections.abc import Iterable, Iterator

from msgspec import Struct, field
from torch import Tensor

from eagletwin.harness.core.records import Record, accept_lengths
from eagletwin.harness.core.trace import Trace

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
