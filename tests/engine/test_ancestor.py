"""Zygotes of one process are forked from one ancestor, and none outlives it."""

from pathlib import Path

import psutil
import pytest

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.engines import prefork
from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.source import Source
from eagletwin.harness.judge.judge import judge

from .older import host_of


def ancestors() -> list[psutil.Process]:
    children = [child for child in psutil.Process().children() if child.status() != psutil.STATUS_ZOMBIE]
    return [child for child in children if any(word.endswith("processes.ancestor") for word in child.cmdline())]


@pytest.mark.long
def test_what_every_sglang_imports_of_others_is_imported_once(host: Host) -> None:
    host.connection()
    before = ancestors()
    zygotes = [zygote for one in before for zygote in one.children()]
    with Host() as other:
        other.connection()
        assert ancestors() == before
        [zygote] = {zygote for one in before for zygote in one.children()} - {*zygotes}
    assert not zygote.is_running()


@pytest.mark.long
@pytest.mark.slow
def test_a_zygote_ends_with_its_ancestor_and_the_next_case_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefork, "_standing", None)
    others, case = ancestors(), LEDGER["25015"].case
    with Host() as host:
        host.engine(case)
        [own] = (one for one in ancestors() if one not in others)
        [zygote] = own.children()
        own.kill()
        zygote.wait()
        assert host._zygote is not None
        host._zygote._process.wait()
        assert host._zygote.ended
        assert judge(host.engine(case).run(case, tmp_path)).status == "equal"
        assert prefork._standing is not None
    prefork._standing.connection.close()


def test_an_sglang_with_packages_of_its_own_is_no_fork_of_it(tmp_path: Path) -> None:
    """A release's pinned transformers, and a tree beside which another package lies."""
    tree, pinned = tmp_path / "tree", tmp_path / "pinned"
    for package in (tree / "sglang", pinned / "transformers"):
        package.mkdir(parents=True)
        (package / "__init__.py").touch()
    (tree / "sglang-1.dist-info").mkdir()
    assert prefork.may_fork(Source())
    assert prefork.may_fork(Source("tree", (tree,)))
    assert not prefork.may_fork(Source("tree", (tree, pinned)))
    (tree / "orjson.py").touch()
    assert not prefork.may_fork(Source("tree", (tree,)))


def test_with_other_packages_by_pythonpath_none_is_forked(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    host.connection()
    assert prefork.may_fork(Source())
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    assert not prefork.may_fork(Source())


@pytest.mark.long
@pytest.mark.slow
def test_a_release_runs_with_the_transformers_that_it_pins(host: Host) -> None:
    host.connection()
    with host_of("0.5.12") as other:
        [_, layer] = other.source.paths
        assert layer.name == f"transformers-{other.engine(LEDGER['25015'].case).info.transformers}"
