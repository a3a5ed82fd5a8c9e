"""In CUDA graphs: when a changed statement counts, and when a proof holds."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.check.confirm import Outcome
from eagletwin.harness.commands.matrix import Cell
from eagletwin.harness.commands.prove.proof import Proof
from eagletwin.harness.commands.prove.report import proof_facts
from eagletwin.harness.core.errors import EXIT_DIVERGED, EXIT_EQUAL, EXIT_UNKNOWN
from eagletwin.harness.core.records import Ending, EngineInfo, Header
from eagletwin.harness.core.trace import Trace, new_header
from eagletwin.harness.core.verdict import Verdict
from eagletwin.harness.engines.blocks import OF
from eagletwin.harness.engines.inside import changes, own_loader


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


def test_a_block_counts_where_its_graph_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Another(Graph):
        """Watched by nobody yet."""

        def capture_begin(self, pool: object = None) -> None: ...

        def capture_end(self) -> None: ...

        def replay(self) -> None: ...

    ran = {"file": {1}}
    monkeypatch.setattr(own_loader, "_ran", ran)
    monkeypatch.setenv(OF, "sglang")
    changes.watch_graphs(Another)
    graph = Another()
    graph.capture_begin(pool=1)
    ran["file"].add(2)
    graph.capture_end()
    assert ran == {"file": {1, 2}}
    own_loader.forget_blocks()
    assert ran == {"file": set()}
    graph.replay()
    assert ran == {"file": {2}}


ENTRY = LEDGER["25015"]
ENGINE = EngineInfo(name="sglang", version="0.5.23", device="cuda", kernels="compiled", torch="2.14.1", triton="3.8.0")


def header(**changes: object) -> Header:
    return replace(new_header(ENTRY.case, "", ENGINE, Ending(kind="finished"), ()), **changes)


def proof(rule: str, unseen: int, checked: int = 0, **changes: object) -> Proof:
    """Both sides of #25015: the red one breaks this rule."""
    counts = {"unseen": {ENTRY.rule: unseen}, "checked": {ENTRY.rule: checked}}
    sides = (Verdict(status="equal", **counts), Verdict(status="diverged", rule=rule, **counts))  # type: ignore[arg-type]
    trace = Trace(header(**changes), {})
    return Proof(ENTRY, *(Cell(verdict, Outcome(ENTRY.case, verdict, trace, Path(), "")) for verdict in sides))


def test_the_entrys_own_rule_needs_nothing_to_stand_in_for_it() -> None:
    assert ENTRY.rule == "draft.positions"
    assert proof("draft.positions", 0, 3).holds
    assert proof_facts(proof("draft.positions", 0, 3)).why == ""


@pytest.mark.parametrize("rule", ["draft.scratch_kv", "draft.kv"])
def test_rows_stand_in_for_an_input_that_a_graph_hides(rule: str) -> None:
    found = proof(rule, 6)
    assert found.holds
    assert found.exit_code == EXIT_EQUAL
    assert f"by {rule}, which stands in for draft.positions" in proof_facts(found).why


def test_rows_do_not_stand_in_for_an_input_that_was_seen_nor_any_other_rule() -> None:
    seen = proof("draft.scratch_kv", 6, 3)
    assert not seen.holds
    assert not proof("draft.scratch_kv", 0).holds
    assert not proof("target.kv", 6).holds
    assert seen.exit_code == EXIT_DIVERGED


def test_a_proof_by_an_edit_whose_branch_did_not_run_is_unknown() -> None:
    found = proof("draft.positions", 0, 3, unreached_edits=("a.b",))
    assert not found.holds
    assert found.exit_code == EXIT_UNKNOWN
    assert "no changed statement of a.b ran" in proof_facts(found).why
