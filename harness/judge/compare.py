"""How two numbers are compared, and what is kept of it: the vocabulary in which rules.py speaks.

A Place says where in the flow of data a comparison stands, so that the first of all findings is the cause and the rest its
consequences, whatever order the engine happened to record them in.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from eagletwin.harness.trace import Record

from .bounds import error_of, is_tie, undecided
from .verdict import Divergence

Phase = Literal[
    "iteration", "target.extend", "draft.extend", "draft", "target.verify", "verify", "draft.extend_decode", "finished"
]

# Order of data flow within one scheduler iteration.
_PHASES: tuple[Phase, ...] = (
    "iteration",
    "target.extend",
    "draft.extend",
    "draft",
    "target.verify",
    "verify",
    "draft.extend_decode",
    "finished",
)


@dataclass(frozen=True, slots=True)
class Place:
    """A record, the phase of its iteration in which the number was made, and the draft decode step where there is one.

    output: the number comes out of a forward; its inputs and the KV rows that it wrote come before.
    """

    record: Record
    phase: Phase
    step: int = 0
    output: bool = False


@dataclass(slots=True)
class Findings:
    """What the comparisons came to. `found` holds (order, divergence)."""

    found: list[tuple[tuple[int, ...], Divergence]] = field(default_factory=list)
    checked: Counter[str] = field(default_factory=Counter)
    choices: int = 0
    ties: int = 0
    headroom: float = 0.0

    def in_order(self) -> list[Divergence]:
        """The divergences in the order in which data flows."""
        return [divergence for _, divergence in sorted(self.found, key=lambda pair: pair[0])]


class Compare:
    """Compares, and fills `findings`. `requests`: ids in the order of the case; `without`: rules that are switched off."""

    def __init__(self, requests: list[str], without: frozenset[str]) -> None:
        self.findings = Findings()
        self._order = {request: n for n, request in enumerate(requests)}
        self._without = without

    def on(self, rule: str) -> bool:
        """Whether a rule is to be checked; counts that it was."""
        if rule in self._without:
            return False
        self.findings.checked[rule] += 1
        return True

    def report(self, place: Place, rule: str, index: str, expected: object, actual: object, why: str = "") -> None:
        record, rank = place.record, len(self.findings.found)  # rules of one stage are checked in the order of data flow
        order = (
            record.iteration,
            _PHASES.index(place.phase),
            place.step,
            place.output,
            self._order.get(record.request, -1),
            rank,
        )
        divergence = Divergence(
            rule=rule,
            request=record.request,
            round=record.round,
            stage=record.stage,
            step=place.step if record.stage == "draft" else record.step,
            iteration=record.iteration,
            index=index,
            expected=str(expected),
            actual=str(actual),
            why=why,
        )
        self.findings.found.append((order, divergence))

    def integers(
        self, place: Place, rule: str, expected: list[int], actual: list[int], rows: str, first: int, why: str = ""
    ) -> None:
        """Compare exactly; report the first row that differs. Rows are called `rows` and numbered from `first`."""
        if not self.on(rule):
            return
        if len(expected) != len(actual):
            self.report(place, rule, f"number of {rows}s", len(expected), len(actual), why)
            return
        wrong = [n for n, (must, has) in enumerate(zip(expected, actual, strict=True)) if must != has]
        if wrong:
            at = wrong[0]
            index = f"{rows} {first + at}" + (f", and {len(wrong) - 1} more" if len(wrong) > 1 else "")
            self.report(place, rule, index, expected[at], actual[at], why)

    def floats(self, place: Place, rule: str, expected: Tensor, actual: Tensor, rows: list[str]) -> None:
        """Compare rows [R, ..] within the bound; report the first row that differs, by its largest error."""
        if not self.on(rule):
            return
        if expected.shape != actual.shape:
            self.report(place, rule, "shape", tuple(expected.shape), tuple(actual.shape))
            return
        if not len(expected):
            return
        share = error_of(expected, actual)
        wrong = (share > 1).nonzero().flatten().tolist()
        good = share[share <= 1]
        if len(good):
            self.findings.headroom = max(self.findings.headroom, float(good.max()))
        if wrong:
            at = wrong[0]
            must, has = expected[at].flatten(), actual[at].double().flatten()
            worst = int((has - must).abs().nan_to_num(torch.inf).argmax())
            size = f"{float(share[at]):.3g} times the bound"
            index = f"{rows[at]}, element {worst}" + (f", and {len(wrong) - 1} more rows" if len(wrong) > 1 else "")
            self.report(place, rule, index, f"{float(must[worst]):.6g}", f"{float(has[worst]):.6g} ({size})")

    def choice(self, place: Place, rule: str, logits: Tensor, actual: int, index: str) -> None:
        """An argmax over logits [V]. A different choice is a divergence only if the reference itself can tell the two apart."""
        if not self.on(rule):
            return
        self.findings.choices += 1
        expected = int(logits.argmax())
        if not 0 <= actual < len(logits):
            self.report(place, rule, index, expected, f"{actual}, outside the vocabulary")
            return
        if is_tie(logits):
            self.findings.ties += 1
        if actual != expected and not undecided(logits, expected, actual):
            margin = float(logits[expected] - logits[actual])
            self.report(place, rule, index, expected, f"{actual} (its logit is {margin:.3g} lower)")
