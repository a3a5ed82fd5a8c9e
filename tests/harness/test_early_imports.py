"""Imports before a fork: what is not there is passed over, and any other failure is listed."""

import sys
from pathlib import Path

import pytest

from eagletwin.harness.engines.sglang.own_loader import import_early
from eagletwin.harness.engines.sglang.processes.zygote import left_to_the_engine


def test_what_fails_in_the_middle_is_listed_once_and_the_rest_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "early_half.py").write_text("import early_whole\nraise RuntimeError('registered twice')\n")
    (tmp_path / "early_needs.py").write_text("import early_absent\n")
    (tmp_path / "early_whole.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    shims: list[str] = []
    for _ in range(2):
        import_early(("early_absent", "early_needs", "early_half", "early_whole"), shims)
    assert shims == ["early_half: failed when it was imported before the fork: RuntimeError: registered twice"]
    assert "early_whole" in sys.modules


def test_what_is_left_to_the_engine_is_in_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    with left_to_the_engine():
        raise OSError("no space for a model")
    assert "OSError: no space for a model" in capsys.readouterr().err
