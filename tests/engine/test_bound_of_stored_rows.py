"""Stored rows: the keys and the values of each layer are compared by their own magnitude, not by the largest of all of them."""

from typing import Any

import pytest
import torch

from eagletwin.harness.core.trace import Trace
from eagletwin.harness.judge.bounds import FLOAT32
from eagletwin.harness.judge.judge import judge
from eagletwin.harness.judge.trace_diff import diff

from .changes import changed, every


@pytest.mark.parametrize(
    ("stage", "tensor", "rule"),
    [
        ("prefill", "target_kv", "target.kv"),
        ("prefill", "draft_kv", "draft.kv"),
        ("extend", "draft_kv", "draft.kv"),
        ("cached", "target_kv", "target.kv"),
        ("draft", "scratch_kv", "draft.scratch_kv"),
    ],
)
@pytest.mark.parametrize("which", ["busy_trace", "tree_trace"])
def test_an_error_within_the_bound_of_the_larger_part_alone_is_found_in_the_smaller(
    request: Any, which: str, stage: str, tensor: str, rule: str
) -> None:
    trace: Trace = request.getfixturevalue(which)
    number, row, part, error = smallest_part(trace, stage, tensor)
    rows = trace.tensor(number, tensor).clone()
    values = rows[row].flatten(0, 1)[part]  # [G, D] of the keys or the values of one layer
    values.view(-1)[int(values.abs().argmax())] += error
    wrong = changed(trace, {f"{number}.{tensor}": rows})
    verdict = judge(wrong)
    assert (verdict.status, verdict.rule) == ("diverged", rule), verdict
    assert verdict.first is not None
    assert float(verdict.first.actual.split("(")[1].split()[0]) == pytest.approx(
        error_in_bounds(trace, number, tensor, row, part, error), rel=0.05
    )
    assert not diff(trace, wrong).same


def smallest_part(trace: Trace, stage: str, tensor: str) -> tuple[int, int, int, float]:
    """Record, row and part of the largest ratio of magnitudes within one row, and an error between the bounds of the two."""
    found = []
    for number in every(trace, stage, tensor):
        size = trace.tensor(number, tensor).abs().flatten(3).amax(3).flatten(1)  # [n, 2L]
        ratio = size.amax(1) / size.amin(1)
        row = int(ratio.argmax())
        part = int(size[row].argmin())
        error = FLOAT32.relative * float((size[row].amax() * size[row, part]).sqrt())
        found.append((float(ratio[row]), number, row, part, error))
    ratio, *best = max(found)
    assert ratio > 1.2
    return best[0], best[1], best[2], best[3]


def error_in_bounds(trace: Trace, number: int, tensor: str, row: int, part: int, error: float) -> float:
    values = trace.tensor(number, tensor)[row].flatten(0, 1)[part].double()
    return error / (FLOAT32.relative * float(torch.max(values.abs())))
