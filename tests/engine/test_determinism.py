"""The same case gives the same bytes: in one engine, and in two interpreters that share nothing."""

from pathlib import Path

from eagletwin.harness.case import Case
from eagletwin.harness.engines.process import Host

PARTS = ("trace.json", "trace.safetensors")


def test_two_fresh_interpreters_give_byte_identical_traces(host: Host, busy_case: Case, tmp_path: Path) -> None:
    for name in ("here", "again", "there"):
        (tmp_path / name).mkdir()
    host.engine(busy_case).run(busy_case, tmp_path / "here")
    host.engine(busy_case).run(busy_case, tmp_path / "again")
    with Host() as other:
        other.engine(busy_case).run(busy_case, tmp_path / "there")
    for part in PARTS:
        first = (tmp_path / "here" / part).read_bytes()
        assert first == (tmp_path / "again" / part).read_bytes()
        assert first == (tmp_path / "there" / part).read_bytes()
