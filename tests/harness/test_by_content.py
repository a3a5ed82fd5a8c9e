"""Bytecode of SGLang is run only if it was made of the source that is there, wherever that lay then."""

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eagletwin.harness.core.files import cache_folder
from eagletwin.harness.engines.sglang import own_loader
from eagletwin.harness.engines.sglang.own_loader import SourceFinder

NAME = "eagletwin_by_content_probe"


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """Import the module anew, and return what it holds."""
    monkeypatch.setenv("EAGLETWIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", [SourceFinder({NAME: own_loader.Loader}.get), *sys.meta_path])

    def load() -> int:
        sys.modules.pop(NAME, None)
        importlib.invalidate_caches()
        value: int = importlib.import_module(NAME).value
        return value

    yield load
    sys.modules.pop(NAME, None)


def kept() -> list[Path]:
    """The files of bytecode."""
    return list((cache_folder("bytecode") / "by-content").iterdir())


def test_an_edit_of_the_same_size_and_time_is_run(tmp_path: Path, load: Callable[[], int]) -> None:
    source = tmp_path / f"{NAME}.py"
    source.write_text("value = 1\n")
    state = source.stat()
    assert load() == 1
    source.write_text("value = 2\n")
    os.utime(source, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert load() == 2


def test_bytecode_of_this_very_source_is_run_and_damaged_bytecode_is_not(tmp_path: Path, load: Callable[[], int]) -> None:
    source = tmp_path / f"{NAME}.py"
    source.write_text("value = 1\n")
    assert load() == 1
    [cached] = kept()
    whole = cached.read_bytes()
    cached.write_bytes(whole.replace(b"value", b"other"))  # the source is not compiled again: it would have no such name
    with pytest.raises(AttributeError, match="value"):
        load()
    cached.write_bytes(whole[:-3])
    assert load() == 1
    assert cached.read_bytes() == whole


def test_what_was_compiled_in_one_tree_is_run_in_another_under_its_own_path(
    tmp_path: Path, load: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "def where():\n    return (lambda: 1).__code__.co_filename\n\nvalue = 1\n"
    for tree in ("one", "other"):
        source = tmp_path / tree / f"{NAME}.py"
        source.parent.mkdir()
        source.write_text(text)
        monkeypatch.syspath_prepend(str(source.parent))
        assert load() == 1
        assert len(kept()) == 1
        where = sys.modules[NAME].where
        assert {where.__code__.co_filename, where()} == {str(source)}  # tracebacks name the tree that runs
