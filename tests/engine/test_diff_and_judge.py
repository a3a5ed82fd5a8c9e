"""`diff` measures as the judge does: what is outside the judge's bound is a difference, in every float of a trace."""

from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from eagletwin.harness.commands.compare.numbers import diff
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.judge.judge import judge

from ..rows import long
from .changes import changed


def moved(tensor: Tensor, at: int, factor: float) -> Tensor:
    """Number `at` is a factor off."""
    other = tensor.clone()
    other.view(-1)[at] *= factor
    return other


@pytest.mark.parametrize("which", ["busy_trace", *long("tree_trace", "sampled_trace")])
def test_what_the_judge_calls_a_divergence_is_never_the_same(request: Any, which: str) -> None:
    """The largest number of a tensor, one in the middle and the smallest, off by a thousandth, a hundredth and a half."""
    trace: Trace = request.getfixturevalue(which)
    assert judge(trace).status == "equal"
    looked, names = 0, set()
    seen: dict[tuple[str, str], int] = {}
    for number, record in enumerate(trace.header.records):
        for name in record.tensors:
            tensor = trace.tensor(number, name)
            if not tensor.is_floating_point() or not tensor.numel() or seen.get((record.stage, name), 0) == 2:
                continue
            seen[record.stage, name] = seen.get((record.stage, name), 0) + 1
            order = tensor.abs().flatten().argsort()
            for at in (int(order[-1]), int(order[len(order) // 2]), int(order[int((tensor == 0).sum()) % len(order)])):
                for factor in (1.001, 1.01, 1.5):
                    other = changed(trace, {f"{number}.{name}": moved(tensor, at, factor)})
                    same = diff(trace, other).same
                    # where `diff` sees a difference, either verdict is right: of most of these the judge is not asked
                    if (same or name not in names or looked <= 50) and judge(other).status == "diverged":
                        looked, names = looked + 1, names | {name}
                        assert not same, (number, record.stage, name, at, factor)
    assert looked > 50
    kinds = {name for _, name in seen} - {"coins", "final_coins"}  # coins of no seed may be any number
    assert {name for name in kinds if not name.endswith(("_in", "_out"))} <= names


@pytest.mark.parametrize("which", ["busy_trace", "tree_trace", "sampled_trace"])
def test_two_runs_that_are_off_by_rounding_alone_are_the_same(request: Any, which: str) -> None:
    trace: Trace = request.getfixturevalue(which)
    noise = torch.Generator().manual_seed(1)
    rounded = {
        f"{number}.{name}": tensor * (1 + 1e-6 * (torch.rand(tensor.shape, generator=noise) - 0.5))
        for number, record in enumerate(trace.header.records)
        for name in record.tensors
        for tensor in [trace.tensor(number, name)]
        if tensor.is_floating_point() and not name.endswith("coins")
    }
    result = diff(trace, changed(trace, rounded))
    assert result.differences
    assert result.same
    assert 0 < result.largest < 1e-5


def test_a_small_row_is_measured_by_its_own_size(busy_trace: Trace) -> None:
    """A row of hidden states next to one a thousand times as large: before, an error was shared out over the whole tensor."""
    number = next(n for n, record in enumerate(busy_trace.header.records) if record.stage == "draft.extend")
    states = busy_trace.tensor(number, "hidden_in").clone()
    assert len(states) > 1
    states[0] *= 1000
    wrong = states.clone()
    wrong[1, int(wrong[1].abs().argmax())] *= 1.01
    left, right = (changed(busy_trace, {f"{number}.hidden_in": tensor}) for tensor in (states, wrong))
    result = diff(left, right)
    assert not result.same
    assert "element" in result.differences[0].where


def test_coins_are_drawn_and_never_almost_the_same(sampled_trace: Trace) -> None:
    number = next(n for n, record in enumerate(sampled_trace.header.records) if "coins" in record.tensors)
    coins = sampled_trace.tensor(number, "coins")
    assert not diff(sampled_trace, changed(sampled_trace, {f"{number}.coins": moved(coins, 0, 1 + 1e-5)})).same


def test_a_trace_that_makes_no_sense_to_the_judge_is_compared_all_the_same(tree_trace: Trace) -> None:
    """Without a reference the spread of a row's own logarithms takes the place of its logits' magnitude."""
    header = msgspec.structs.replace(tree_trace.header, weights="of another torch")
    left = Trace(header, tree_trace.tensors)
    number = next(n for n, record in enumerate(header.records) if "candidate_scores" in record.tensors)
    right = changed(left, {f"{number}.candidate_scores": moved(left.tensor(number, "candidate_scores"), 0, 1.5)})
    assert diff(left, left).same
    assert not diff(left, right).same
