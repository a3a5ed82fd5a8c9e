"""A search that was ended continues: nothing that was found is lost, and what its journal has is not run again. No engine runs
here: what a block comes to, and what becomes of a case that shows something, is fixed."""

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest

from eagletwin.cases.blocks import BLOCK, SearchConstraints, block_of
from eagletwin.harness.cli.main import run_command
from eagletwin.harness.commands.fuzz import command, options, pool, report, search
from eagletwin.harness.commands.fuzz.journal import JOURNAL, read_journal
from eagletwin.harness.commands.fuzz.looking import CaseSeen
from eagletwin.harness.commands.fuzz.options import SearchOptions
from eagletwin.harness.commands.fuzz.tally import FindingFacts
from eagletwin.harness.core.errors import EXIT_DIVERGED, EXIT_EQUAL, EXIT_INTERRUPTED, AlreadyReported, InputError
from eagletwin.harness.core.files import alone
from eagletwin.harness.core.signature import Signature
from eagletwin.harness.core.verdict import Verdict
from eagletwin.harness.engines import host, start
from eagletwin.harness.engines.source import INSTALLED

PROBE = block_of(0, 0, SearchConstraints()).probe
LEAK, CRASH, KNOWN = Signature(rule="draft.kv"), Signature(cause="IndexError"), Signature(rule="draft.positions")
# Which case of which block shows what; the third turns out to be a known bug's.
SHOWS = {(1, 2): LEAK, (2, 0): LEAK, (2, 3): CRASH, (3, 1): KNOWN, (5, 3): LEAK, (6, 3): KNOWN, (8, 0): CRASH}
CASES = 10 * BLOCK


class Started:
    """A process that imports nothing, and a host of it."""

    def __init__(self, source: Any, mode: Any = None, *, edited: bool = False) -> None:  # noqa: ARG002
        self.source, self.mode = (source, mode) if mode else (source.source, source.mode)

    def start(self) -> None:
        pass

    def __enter__(self) -> "Started":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def connection(self) -> None:
        pass


class Fixed:
    """Runs blocks. log: how often each case ran; ctrl_c: after so many of them the search is interrupted."""

    log: ClassVar[Counter[str]] = Counter()
    ctrl_c = -1

    def __init__(self, matcher: Any, plan: Any) -> None:
        pass

    def first(self, earlier: Sequence[CaseSeen]) -> Iterator[CaseSeen]:
        return iter(earlier[:0])

    def block(self, number: int, earlier: Sequence[CaseSeen]) -> Iterator[CaseSeen]:
        for place in range(len(earlier), BLOCK):
            if self.log.total() == self.ctrl_c:
                raise KeyboardInterrupt
            case = msgspec.structs.replace(PROBE, name=f"{number}-{place}")
            self.log[case.name] += 1
            shown = SHOWS.get((number, place))
            status = "equal" if shown is None else "diverged" if shown.rule else "unknown"
            yield CaseSeen(block=number, case=case, verdict=Verdict(status=status), signature=shown)


class Shrunk:
    """An inquiry: a smaller case shows something else, once. log: how often each signature was shrunk."""

    log: ClassVar[Counter[str]] = Counter()
    past = ""

    def __init__(self, _matcher: Any, _plan: Any, seen: CaseSeen) -> None:
        self.seen = seen

    def bug(self) -> str:
        return "26329" if self.seen.signature == KNOWN else ""

    def begin(self, folder: Path, teller: Any) -> Any:
        (folder / "minimal").mkdir(parents=True, exist_ok=True)
        teller.aside(self.seen.case, Signature(rule="draft.mask"), False)
        return SimpleNamespace(folder=folder)

    def finish(self, shrinking: Any, cases: int, _seconds: float) -> Any:
        shown = self.seen.signature
        self.log[str(shown)] += 1
        status, folder = self.seen.verdict.status, str(shrinking.folder / "minimal")
        until = {"cases": cases, "seconds": 1.0, "shrink_looks": 1, "shrink_seconds": 1.0}
        facts = FindingFacts(signature=shown, status=status, folder=folder, **until)
        outcome = SimpleNamespace(case=self.seen.case, trace=SimpleNamespace(differs=None))
        return SimpleNamespace(signature=shown, status=status, facts=facts, outcome=outcome)


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "resolve", lambda name, engine: INSTALLED)
    monkeypatch.setattr(start, "Zygote", Started)
    monkeypatch.setattr(host, "Host", Started)
    monkeypatch.setattr(pool, "BlockRunner", Fixed)
    monkeypatch.setattr(search, "Triage", Shrunk)
    monkeypatch.setattr(report, "finding_text", lambda finding, columns: "")
    monkeypatch.setattr(Fixed, "log", Counter())
    monkeypatch.setattr(Shrunk, "log", Counter())


