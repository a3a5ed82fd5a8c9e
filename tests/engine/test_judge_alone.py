"""What judging does to the process that it happens in, such as a user's test suite."""

import importlib
import threading
from typing import Any

import pytest
import torch

from eagletwin.harness.core.trace import Trace
from eagletwin.harness.judge.judge import judge
from eagletwin.harness.judge.rules import catalogue

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
