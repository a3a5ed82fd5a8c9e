"""A search on several cores: blocks come in their order, and no process waits for another one's block while there are more."""

import queue
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.commands.fuzz.looking import CaseSeen
from eagletwin.harness.commands.fuzz.messages import TRIES, BlockOver, written
from eagletwin.harness.commands.fuzz.options import SearchOptions
from eagletwin.harness.commands.fuzz.pool import Several
from eagletwin.harness.core.errors import HarnessError
from eagletwin.harness.core.verdict import Verdict


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
    several = Several(SimpleNamespace(host=None), SimpleNamespace(plan=SearchOptions().plan), 2)  # type: ignore[arg-type]
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


# A search process that reads its options and answers each block from a file, and dies as it is asked to: `before` it answers
# anything, or `after` the first answer of a block. It dies as long as there are `deaths` left in the file.
SCRIPT = """
import json, os, pathlib, sys
folder, when = pathlib.Path(sys.argv[1]), sys.argv[2]

def die(now):
    left = int((folder / "deaths").read_text())
    if left and when == now:
        (folder / "deaths").write_text(str(left - 1))
        os._exit(7)

die("unread")
sys.stdin.readline()
for line in sys.stdin:
    wanted = json.loads(line)
    die("before")
    lines = (folder / f"{wanted['block']}").read_text().splitlines(keepends=True)
    for line in lines[len(wanted["earlier"]):]:
        sys.stdout.write(line)
        sys.stdout.flush()
        if "over" not in line.lower():
            die("after")
"""


class _Scripted(Several):
    """A search whose other process is the script. started: how many of them there were."""

    def __init__(self, folder: Path, when: str, deaths: int) -> None:
        super().__init__(SimpleNamespace(host=None), SearchOptions(), 2)  # type: ignore[arg-type]
        self._command = [sys.executable, "-c", SCRIPT, str(folder), when]
        self.started = 0
        (folder / "deaths").write_text(str(deaths))
        for number in range(_BLOCKS):
            lines = [written(answer) for answer in (*_cases(number), BlockOver())]
            (folder / f"{number}").write_bytes(b"".join(lines))
        self._looking = SimpleNamespace(block=lambda number: iter(_cases(number)))  # type: ignore[assignment]

    def _worker(self) -> "subprocess.Popen[bytes]":
        self.started += 1
        return subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


_BLOCKS = 40


def _cases(block: int) -> list[CaseSeen]:
    cases = [replace(LEDGER["25015"].case, name=f"{block}-{place}") for place in range(3)]
    return [CaseSeen(block=block, case=case, verdict=Verdict(status="equal")) for case in cases]


def _search(several: _Scripted, blocks: int) -> list[list[str]]:
    """The names of the cases of so many blocks, of which the other process has begun the first."""
    with several:
        while not several._answers:
            several._threads[0].join(0.01)
        return [[one.case.name for one in block if isinstance(one, CaseSeen)] for block in islice(several.blocks(), blocks)]


@pytest.mark.parametrize("when", ["unread", "before", "after"])
def test_a_process_that_dies_is_named_and_replaced_and_no_case_is_lost(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], when: str
) -> None:
    several = _Scripted(tmp_path, when, TRIES - 1)
    assert _search(several, 3) == [[f"{block}-{place}" for place in range(3)] for block in range(3)]
    assert several.started == TRIES
    said = capfd.readouterr().err
    assert said.count("note: a process of the search ended with exit status 7 in block 0; another one takes its place") == 2


def test_a_block_that_ends_process_after_process_ends_the_search(tmp_path: Path) -> None:
    several = _Scripted(tmp_path, "before", 100)
    with pytest.raises(HarnessError, match=f"{TRIES} processes of the search ended over block 0"):
        _search(several, 3)
    assert several.started == TRIES
