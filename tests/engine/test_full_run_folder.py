"""A run folder that becomes full while a finding is shrunk: what was found is kept elsewhere, and told all the same."""

import errno
import os
import re
from pathlib import Path
from typing import Any

import pytest

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.commands.fuzz.command import search
from eagletwin.harness.commands.fuzz.options import SearchOptions
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.families.valid import read_case


@pytest.mark.long
@pytest.mark.slow
def test_what_was_found_is_kept_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, writes = tmp_path / "runs", 0
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    write_text, write_bytes = Path.write_text, Path.write_bytes

    def full(file: Path) -> bool:
        nonlocal writes
        writes += file.name == "case.json"
        return runs in file.parents and writes > 1

    def text(file: Path, *given: Any, **how: Any) -> int:
        if full(file):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        return write_text(file, *given, **how)

    def data(file: Path, *given: Any) -> int:
        if full(file):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(file))
        return write_bytes(file, *given)

    monkeypatch.setattr(Path, "write_text", text)
    monkeypatch.setattr(Path, "write_bytes", data)
    undone = RunSpec(patches=(LEDGER["25015"].revert,))
    options = SearchOptions(only=("llama-tiny",), left_out=("sampling",), processes=1, run=undone, out=runs)
    with pytest.raises(OSError, match="No space left"):
        search(options)
    told, said = capsys.readouterr()
    assert told.startswith("1 FOUND")
    [other] = re.findall(r"cannot be written \(No space left on device\); what was found last is in (\S+)", said)
    assert read_case(Path(other, "minimal", "case.json")).requests
    for part in ("found.json", "summary.json", "minimal/repro.py"):
        assert Path(other, part).is_file()
