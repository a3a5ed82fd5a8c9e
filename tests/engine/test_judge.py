"""The judge on real traces: absent numbers, rules without weights, bounds of stored rows, and what `diff` makes of them."""

import dataclasses
import importlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec import structs
from msgspec.structs import replace
from torch import Tensor

from eagletwin.harness.core.case import Adaptive, Case, EngineSettings, Event, Logprobs, Request, SGLangSettings, Tier
from eagletwin.harness.core.records import UNSAID
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.engines.host import Host
from eagletwin.harness.judge import replay
from eagletwin.harness.judge.bounds import FLOAT32
from eagletwin.harness.judge.judge import judge
from eagletwin.harness.judge.rules import catalogue
from eagletwin.harness.judge.trace_diff import diff
from eagletwin.reference.state_layers import Kept

from ..rows import long, spread
from .changes import changed, every

# Leave one number out of a real, correct trace: the judge must never say `equal`. What is absent is a tap that stopped.


TRACES = ("busy_trace", "tree_trace", "sampled_trace", "states_trace")
# What the busy case is changed to, for stages and numbers that it does not have.
SETTINGS: dict[str, dict[str, object]] = {
    "host's pages": {"host_pages": 64},
    "adaptive": {"adaptive": Adaptive(tiers=(Tier(batch=1, steps=(1, 3)),), interval=1, warmup=0)},
    "mixed chunks": {"mixed_chunks": True},
}


def _without_each(trace: Trace) -> Iterator[tuple[str, str, Trace]]:
    """Stage, name, and the trace without that number: in the last record that has it, and in all."""
    records = trace.header.records
    for stage, name in sorted({(record.stage, name) for record in records for name in record.numbers}):
        of_it = [n for n, record in enumerate(records) if record.stage == stage and name in record.numbers]
        for gone in (of_it, of_it[-1:]):
            left = tuple(
                replace(record, numbers={key: value for key, value in record.numbers.items() if key != name})
                if n in gone
                else record
                for n, record in enumerate(records)
            )
            yield stage, name, Trace(replace(trace.header, records=left), trace.tensors)


def _equal_without(trace: Trace) -> list[tuple[str, str]]:
    assert judge(trace).status == "equal", judge(trace)
    return [(stage, name) for stage, name, left in _without_each(trace) if judge(left).status == "equal"]


@pytest.mark.parametrize("fixture", TRACES)
def test_no_trace_is_equal_without_one_of_its_numbers(request: pytest.FixtureRequest, fixture: str) -> None:
    assert _equal_without(request.getfixturevalue(fixture)) == []


@pytest.mark.parametrize(
    "changed", spread([*SETTINGS, "windows", "an abort in a step"], lambda changed: changed in ("windows", "adaptive"))
)
def test_nor_where_there_are_more_of_them(
    host: Host, busy_case: Case, tmp_path_factory: pytest.TempPathFactory, changed: str
) -> None:
    settings = busy_case.engine.sglang
    if changed == "windows":
        sizes = EngineSettings(sglang=replace(settings, max_total_tokens=1024))
        case = replace(busy_case, model="mimo-v2-window", chunked_prefill_size=512, engine=sizes)
    elif changed == "an abort in a step":
        case = replace(busy_case, events=(Event(at=0, kind="abort", request="a", step=4),))
    else:
        case = replace(busy_case, engine=EngineSettings(sglang=replace(settings, **SETTINGS[changed])))
    assert _equal_without(host.engine(case).run(case, tmp_path_factory.mktemp("more"))) == []


def test_what_a_message_of_this_sglang_does_not_count_is_not_compared(busy_trace: Trace) -> None:
    records = tuple(
        replace(record, numbers=record.numbers | {"retractions": UNSAID}) if record.stage == "finished" else record
        for record in busy_trace.header.records
    )
    verdict = judge(Trace(replace(busy_trace.header, records=records), busy_trace.tensors))
    assert (verdict.status, verdict.unseen["output.counts"]) == ("equal", 2)


# The catalogue says which rules need the model's weights: with other weights in the reference these find something, and the
# others find nothing.


FREE = {name for name, rule in catalogue().items() if rule.weights == "no"}


