"""`gpu run --blocks`: which branches of SGLang's speculative code ran."""

import ast
import importlib
import sys
from pathlib import Path

import msgspec
import pytest

from eagletwin.harness.commands.gpu.blocks import reached, written
from eagletwin.harness.engines.blocks import FOLDER, blocks_of
from eagletwin.harness.engines.sglang import noted_blocks

SOURCE = '''"""A module."""
FAST = True
if FAST:
    WIDTH = 2
else:
    WIDTH = 1


def looped(numbers):
    """What it does."""
    for one in numbers:
        if one > 2:
            return one
        elif one == 2:
            continue
        else:
            pass
    try:
        raise ValueError
    except ValueError:
        match len(numbers):
            case 0:
                return "none"
            case _:
                return "few"


class Worker:
    def run(self):
        return looped([1, 2])

    def never(self):
        while True:
            break


@triton.jit
def kernel(x):
    if x:
        return
'''


def test_blocks_are_the_bodies_of_functions_and_of_branches() -> None:
    found = [(block.line, block.function, block.branch) for block, _, _ in blocks_of(ast.parse(SOURCE))]
    assert found == [
        (4, "", "if FAST"),
        (6, "", "not (FAST)"),
        (10, "looped", ""),
        (12, "looped", "for one in numbers"),
        (13, "looped", "if one > 2"),
        (15, "looped", "if one == 2"),
        (17, "looped", "not (one == 2)"),
        (21, "looped", "except ValueError"),
        (23, "looped", "case 0"),
        (25, "looped", "case _"),
        (30, "Worker.run", ""),
        (33, "Worker.never", ""),
        (34, "Worker.never", "while True"),
    ]


def test_what_ran_is_told_by_file_and_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package, said = tmp_path / "noted_package", tmp_path / "said"
    package.mkdir()
    said.mkdir()
    (package / "__init__.py").write_text("")
    source = SOURCE.replace("@triton.jit", "@(lambda jit: jit)")
    (package / "worker.py").write_text(source)
    monkeypatch.setattr(noted_blocks, "_PACKAGE", package.name)
    monkeypatch.setattr(noted_blocks, "_ran", {})
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv(FOLDER, str(said))
    noted_blocks.install()
    worker = importlib.import_module("noted_package.worker")
    assert worker.Worker().run() == "few"
    noted_blocks.write("cuda")
    monkeypatch.delitem(sys.modules, "noted_package.worker")
    found = {(one.line, one.branch): one.ran for one in reached(said)}
    assert [line for (line, _), ran in found.items() if ran == ("cuda",)] == [4, 10, 12, 15, 17, 21, 25, 30]
    assert all(ran in ((), ("cuda",)) for ran in found.values())
    summary = written(reached(said), tmp_path / "blocks.txt")
    lines = (tmp_path / "blocks.txt").read_text().splitlines()
    assert len(lines) == 13
    assert "worker.py:13\tnot run\tlooped\tif one > 2" in lines
    assert "worker.py:33\tfunction not called\tWorker.never\t" in lines
    assert summary.startswith("blocks of SGLang's speculative code: 13, of which ran 8 on cuda; 3 of 11 in functions")


def test_nothing_is_noted_unless_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    before = list(sys.meta_path)
    noted_blocks.install()
    noted_blocks.write("cpu")
    assert sys.meta_path == before
    assert not list(tmp_path.iterdir())


def test_a_process_that_reached_nothing_still_leaves_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noted_blocks, "_ran", {})
    monkeypatch.setenv(FOLDER, str(tmp_path))
    noted_blocks.write("cpu")
    [file] = tmp_path.iterdir()
    assert msgspec.json.decode(file.read_bytes()) == {}
    assert written(reached(tmp_path), tmp_path / "blocks.txt").startswith(
        "blocks of SGLang's speculative code: 0, of which ran none"
    )
