"""How two numbers are compared, and what is kept of it: the vocabulary in which rules speak.

Integers are compared at once. Floats and choices are collected and compared many rows at a time, as the arithmetic of one
row costs as much as that of a thousand.

A Place says where in the flow of data a comparison stands, so that the first of all findings is the cause and the rest its
consequences, whatever order the engine happened to record them in.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import torch
from msgspec import Struct

from eagletwin.harness.core.arrays import Array
from eagletwin.harness.core.records import GONE, Record
from eagletwin.harness.core.terminal import count
from eagletwin.harness.core.verdict import Divergence, Excuse
from eagletwin.reference.layers import round_to_fp8

from .bounds import FLOAT32, INDEX_NUMBER, Bounds, kv_parts
from .choices import Ranked

# In the order of data flow within one scheduler iteration.
Phase = Literal[
    "iteration", "target.extend", "draft.extend", "draft", "target.verify", "verify", "draft.extend_decode", "finished"
]

# Rows that wait to be compared. A case of a few requests stays below it; a large one must not be held twice in memory.
_WAITING = 4096

# Parts of a row of layers with compressed rows, and which are stored in FP8 (e4m3): half the distance of two neighbours there
# is a sixteenth of a number, and of the smallest numbers of a row so much of its largest.
_COMPRESSED = (
    ("row", True),
    ("turned part", False),
    ("compressed row", True),
    ("turned part of the compressed row", False),
    ("index key", True),
)
E4M3_ROUNDING, E4M3_SMALLEST = 2.0**-4, 2.0**-17


def _rounded_as(stored: Array, wanted: Array) -> Array:
    """Of rows [.., W]: the numbers that are nearest to the stored ones of those that FP8 may make of the wanted ones, by any
    scale."""
    off = E4M3_ROUNDING * np.abs(wanted) + E4M3_SMALLEST * np.abs(wanted).max(-1, keepdims=True)
    nearest: Array = np.clip(stored, wanted - off, wanted + off)
    return nearest


# The phase in which what a record holds was made. A forward and what it left have the same.
PHASE_OF: dict[str, Phase] = {
    **{phase: phase for phase in get_args(Phase)},
    **dict.fromkeys(("batch", "fed", "read", "pool", "idle", "gathered"), "iteration"),
    **dict.fromkeys(("draft.decode", "steps"), "draft"),
    **dict.fromkeys(("cached", "flushed"), "finished"),
    "prefill": "draft.extend",
    "extend": "draft.extend_decode",
}


class Place(Struct, frozen=True, gc=False):
    """A record, the phase of its iteration in which the number was made, and the draft decode step or layer where there is one.

    output: the number comes out of a forward; its inputs and the KV rows that it wrote come before.
    """

    record: Record
    phase: Phase
    step: int = 0
    output: bool = False
    layer: int = 0


def order_of(place: Place, requests: dict[str, int]) -> tuple[int, ...]:
    """Where a place stands in the flow of data. requests: their order in the case."""
    record = place.record
    phase = get_args(Phase).index(place.phase)
    return record.iteration, phase, place.step, place.layer, place.output, requests.get(record.request, -1)


def divergence_of(record: Record, rule: str, index: str, expected: object, actual: object, **more: Any) -> Divergence:
    """Of a number of this record. more: other fields, also in place of the record's step and layer."""
    where = {"request": record.request, "round": record.round, "stage": record.stage, "iteration": record.iteration}
    said = {"rule": rule, "index": index, "expected": str(expected), "actual": str(actual)}
    return Divergence(**{"step": record.step, "layer": record.layer, **where, **said, **more})


class Exhibit(Struct, frozen=True, kw_only=True, gc=False):
    """The numbers of a comparison that found a divergence, row by row: what a reader is shown around the first wrong one.

    name      of a row
    wrong     rows that differ
    expected, actual  integers [R], or floats [R, N]
    element   of floats: the number of the first wrong row that is farthest off; parts: into how many parts a row falls, each
              with a magnitude of its own
    logits    [V] that the first wrong row is a choice over
    scale     [R]: see Bounds.error_of, where a row's bound does not scale with its own numbers
    """

    name: Callable[[int], str]
    wrong: list[int]
    expected: list[int] | Array
    actual: list[int] | Array
    element: int = 0
    parts: int = 1
    logits: Array | None = None
    scale: Array | None = None


