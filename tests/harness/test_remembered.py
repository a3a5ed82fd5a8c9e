"""What is remembered from start to start is worked out again when a source file has changed, or its own file is damaged."""

import os
from pathlib import Path

import pytest

from eagletwin.harness.engines.sglang.boot.preimport import _remembered


def test_it_is_worked_out_once_and_again_when_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EAGLETWIN_CACHE", str(tmp_path / "cache"))
    folder, asked = tmp_path / "models", []
    source = folder / "llama" / "modeling.py"
    source.parent.mkdir(parents=True)
    source.write_text("class One: ...\n")

    def work_out() -> dict[frozenset[str], dict[str, set[str]]]:
        asked.append(len(asked))
        return {frozenset({"torch"}): {f"model{len(asked)}": {"Model", "Other"}}}

    def ask() -> int:
        assert _remembered("names", folder, work_out) == {frozenset({"torch"}): {f"model{len(asked)}": {"Model", "Other"}}}
        return len(asked)

    assert [ask(), ask()] == [1, 1]
    source.write_text("class Three: ...\n")  # in place: the folder's own time stays
    assert [ask(), ask()] == [2, 2]
    state = source.stat()
    source.write_text("class Seven: ...\n")  # as long as before
    os.utime(source, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    assert [ask(), ask()] == [3, 3]
    (folder / "llama" / "processing.py").touch()
    assert [ask(), ask()] == [4, 4]
    (folder / "llama" / "processing.py").unlink()  # as it was once
    assert _remembered("names", folder, work_out) == {frozenset({"torch"}): {"model3": {"Model", "Other"}}}
    for file in (tmp_path / "cache" / "imports").iterdir():
        file.write_bytes(file.read_bytes()[:-3])
    assert [ask(), ask()] == [5, 5]
