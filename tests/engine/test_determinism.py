"""The same case gives the same bytes: in one engine, after other cases, and in two interpreters that share nothing."""

from pathlib import Path

import msgspec
import pytest

from eagletwin.harness.core.case import Case
from eagletwin.harness.engines.host import Host

from ..lab.bench.workload import rate_case

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


@pytest.mark.long
def test_a_case_gives_the_same_after_nineteen_others(host: Host, busy_case: Case, tmp_path: Path) -> None:
    engine = host.engine(busy_case)
    alone, after = tmp_path / "alone", tmp_path / "after"
    alone.mkdir()
    engine.run(busy_case, alone)
    for number in range(19):
        (tmp_path / str(number)).mkdir()
        other = msgspec.structs.replace(busy_case, name="other", requests=rate_case(number).requests)
        engine.run(other, tmp_path / str(number), fresh=number == 0)
    after.mkdir()
    assert engine.run(busy_case, after, fresh=False).header.before == 19
    assert (alone / "trace.safetensors").read_bytes() == (after / "trace.safetensors").read_bytes()