@dataclass(slots=True)
class Scope:
    """The comparisons of one request in one stage, by rule: those made, those that could not be made, and those left out.

    records, rows  how many records of the stage there are, and how many rows they committed; compared, rows_compared: those of
                   records with a comparison
    """

    checked: Counter[str] = field(default_factory=Counter)
    unseen: Counter[str] = field(default_factory=Counter)
    unjudged: Counter[str] = field(default_factory=Counter)
    records: int = 0
    compared: int = 0
    rows: int = 0
    rows_compared: int = 0

    def __iadd__(self, other: "Scope") -> "Scope":
        for name in self.__slots__:
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self


@dataclass(slots=True)
class Findings:
    """Results of the comparisons. `divergences` holds (order, divergence), `exhibits` the numbers of those that have some, by
    order, `scopes` what was compared, by request and stage, `excuses` (order, excuse)."""

    divergences: list[tuple[tuple[int, ...], Divergence]] = field(default_factory=list)
    exhibits: dict[tuple[int, ...], Exhibit] = field(default_factory=dict)
    scopes: dict[tuple[str, str], Scope] = field(default_factory=dict)
    impossible: dict[str, int] = field(default_factory=dict)
    choices: int = 0
    ties: int = 0
    adopted: int = 0
    excuses: list[tuple[tuple[int, ...], Excuse]] = field(default_factory=list)
    relaxed: int = 0
    headroom: float = 0.0

    def in_order(self) -> list[Divergence]:
        """The divergences in the order in which data flows."""
        return [divergence for _, divergence in sorted(self.divergences, key=lambda pair: pair[0])]

    def scope(self, request: str, stage: str) -> Scope:
        return self.scopes.setdefault((request, stage), Scope())

    def total(self, counts: Literal["checked", "unseen", "unjudged"]) -> dict[str, int]:
        """The comparisons of each rule that were made, could not be made, or were left out."""
        total = Counter[str]()
        for scope in self.scopes.values():
            total.update(getattr(scope, counts))
        return dict(total)


class _Floats(Struct, frozen=True, gc=False):
    """Rows that wait: expected, actual [R, N], each of `parts` equal parts with a magnitude of its own; row(n) names the n-th;
    scale [R]: see Bounds.error_of."""

    rank: int
    place: Place
    rule: str
    expected: Array
    actual: Array
    row: Callable[[int], str]
    scale: Array | None
    parts: int = 1


class _Choice(Struct, frozen=True, gc=False):
    """Choices over logits [R, V] that wait: actual [R][k] are the k best of each row, index(row, rank) names one."""

    rank: int
    place: Place
    rule: str
    logits: Array
    actual: list[list[int]]
    index: Callable[[int, int], str]


# In place of a choice that the trace does not show.
UNSEEN = -(1 << 62)


