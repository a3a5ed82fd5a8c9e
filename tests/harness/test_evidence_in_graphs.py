"""Changed statements that run in the capture of a CUDA graph: they count in the replays of that graph, and of no other."""

from collections.abc import Iterator

import pytest

from eagletwin.harness.engines.sglang import evidence


class Graph:
    """As torch.cuda.CUDAGraph, on no device."""

    def capture_begin(self, pool: object = None) -> None: ...

    def capture_end(self) -> None: ...

    def replay(self) -> None: ...


@pytest.fixture(autouse=True)
def nothing_ran() -> Iterator[None]:
    yield
    evidence.executed.clear()
    evidence.captured.clear()


def capture(*places: str) -> Graph:
    """A graph in whose capture these ran, after a run to warm up."""
    evidence.executed.update(places)
    graph = Graph()
    graph.capture_begin(pool=1)
    evidence.executed.update(places)
    graph.capture_end()
    return graph


def test_a_statement_counts_where_its_graph_is_replayed() -> None:
    evidence.watch_graphs(Graph)
    note = evidence.executed.add  # as changed code does
    note("built")
    small, large = capture("both", "small"), capture("both", "large")
    assert evidence.executed == {"built", "both", "small", "large"}
    of_each_case = evidence.executed - evidence.captured
    assert of_each_case == {"built"}
    for graph, held in ((small, {"both", "small"}), (large, {"both", "large"})):
        evidence.executed.intersection_update(of_each_case)
        graph.replay()
        note("eager")
        assert evidence.executed == {"built", "eager", *held}
