"""What is remembered from start to start is worked out again when its folders have changed, or its file is damaged."""

from pathlib import Path

import pytest

from eagletwin.harness.engines.sglang.remembered import _remembered


def test_it_is_worked_out_once_and_again_when_a_folder_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLETWIN_CACHE", str(tmp_path / "cache"))
    folder, asked = tmp_path / "models", []
    folder.mkdir()

    def work_out() -> dict[frozenset[str], dict[str, set[str]]]:
        asked.append(len(asked))
        return {frozenset({"torch"}): {f"model{len(asked)}": {"Model", "Other"}}}

    def ask() -> object:
        return _remembered("names", [str(folder)], work_out)

    assert ask() == ask() == {frozenset({"torch"}): {"model1": {"Model", "Other"}}}
    (folder / "one").mkdir()
    assert ask() == {frozenset({"torch"}): {"model2": {"Model", "Other"}}}
    for file in (tmp_path / "cache" / "imports").iterdir():
        file.write_bytes(file.read_bytes()[:-3])
    assert ask() == {frozenset({"torch"}): {"model3": {"Model", "Other"}}}
    assert asked == [0, 1, 2]
