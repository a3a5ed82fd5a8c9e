"""`faults`: which one-place faults are drawn, and that each can be planted."""

import difflib
from pathlib import Path

import pytest

from eagletwin.harness.engines.source import INSTALLED

from . import faults

FILES = ["sglang/srt/speculative/eagle_utils.py", "sglang/srt/mem_cache/allocation.py", "sglang/srt/speculative/spec_utils.py"]


def test_faults_of_files_in_turn_are_planted_in_one_place_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "searched_files", lambda: FILES)
    drawn = faults.drawn(9, 0)
    assert [sorted(fault.file for fault in drawn[first : first + 3]) for first in (0, 3, 6)] == [sorted(FILES)] * 3
    for number, fault in enumerate(drawn):
        old = (INSTALLED.root / fault.file).read_text()
        file = tmp_path / f"{number}.py"
        file.write_text(old)
        faults.plant_fault(file, fault)
        compile(new := file.read_text(), str(file), "exec")
        gone = [line for line in difflib.ndiff(old.splitlines(), new.splitlines()) if line[0] == "-"]
        assert 0 < len(gone) <= len(fault.match.splitlines()), fault.name


def test_the_files_are_those_of_the_speculative_path() -> None:
    assert len(found := faults.searched_files()) > 40
    assert set(FILES) <= set(found)
