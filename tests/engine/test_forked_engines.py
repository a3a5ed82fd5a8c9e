"""An engine with further patches, forked from one that stands: the same as one that is built with them, or none."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.case import Case
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.engines.host import EngineProcess, Host, PatchDoesNotApply

from ..rows import spread


def engines(host: Host, name: str) -> tuple[Case, EngineProcess, EngineProcess]:
    """An entry's case, an engine of SGLang as it is, and one with the entry's remedy, which was foreseen."""
    case, remedy = replace(LEDGER[name].case, exercises=(), name=f"forked-{name}"), LEDGER[name].remedy
    assert remedy is not None
    released = host.engine(case, foreseen=(remedy,))
    return case, released, host.engine(case, (remedy,))


def trace(engine: EngineProcess, case: Case, folder: Path) -> bytes:
    folder.mkdir()
    engine.run(case, folder)
    return (folder / "trace.safetensors").read_bytes()


@pytest.fixture
def hosts() -> object:
    """Two of their own: in that of other tests an engine may stand that was built otherwise."""
    with Host() as one, Host() as other:
        yield one, other


def test_a_forked_engine_runs_a_case_as_one_that_was_built(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    for name in ("multi-layer-chunk-tail-2",):
        case, released, forked = engines(hosts[0], name)
        remedy = LEDGER[name].remedy
        assert remedy is not None
        built = hosts[1].engine(case, (remedy,))
        assert (released.origin, forked.origin, built.origin) == (None, released, None)
        assert forked.info == built.info
        mended = trace(forked, case, tmp_path / f"{name}-forked")
        assert mended == trace(built, case, tmp_path / f"{name}-built")
        assert mended != trace(released, case, tmp_path / f"{name}-released")  # and that is as it was


@pytest.mark.parametrize("name", spread(["standalone-shift", "indices-overflow", "draft-window"]))
def test_what_a_patch_changes_in_a_build_is_built(host: Host, name: str) -> None:
    _, _, engine = engines(host, name)
    assert engine.origin is None


def test_what_was_not_foreseen_is_built(host: Host) -> None:
    case = replace(LEDGER["certain-node"].case, exercises=(), page_size=4)
    host.engine(case)
    assert host.engine(case, (LEDGER["certain-node"].remedy,)).origin is None


def test_a_patch_that_does_not_fit_is_refused_as_ever(host: Host) -> None:
    case, remedy = replace(LEDGER["certain-node"].case, exercises=(), page_size=16), LEDGER["certain-node"].remedy
    assert remedy is not None
    unfit = Patch(name="unfit", edits=(Edit(target=remedy.edits[0].target, match="no such text", replacement=""),))
    host.engine(case, foreseen=(remedy,))
    with pytest.raises(PatchDoesNotApply, match="occurs 0 times"):
        host.engine(case, (unfit,))


@pytest.mark.long
def test_a_forked_engine_ends_with_the_one_it_comes_from_and_comes_again(hosts: tuple[Host, Host], tmp_path: Path) -> None:
    case, released, forked = engines(hosts[0], "certain-node")
    before = trace(forked, case, tmp_path / "before")
    released.close()
    assert not forked.alive
    _, released, again = engines(hosts[0], "certain-node")
    assert again.origin is released
    assert again is not forked
    assert trace(again, case, tmp_path / "after") == before