class Compare:
    """Compares. `requests`: ids in the order of the case; `without`: rules that are switched off; latent: where the parts of a
    latent row end (judge/model.py); windows: of models with layers that have one."""

    def __init__(
        self,
        requests: list[str],
        without: frozenset[str],
        bounds: Bounds,
        latent: tuple[int, ...] = (),
        *,
        windows: bool = False,
    ) -> None:
        self._bounds = bounds
        self._latent, self._compressed = latent, len(latent) == len(_COMPRESSED)
        self._windows = windows
        self._findings = Findings()
        self._scope = self._findings.scope("", "")
        self._order = {request: n for n, request in enumerate(requests)}
        self._without = without
        self._rank = 0  # comparisons so far: rules of one stage are checked in the order of data flow
        self._floats: list[_Floats] = []
        self._choices: list[_Choice] = []
        self._waiting = 0
        self._away = False

    def finish(self) -> Findings:
        self._settle()
        return self._findings

    def on(self, rule: str) -> bool:
        """Whether the rule is on. Counts the comparison as checked, or as not possible."""
        if rule in self._without:
            return False
        if self._away:
            self.left_out(rule, 1)
            return False
        self._scope.checked[rule] += 1
        self._rank += 1
        return True

    @contextmanager
    def looking_at(self, record: Record, rows: int, *, away: bool) -> Iterator[None]:
        """Within it what is compared is of this record, which committed so many rows. away: see looking_away."""
        outer, self._scope, before = self._scope, self._findings.scope(record.request, record.stage), self._rank
        scope = self._scope
        try:
            with self.looking_away(away):
                yield
        finally:
            self._scope = outer
        scope.records, scope.rows = scope.records + 1, scope.rows + rows
        if self._rank > before:
            scope.compared, scope.rows_compared = scope.compared + 1, scope.rows_compared + rows

    @contextmanager
    def looking_away(self, away: bool) -> Iterator[None]:
        """Within it no comparison is made if `away`: a request asks for what cannot be, and no number is right. Each that would
        have been made is counted."""
        before, self._away = self._away, self._away or away
        try:
            yield
        finally:
            self._away = before

    def left_out(self, rule: str, times: int) -> None:
        """Comparisons of a rule that are not made for the same reason."""
        if times and rule not in self._without:
            self._scope.unjudged[rule] += times

    def asks_the_impossible(self, request: str, token: int) -> None:
        """Nothing of a request can be judged from this output token on."""
        self._findings.impossible[request] = token

    def not_seen(self, rules: tuple[str, ...], times: int) -> None:
        """Comparisons of these rules that could not be made, `times` of each: what they look at ran in a CUDA graph."""
        for rule in rules:
            if rule not in self._without and not self._away:
                self._scope.unseen[rule] += times

    def count_decisions(self, choices: int, ties: int) -> None:
        """Decisions of verify that were looked at by their coins, and how many of them no engine's rounding decides."""
        self._findings.choices += choices
        self._findings.ties += ties

    def count_relaxed(self) -> None:
        """A token is another than plain decode has, as is declared of penalties."""
        self._findings.relaxed += 1

    def _adopt(self, place: Place, rule: str, index: str, rank: int | None = None) -> None:
        record, order = place.record, (*order_of(place, self._order), self._rank if rank is None else rank)
        excuse = Excuse(kind="tie", rule=rule, request=record.request, round=record.round, stage=record.stage, index=index)
        self._findings.excuses.append((order, excuse))

    def report(
        self,
        place: Place,
        rule: str,
        index: str,
        expected: object,
        actual: object,
        why: str = "",
        shown: Exhibit | None = None,
        rank: int | None = None,
    ) -> None:
        """The comparison that on() last allowed has found a divergence; rank: another one, which had to wait."""
        record, order = place.record, (*order_of(place, self._order), self._rank if rank is None else rank)
        step = place.step if record.stage == "draft" else record.step
        divergence = divergence_of(record, rule, index, expected, actual, step=step, layer=place.layer, why=why)
        self._findings.divergences.append((order, divergence))
        if shown is not None:
            self._findings.exhibits.setdefault(order, shown)  # of several divergences of one comparison: of the first

    def integers(
        self, place: Place, rule: str, expected: list[int], actual: list[int], rows: str, first: int, why: str = ""
    ) -> None:
        """Compare exactly; report the first row that differs. Rows are called `rows` and numbered from `first`."""
        if not self.on(rule):
            return
        if len(expected) != len(actual):
            self.report(place, rule, f"number of {rows}s", len(expected), len(actual), why)
            return
        if expected == actual:
            return
        wrong = [n for n, (one, other) in enumerate(zip(expected, actual, strict=True)) if one != other]
        at = wrong[0]
        index = f"{rows} {first + at}" + (f", and {len(wrong) - 1} more" if len(wrong) > 1 else "")
        shown = Exhibit(name=lambda n: f"{rows} {first + n}", wrong=wrong, expected=expected, actual=actual)
        self.report(place, rule, index, expected[at], actual[at], why, shown)

    def ranking(self, place: Place, rule: str, ranked: Ranked, name: str) -> None:
        """An ordered choice of candidates, which choices.py has looked at; report the first that is surely wrong."""
        if not self.on(rule):
            return
        self._findings.choices += len(ranked.actual)
        self._findings.ties += ranked.ties
        self._findings.adopted += ranked.adopted
        if ranked.adopted:
            self._adopt(place, rule, f"{name}, {count(ranked.adopted, 'place')}")
        if ranked.wrong:
            at = ranked.wrong[0]
            expected, actual = (f"candidate {choice[at]}" for choice in (ranked.expected, ranked.actual))
            shown = Exhibit(
                name=lambda n: f"{name}, place {n}", wrong=ranked.wrong, expected=ranked.expected, actual=ranked.actual
            )
            self.report(place, rule, f"{name}, place {at}", expected, actual, shown=shown)

    def floats(
        self,
        place: Place,
        rule: str,
        expected: Array,
        actual: Array,
        row: Callable[[int], str],
        scale: Array | None = None,
        parts: int = 1,
    ) -> None:
        """Compare rows [R, ..] within the bound; report the first row n that differs, as row(n), by its largest error.

        parts: into how many parts of one length each row falls that do not share a magnitude
        """
        if not self.on(rule):
            return
        if expected.shape != actual.shape:
            self.report(place, rule, "shape", expected.shape, actual.shape)
            return
        rows = len(expected)
        if rows:
            if expected.ndim != 2:
                expected, actual = expected.reshape(rows, -1), actual.reshape(rows, -1)
            self._floats.append(_Floats(self._rank, place, rule, expected, actual, row, scale, parts))
            self._wait(rows)

    def stored_rows(self, place: Place, rule: str, expected: Array, actual: Array, row: Callable[[int], str]) -> None:
        """The same for KV rows [n, 2, L, G, D]: keys and values of each layer are compared by their own magnitude.

        Of latent rows [n, 1, L, 1, D] so are the latent vector, the turned key behind it and the key of an indexer, which is
        stored in FP8. What left a window is not there to be compared: slots.py says whether it might leave.
        """
        if self._compressed and expected.shape == actual.shape:
            self._compressed_rows(place, rule, expected, actual, row)
            return
        if self._windows and expected.shape == actual.shape:
            gone = (actual == GONE).all((1, 3, 4), keepdims=True)  # [n, 1, L, 1, 1]
            expected = np.where(gone, GONE, expected)
        if not self._latent or expected.shape != actual.shape:
            self.floats(place, rule, expected, actual, row, parts=kv_parts(expected))
            return
        begin = 0
        for name, end in zip(("latent vector", "turned key", "index key"), self._latent, strict=False):
            part, begin = slice(begin, end), end
            wanted, stored = expected[..., part], actual[..., part]
            if name == "index key" and self._bounds is not FLOAT32:
                wanted = _rounded_as(stored, wanted)
            elif name == "index key":
                exact, either = (part.numpy() for part in round_to_fp8(torch.from_numpy(wanted), INDEX_NUMBER))
                smallest = INDEX_NUMBER * np.abs(wanted).max(-1, keepdims=True)  # what the smallest codes are off by
                wanted = np.where(np.abs(stored - exact) <= either + smallest, stored, exact)

            def named(n: int, name: str = name) -> str:
                return f"{row(n)}, {name}"

            self.floats(place, rule, wanted, stored, named, parts=kv_parts(expected))

    def _compressed_rows(self, place: Place, rule: str, expected: Array, actual: Array, row: Callable[[int], str]) -> None:
        """Rows [n, 1, L, 1, W] of layers with compressed rows: each part by its own magnitude, and those in FP8 but for one
        rounding. What left a window is not there to be compared: slots.py says whether it might leave."""
        begin, window = 0, self._latent[1]
        for (name, rounded), end in zip(_COMPRESSED, self._latent, strict=True):
            part = slice(begin, end)
            if begin >= expected.shape[-1]:
                break
            wanted, stored, begin = expected[..., part], actual[..., part], end
            if end <= window:
                wanted = np.where((stored == GONE).all((1, 3, 4), keepdims=True), GONE, wanted)
            if rounded:
                wanted = _rounded_as(stored, wanted)

            def named(n: int, name: str = name) -> str:
                return f"{row(n)}, {name}"

            self.floats(place, rule, wanted, stored, named, parts=kv_parts(expected))

    def choice(self, place: Place, rule: str, logits: Array, actual: int, index: str) -> None:
        """An argmax over logits [V]. A different choice is a divergence only if the reference itself can tell the two apart."""
        self.choices(place, rule, logits[None], [[actual]], lambda row, rank: index)

    def choices(
        self, place: Place, rule: str, logits: Array, actual: list[list[int]], index: Callable[[int, int], str]
    ) -> None:
        """The k best of each row of logits [R, V], best first; those that are UNSEEN are left out."""
        if not self.on(rule):
            return
        self._choices.append(_Choice(self._rank, place, rule, logits, actual, index))
        self._wait(len(logits))

    def _wait(self, rows: int) -> None:
        self._waiting += rows
        if self._waiting > _WAITING:
            self._settle()

    def _settle(self) -> None:
        """Compare what waits: together what has equal width."""
        widths: dict[tuple[int, bool, int], list[_Floats]] = {}
        for floats in self._floats:
            widths.setdefault((floats.actual.shape[1], floats.scale is None, floats.parts), []).append(floats)
        for alike in widths.values():
            self._settle_floats(alike)
        shapes: dict[tuple[int, int], list[_Choice]] = {}
        for choice in self._choices:
            shapes.setdefault((choice.logits.shape[1], len(choice.actual[0])), []).append(choice)
        for choices in shapes.values():
            self._settle_choices(choices)
        self._floats, self._choices, self._waiting = [], [], 0

    def _settle_floats(self, alike: list[_Floats]) -> None:
        scales, parts = [floats.scale for floats in alike if floats.scale is not None], alike[0].parts
        expected = np.concatenate([floats.expected for floats in alike])
        actual = np.concatenate([floats.actual for floats in alike])
        share_of_parts = self._bounds.error_of(
            expected.reshape(len(expected) * parts, -1),
            actual.reshape(len(actual) * parts, -1),
            np.concatenate(scales) if scales else None,
        ).reshape(-1, parts)
        share = share_of_parts.max(1)
        good = share <= 1
        if good.any():
            self._findings.headroom = max(self._findings.headroom, float(share[good].max()))
        if good.all():
            return
        begin = 0
        for floats in alike:
            own = slice(begin, begin + len(floats.expected))
            begin, wrong = own.stop, np.flatnonzero(~good[own]).tolist()
            if wrong:
                self._report_floats(floats, wrong, share_of_parts[own][wrong[0]])

    def _report_floats(self, floats: _Floats, wrong: list[int], share: Array) -> None:
        """The first of the wrong rows; share [parts]: its errors as shares of the bound."""
        at, part, width = wrong[0], int(share.argmax()), floats.expected.shape[1] // floats.parts
        exact, actual = floats.expected[at], floats.actual[at].astype(np.float64)
        error = np.nan_to_num(np.abs(actual - exact), nan=np.inf)
        worst = part * width + int(error[part * width : (part + 1) * width].argmax())
        size = f"{float(share[part]):.3g} times the bound"
        more = f", and {len(wrong) - 1} more rows" if len(wrong) > 1 else ""
        index, reported = f"{floats.row(at)}, element {worst}{more}", f"{float(actual[worst]):.6g} ({size})"
        shown = Exhibit(
            name=floats.row,
            wrong=wrong,
            expected=floats.expected,
            actual=floats.actual,
            element=worst,
            parts=floats.parts,
            scale=floats.scale,
        )
        expected = f"{float(exact[worst]):.6g}"
        self.report(floats.place, floats.rule, index, expected, reported, shown=shown, rank=floats.rank)

    def _settle_choices(self, choices: list[_Choice]) -> None:
        logits = np.concatenate([choice.logits for choice in choices])  # [R, V]
        actual = np.array([row for choice in choices for row in choice.actual], np.int64)  # [R, k]
        expected, tied = self._bounds.best(logits, actual.shape[1])  # [R, k] each
        seen, known = actual != UNSEEN, (actual >= 0) & (actual < logits.shape[1])
        self._findings.choices += int(seen.sum())
        self._findings.ties += int((tied & known).sum())
        first = [0]
        for choice in choices:
            first.append(first[-1] + len(choice.actual))
        for row, place in np.argwhere(seen & (actual != expected)).tolist():
            number = bisect_right(first, row) - 1
            choice, at = choices[number], row - first[number]
            best, chosen = int(expected[row, place]), int(actual[row, place])
            if not 0 <= chosen < logits.shape[1]:
                reported = f"{chosen}, outside the vocabulary"
            elif self._bounds.undecided(logits[row], best, chosen):
                self._findings.adopted += 1
                self._adopt(choice.place, choice.rule, choice.index(at, place), choice.rank)
                continue
            else:
                reported = f"{chosen} (its logit is {float(logits[row, best] - logits[row, chosen]):.3g} lower)"
            shown = Exhibit(
                name=partial(choice.index, at),
                wrong=np.flatnonzero(expected[row] != actual[row]).tolist(),
                expected=expected[row].tolist(),
                actual=actual[row].tolist(),
                logits=choice.logits[at],
            )
            self.report(choice.place, choice.rule, choice.index(at, place), best, reported, shown=shown, rank=choice.rank)
