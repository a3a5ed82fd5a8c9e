"""A search on several cores: blocks come in their order, and no process waits for another one's block while there are more."""

import queue
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from eagletwin.harness.commands.fuzz.messages import BlockOver
from eagletwin.harness.commands.fuzz.pool import Several


class _Looking:
    """Blocks of three cases, each named by its block and its place. at: what happens when a case is run."""

    def __init__(self, at: dict[str, Callable[[], None]]) -> None:
        self.ran: list[str] = []
        self._at = at

    def block(self, number: int) -> Iterator[Any]:
        for place in range(3):
            self.ran.append(f"{number}.{place}")
            self._at.get(self.ran[-1], lambda: None)()
            yield self.ran[-1]


class _Theirs:
    """What another process says of a block."""

    def __init__(self) -> None:
        self.said: list[Any] = []
        self.waited = 0

    def get_nowait(self) -> Any:
        if not self.said:
            raise queue.Empty
        return self.said.pop(0)

    def get(self) -> Any:
        self.waited += 1
        return BlockOver()


def _several(at: dict[str, Callable[[], None]], theirs: _Theirs) -> tuple[Several, _Looking]:
    """Two processes, of which the other has taken block 0."""
    several = Several(SimpleNamespace(host=None), SimpleNamespace(plan=None), 2)  # type: ignore[arg-type]
    several._looking = looking = _Looking(at)  # type: ignore[assignment]
    several._answers[0], several._next = theirs, 1  # type: ignore[assignment]
    return several, looking


def test_while_one_block_takes_long_elsewhere_many_are_run_here() -> None:
    theirs = _Theirs()
    several, looking = _several({"4.1": lambda: theirs.said.extend(("0.0", BlockOver()))}, theirs)
    blocks = several.blocks()
    assert list(next(blocks)) == ["0.0"]
    assert not theirs.waited
    assert looking.ran == ["1.0", "1.1", "1.2", "2.0", "2.1", "2.2", "3.0", "3.1", "3.2", "4.0", "4.1"]
    for number in range(1, 7):  # each case once, in the order of the blocks
        assert list(next(blocks)) == [f"{number}.{place}" for place in range(3)]
    assert len(looking.ran) == 18


def test_no_block_is_run_too_long_before_its_turn() -> None:
    theirs = _Theirs()
    several, looking = _several({}, theirs)
    assert list(next(several.blocks())) == []
    assert theirs.waited == 1
    assert looking.ran[-1] == "8.2"
