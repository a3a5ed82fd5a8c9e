"""The plan for a GPU that names every batch size and every path: run on a CPU, the batches are the same ones."""

from pathlib import Path

import pytest

from eagletwin.harness.engines.host import Host
from eagletwin.harness.judge.judge import judge

from ..lab.gpu.batches import PATHS, path, paths
from ..lab.gpu.sizes import CONFIGURATIONS, SIZES, every_size


@pytest.mark.long
def test_every_batch_size_takes_every_path_with_overlap_and_without(overlapped: Host, tmp_path: Path) -> None:
    """Batches depend on arrivals alone, so one run of a configuration, with overlap, stands for all engines of it."""
    jobs = every_size()
    for name in CONFIGURATIONS:
        mine = [job for job in jobs if job.name.startswith(f"sizes-{name}-")]
        first = mine[0].cases[0]
        (tmp_path / name).mkdir()
        trace = overlapped.engine(first).run(first, tmp_path / name)
        assert judge(trace).status == "equal"
        sizes = {int(key.split()[0]) for key in paths(trace, ())}
        assert sizes == set(SIZES)
        for overlap in (False, True):
            captured = [job.mode.graphs for job in mine if job.mode.overlap == overlap]
            taken = {(size, path(size, graphs, size <= max(graphs, default=0))) for graphs in captured for size in sizes}
            assert taken == {(size, how) for size in SIZES for how in PATHS}
        assert {job.cases[0].page_size for job in mine} == {1, 4}
        assert {event.kind for event in mine[0].cases[1].events} == {"abort", "retract", "pause", "resume"}
