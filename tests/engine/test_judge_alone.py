"""What judging does to the process that it happens in, such as a test suite of somebody else."""

import threading
from typing import Any

import pytest
import torch

from eagletwin import harness
from eagletwin.harness.judge import judge
from eagletwin.harness.trace import Trace


def test_it_computes_in_one_thread_and_leaves_the_number_of_threads_as_it_was(
    busy_trace: Trace, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, stories = [], harness.judge.stories

    def counted(*arguments: Any) -> Any:
        seen.append(torch.get_num_threads())
        return stories(*arguments)

    monkeypatch.setattr(harness.judge, "stories", counted)
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
    stories, both, first_is_done, numbers = harness.judge.stories, threading.Barrier(2, timeout=60), threading.Event(), []

    def together(*arguments: Any) -> Any:
        both.wait()
        if threading.current_thread().name == "second":
            first_is_done.wait(60)
        return stories(*arguments)

    def judged() -> None:
        judge(busy_trace)
        numbers.append(torch.get_num_threads())
        first_is_done.set()

    monkeypatch.setattr(harness.judge, "stories", together)
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
