"""What judging does to the process that it happens in, such as a test suite of somebody else."""

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
