"""Several processes have their engines from one that has imported SGLang (wire.Join)."""

import socket
from pathlib import Path

import pytest
from msgspec.structs import replace

from eagletwin.harness.core.case import Adaptive, Case, EngineSettings, Request, SGLangSettings, Tier
from eagletwin.harness.core.run_spec import CPU
from eagletwin.harness.engines import protocol
from eagletwin.harness.engines.host import Host, WouldNotStart
from eagletwin.harness.engines.source import INSTALLED
from eagletwin.harness.engines.start import Zygote

CASE = Case(name="joined", model="llama-tiny", requests=(Request(id="a", prompt=(7, 3), max_new_tokens=3),), num_steps=1)

_ADAPTIVE = EngineSettings(sglang=SGLangSettings(adaptive=Adaptive(tiers=(Tier(batch=1, steps=(1, 2)),))))


def _joined(host: Host) -> Host:
    connection = host.shared()
    assert connection is not None
    return Host(Zygote.joined(connection.detach(), INSTALLED, CPU))


def test_who_joins_has_engines_of_its_own_and_leaves_those_of_others_alone(host: Host, tmp_path: Path) -> None:
    for name in ("first", "theirs", "again"):
        (tmp_path / name).mkdir()
    first = host.engine(CASE).run(CASE, tmp_path / "first")
    with _joined(host) as joined, _joined(host) as other:
        assert joined.engine(CASE) is not host.engine(CASE)
        theirs = joined.engine(CASE).run(CASE, tmp_path / "theirs")
        assert theirs.header.tensors_sha256 == first.header.tensors_sha256
        assert (joined.version, other.version) == (host.version, "")
        other.connection()
        assert other.version == host.version
        joined.close()
        assert other.engine(CASE).alive
    assert host.engine(CASE).run(CASE, tmp_path / "again").header.tensors_sha256 == first.header.tensors_sha256


def test_what_its_engines_write_is_apart_from_what_others_have_written(host: Host, tmp_path: Path) -> None:
    """An engine that was built removes what SGLang left in its folder, while those of others stand and run."""
    host.connection()
    assert host._zygote is not None
    scratch, case = host._zygote.scratch, replace(CASE, engine=_ADAPTIVE)
    others = scratch / "tmp-of-another"
    others.touch()
    before = {path.name for path in scratch.iterdir()}
    with _joined(host) as joined:
        joined.engine(case).run(case, tmp_path)
        assert others.exists()
        [own] = [path for path in scratch.iterdir() if path.name not in before]
        assert [path.name.partition("-")[0] for path in own.iterdir()] == ["adaptive"]
    with _joined(host) as last:
        last.engine(CASE)  # it is built when the first was seen to have left
        assert not own.exists()
    others.unlink()


def test_one_that_was_joined_and_ended_is_seen_to_have_ended() -> None:
    ours, theirs = socket.socketpair()
    with Zygote.joined(ours.detach(), INSTALLED, CPU) as zygote, Host(zygote) as host:
        protocol.send(theirs, protocol.Ready("any"))
        assert host.connection() is zygote.connection
        assert not zygote.ended
        theirs.close()
        assert zygote.ended


def test_one_that_ends_before_it_is_ready_cannot_be_joined() -> None:
    ours, theirs = socket.socketpair()
    theirs.close()
    with Host(Zygote.joined(ours.detach(), INSTALLED, CPU)) as host, pytest.raises(WouldNotStart, match="ended or fell silent"):
        host.connection()