@pytest.fixture
def other_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference computes as with weights of its own: hidden states, logits, rows and drafts are others."""
    right = replay.target_rows

    def kept(part: Kept) -> Kept:
        return Kept(1.1 * part.state, 1.1 * part.window)

    def wrong(*arguments: Any) -> Any:
        rows = right(*arguments)
        return dataclasses.replace(
            rows,
            hidden=1.1 * rows.hidden.flip(-1),
            logits=rows.logits.flip(-1),
            keys=1.1 * rows.keys,
            values=1.1 * rows.values,
            kept=tuple(map(kept, rows.kept)),
        )

    monkeypatch.setattr(replay, "target_rows", wrong)


def diverged(trace: Trace) -> set[str]:
    verdict = judge(trace)
    assert verdict.status == "diverged", verdict
    return {verdict.rule, *verdict.later}


@pytest.mark.usefixtures("other_weights")
def test_of_a_chain(busy_trace: Trace) -> None:
    found = diverged(busy_trace)
    assert found.isdisjoint(FREE)
    assert found == {
        "draft.hidden_in",
        "draft.kv",
        "draft.proposal",
        "draft.scratch_kv",
        "output.tokens",
        "target.hidden",
        "target.kv",
        "verify.accept",
    }


@pytest.mark.usefixtures("other_weights")
def test_of_a_tree(tree_trace: Trace) -> None:
    found = diverged(tree_trace)
    assert found.isdisjoint(FREE)
    assert found >= {"tree.parents", "tree.tokens", "commit.path"}


@pytest.mark.usefixtures("other_weights")
def test_of_requests_that_sample(sampled_trace: Trace) -> None:
    found = diverged(sampled_trace)
    assert found.isdisjoint(FREE)
    assert found >= {"verify.probabilities", "draft.probabilities"}


@pytest.mark.usefixtures("other_weights")
def test_of_layers_that_keep_a_state(states_trace: Trace) -> None:
    found = diverged(states_trace)
    assert found.isdisjoint(FREE)
    assert found >= {"target.state", "target.conv"}


@pytest.mark.usefixtures("other_weights")
def test_of_what_a_request_is_told(host: Host, busy_case: Case, tmp_path: Path) -> None:
    requests = tuple(
        structs.replace(request, logprobs=Logprobs(start=0), hidden_states="last") for request in busy_case.requests
    )
    settings = structs.replace(busy_case.engine.sglang, plain_decode=True)
    case = structs.replace(busy_case, requests=requests, engine=EngineSettings(sglang=settings))
    found = diverged(host.engine(case).run(case, tmp_path))
    assert found.isdisjoint(FREE)
    assert found >= {"output.logprobs", "output.hidden", "output.plain"}


@pytest.mark.usefixtures("other_weights")
def test_of_rows_that_are_chosen(host: Host, tmp_path: Path) -> None:
    prompt = tuple(3 + n * n % 90 for n in range(70))  # all but the first rows choose
    case = Case(
        name="chosen",
        model="deepseek-dsa",
        num_steps=3,
        page_size=64,
        chunked_prefill_size=512,
        requests=(Request(id="a", prompt=prompt, max_new_tokens=6),),
        engine=EngineSettings(sglang=SGLangSettings(max_total_tokens=1024)),
    )
    found = diverged(host.engine(case).run(case, tmp_path))
    assert found.isdisjoint(FREE)
    assert found >= {"target.selection", "draft.selection"}


def test_every_rule_that_needs_weights_was_shown_to() -> None:
    """Those of the six tests above: a rule that is added names its test there."""
    shown = {"draft.hidden_in", "draft.kv", "draft.proposal", "draft.scratch_kv", "output.tokens", "target.hidden", "target.kv"}
    shown |= {"verify.accept", "tree.parents", "tree.tokens", "commit.path", "verify.probabilities", "draft.probabilities"}
    shown |= {"target.selection", "draft.selection", "target.compressor"}  # test_compressed.py has the last
    shown |= {
        "target.state",
        "target.conv",
        "output.logprobs",
        "output.hidden",
        "output.plain",
        "state.tracked",
    }  # the last one is of prefixes in the cache (test_states.py)
    assert shown == set(catalogue()) - FREE


# What judging does to the process that it happens in, such as a user's test suite.


MODULE: Any = importlib.import_module("eagletwin.harness.judge.judge")


def test_it_computes_in_one_thread_and_leaves_the_number_of_threads_as_it_was(
    busy_trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, replays = [], MODULE.replay_requests

    def counted(*arguments: Any) -> Any:
        seen.append(torch.get_num_threads())
        return replays(*arguments)

    monkeypatch.setattr(MODULE, "replay_requests", counted)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        verdict = judge(busy_trace)
        after = torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
    assert (verdict.status, seen, after) == ("equal", [1], 3)


def test_two_that_judge_at_once_leave_the_number_of_threads_as_it_was(
    busy_trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    replays, both, first_is_done, numbers = MODULE.replay_requests, threading.Barrier(2, timeout=60), threading.Event(), []

    def together(*arguments: Any) -> Any:
        both.wait()
        if threading.current_thread().name == "second":
            first_is_done.wait(60)
        return replays(*arguments)

    def judged() -> None:
        judge(busy_trace)
        numbers.append(torch.get_num_threads())
        first_is_done.set()

    monkeypatch.setattr(MODULE, "replay_requests", together)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        both_threads = [threading.Thread(target=judged, name=name) for name in ("first", "second")]
        for one in both_threads:
            one.start()
        for one in both_threads:
            one.join()
        later = threading.Thread(target=lambda: numbers.append(torch.get_num_threads()))
        later.start()
        later.join()
    finally:
        torch.set_num_threads(before)
    assert numbers == [3, 3, 3]


def test_with_every_rule_switched_off_nothing_is_equal(busy_trace: Trace) -> None:
    off = frozenset(rule for rule in catalogue() if not rule.startswith(("engine.", "kernel.")))
    verdict = judge(busy_trace, off)
    assert (verdict.status, verdict.checked) == ("unknown", {})
    assert verdict.reason == "nothing was compared: every rule that this trace could break is switched off"


# Stored rows: the keys and the values of each layer are compared by their own magnitude, not by the largest of all of them.


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


# `diff` measures as the judge does: what is outside the judge's bound is a difference, in every float of a trace.


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
                    if (same or name not in names or looked <= 20) and judge(other).status == "diverged":
                        looked, names = looked + 1, names | {name}
                        assert not same, (number, record.stage, name, at, factor)
    assert looked > 20
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
