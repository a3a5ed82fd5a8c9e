"""Changed statements that run in the capture of a CUDA graph: they count in the replays of that graph, and of no other."""

from collections.abc import Iterator

import pytest

from eagletwin.harness.engines.sglang import changes


class Graph:
    """As torch.cuda.CUDAGraph, on no device."""

    def capture_begin(self, pool: object = None) -> None: ...

    def capture_end(self) -> None: ...

    def replay(self) -> None: ...


@pytest.fixture(autouse=True)
def nothing_ran() -> Iterator[None]:
    yield
    changes.executed.clear()
    changes.captured.clear()


def capture(*places: str) -> Graph:
    """A graph in whose capture these ran, after a run to warm up."""
    changes.executed.update(places)
    graph = Graph()
    graph.capture_begin(pool=1)
    changes.executed.update(places)
    graph.capture_end()
    return graph


def test_a_statement_counts_where_its_graph_is_replayed() -> None:
    changes.watch_graphs(Graph)
    note = changes.executed.add  # as changed code does
    note("built")
    small, large = capture("both", "small"), capture("both", "large")
    assert changes.executed == {"built", "both", "small", "large"}
    of_each_case = changes.executed - changes.captured
    assert of_each_case == {"built"}
    for graph, held in ((small, {"both", "small"}), (large, {"both", "large"})):
        changes.executed.intersection_update(of_each_case)
        graph.replay()
        note("eager")
        assert changes.executed == {"built", "eager", *held}