def begin(folder: Path, **more: Any) -> int:
    return command.search(SearchOptions(**{"max_cases": CASES, "findings": 0, "processes": 1, "out": folder, **more}))


def resume(folder: Path, **more: Any) -> int:
    return command.search(*command.load_resumed_search(folder, SearchOptions(processes=1, **more)))


def summary(folder: Path) -> dict[str, Any]:
    """What does not depend on the time, nor on where the folder is."""
    text = re.sub(r" in \d+\.\d s", "", (folder / "summary.json").read_text())
    read: dict[str, Any] = json.loads(text.replace(str(folder), "").replace(str(folder.parent / "fuzz-0"), ""))
    del read["seconds"]
    return read


def test_a_search_continues_from_any_line_of_its_journal(tmp_path: Path) -> None:
    """Also from the middle of one, as a driver that is killed leaves it: it comes to the same, and runs the rest alone."""
    assert begin(tmp_path) == EXIT_DIVERGED
    whole, lines = summary(tmp_path / "fuzz-0"), (tmp_path / "fuzz-0" / JOURNAL).read_bytes().splitlines(keepends=True)
    assert whole["tally"]["statuses"] == {"diverged": 3, "equal": 33, "known": 2, "unknown": 2}
    assert [one["signature"]["rule"] or one["signature"]["cause"] for one in whole["findings"]] == ["draft.kv", "IndexError"]
    assert [one["cases"] for one in whole["set_aside"]] == [2, 2, 1]
    assert set(Fixed.log.values()) == {1}
    for number in range(1, len(lines), 5):
        folder = tmp_path / f"from-{number}"
        folder.mkdir()
        (folder / JOURNAL).write_bytes(b"".join(lines[:number]) + lines[number][: len(lines[number]) // 2])
        past = read_journal(folder)
        Fixed.log.clear()
        Shrunk.log.clear()
        assert resume(folder) == EXIT_DIVERGED
        assert summary(folder) == whole
        assert Fixed.log.total() == CASES - sum(map(len, past.seen.values()))
        assert Shrunk.log.total() == 2 - len(past.findings)
        assert all(json.loads(line) for line in (folder / JOURNAL).read_bytes().splitlines())
        assert read_journal(folder).drivers == past.drivers + 1


def test_ctrl_c_is_no_end_and_the_way_to_continue_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Fixed, "ctrl_c", 14)
    with pytest.raises(AlreadyReported) as ended:
        begin(tmp_path)
    assert ended.value.exit_code == EXIT_INTERRUPTED
    assert f"  again:  eagletwin fuzz --resume {tmp_path / 'fuzz-0'}\n" in capsys.readouterr().out
    monkeypatch.setattr(Fixed, "ctrl_c", -1)
    assert resume(tmp_path / "fuzz-0") == EXIT_DIVERGED
    assert (Fixed.log.total(), set(Fixed.log.values())) == (CASES, {1})


def test_a_divergence_that_was_not_concluded_is_looked_into_also_when_the_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that is ended while it shrinks leaves a block that is not over, and little time."""
    monkeypatch.setitem(globals(), "SHOWS", {(3, 1): LEAK})
    assert begin(tmp_path) == EXIT_DIVERGED
    journal = tmp_path / "fuzz-0" / JOURNAL
    lines = journal.read_bytes().splitlines(keepends=True)
    seen = next(number for number, line in enumerate(lines) if b'"diverged"' in line)
    journal.write_bytes(b"".join(lines[: seen + 1]))
    Shrunk.log.clear()
    ran = Fixed.log.total()
    assert resume(tmp_path / "fuzz-0", minutes=1e-9) == EXIT_DIVERGED
    assert Shrunk.log == {str(LEAK): 1}
    assert Fixed.log.total() == ran


def test_a_divergence_of_a_later_block_is_not_lost_when_the_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers run blocks before their turn; a search that continues with more time comes to the same as one that went on."""
    monkeypatch.setitem(globals(), "SHOWS", {(3, 1): LEAK, (4, 0): LEAK, (1, 2): CRASH, (1, 3): LEAK})
    assert begin(tmp_path) == EXIT_DIVERGED
    folder, whole = tmp_path / "fuzz-0", summary(tmp_path / "fuzz-0")
    lines = (folder / JOURNAL).read_bytes().splitlines(keepends=True)
    later = [line for line in lines if b'"Saw"' in line and b'"place":3' in line]
    (folder / JOURNAL).write_bytes(b"".join([lines[0], lines[1], *later]))
    Shrunk.log.clear()
    assert resume(folder, minutes=1e-9) == EXIT_DIVERGED
    assert Shrunk.log == {str(LEAK): 1}
    assert resume(folder, minutes=60) == EXIT_DIVERGED
    assert Shrunk.log == {str(LEAK): 1, str(CRASH): 1}
    assert summary(folder)["tally"] == whole["tally"]


def test_a_search_that_is_over_continues_with_new_limits(tmp_path: Path) -> None:
    assert begin(tmp_path, max_cases=BLOCK) == EXIT_EQUAL
    assert resume(tmp_path / "fuzz-0", max_cases=2 * BLOCK) == EXIT_DIVERGED
    assert summary(tmp_path / "fuzz-0")["command"] == f"eagletwin fuzz --seed 0 --cases {2 * BLOCK} --findings 0"
    assert resume(tmp_path / "fuzz-0", max_cases=CASES, findings=2) == EXIT_DIVERGED
    assert Shrunk.log == {str(LEAK): 1, str(CRASH): 1}
    with pytest.raises(InputError, match="has 2 of 2 findings"):
        resume(tmp_path / "fuzz-0", findings=2)


def test_a_search_stays_what_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(tmp_path, max_cases=BLOCK)
    folder = tmp_path / "fuzz-0"
    with pytest.raises(InputError, match="options that a search begins with"):
        resume(folder, only=("llama-tiny",))
    with pytest.raises(InputError, match="another process searches in"), alone(folder / JOURNAL):
        resume(folder, max_cases=2 * BLOCK)
    shutil.copytree(folder, tmp_path / "older")
    lines = (folder / JOURNAL).read_text()
    (tmp_path / "older" / JOURNAL).write_text(lines.replace('"version":"', '"version":"0.0.'))
    with pytest.raises(InputError, match=r"eagletwin 0\.0\..* began it"):
        resume(tmp_path / "older")
    (tmp_path / "older" / JOURNAL).write_text("")
    with pytest.raises(InputError, match="does not say what is searched"):
        resume(tmp_path / "older")
    with pytest.raises(InputError, match="there is no search to continue"):
        resume(tmp_path / "elsewhere")
    monkeypatch.setattr(options, "resolve", lambda name, engine: SimpleNamespace(called="0.5.1"))
    with pytest.raises(InputError, match=r"and this is 0\.5\.1"):
        resume(folder)


def test_campaign_is_a_search_that_no_finding_ends(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    given: list[SearchOptions] = []
    monkeypatch.setattr(command, "search", lambda options, **_: given.append(options) or 0)
    assert run_command(["campaign", "--workers", "3", "--address", "auto", "--minutes", "60"]) == 0
    assert [(one.findings, one.processes, one.address, one.minutes) for one in given] == [(0, 3, "auto", 60.0)]
    assert "`eagletwin campaign` is now `eagletwin fuzz --findings 0`" in capsys.readouterr().err
