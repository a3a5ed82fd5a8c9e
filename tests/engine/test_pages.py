"""The pages of real runs: each planted fault has one, with the numbers around it, and the trees that it is about."""

from html import unescape
from pathlib import Path

import pytest

from eagletwin.harness.check.argument import argue
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.judge.judge import judge
from eagletwin.harness.page.document import Document
from eagletwin.harness.page.render import html_of
from eagletwin.harness.page.run import run_page

from ..rows import spread
from .changes import Change, last_of
from .test_judge_sees_every_number import PLANTED
from .test_judge_sees_every_tree import CHANGES


def page_of(trace: Trace, stage: str, tensor: str, change: Change) -> Document:
    number = last_of(trace, stage, tensor)
    wrong = Trace(trace.header, {**trace.tensors, f"{number}.{tensor}": change(trace.tensor(number, tensor))})
    verdict = judge(wrong)
    assert verdict.first is not None
    made = run_page(wrong, verdict, argument=argue(trace.header, verdict, trace=wrong))
    text = unescape(html_of(made))
    for said in (verdict.first.rule, verdict.first.expected, verdict.first.actual, verdict.first.index):
        assert said in text
    assert made.timeline is not None
    marks = [mark for lane in made.timeline.lanes for mark in lane.marks]
    assert sum(mark.first for mark in marks) == 1
    assert sum(mark.wrong for mark in marks) == 1 + sum(verdict.later.values())
    return made


def signs(page: Document) -> int:
    return sum(cell.kind == "wrong" for table in page.tables for row in table.rows for cell in row.cells)


@pytest.mark.parametrize(("stage", "tensor", "change", "rule"), spread(PLANTED, lambda row: row[3]))
def test_a_planted_fault_has_a_page(busy_trace: Trace, stage: str, tensor: str, change: Change, rule: str) -> None:
    made = page_of(busy_trace, stage, tensor, change)
    assert made.headline.startswith(rule)
    assert signs(made) or not made.tables
    counted = rule == "pool.accounting" or tensor in ("free", "hidden_out") or change.__name__ in ("shorten", "lengthen")
    assert made.tables or counted


@pytest.mark.parametrize(("stage", "tensor"), spread(CHANGES, lambda row: min(CHANGES[row][1])))
def test_a_planted_fault_of_a_tree_is_drawn(tree_trace: Trace, stage: str, tensor: str) -> None:
    made = page_of(tree_trace, stage, tensor, CHANGES[stage, tensor][0])
    if not made.trees:
        assert not made.headline.startswith("tree.")
        return
    expected, actual = made.trees
    assert (expected.title, actual.title) == ("Expected", "Actual")
    assert all(0 < node.x < tree.width and 0 < node.y < tree.height for tree in made.trees for node in tree.nodes)
    assert len({(node.x, node.y) for node in actual.nodes}) == len(actual.nodes)


def test_an_equal_run_has_a_page_without_a_divergence(busy_trace: Trace) -> None:
    made = run_page(busy_trace, judge(busy_trace), argument="EQUAL")
    assert (made.status, made.fields, made.trees, made.tables) == ("equal", (), (), ())
    assert made.timeline is not None
    assert [lane.name for lane in made.timeline.lanes if lane.name != "scheduler"] == ["a", "b"]
    kinds = {mark.kind for lane in made.timeline.lanes for mark in lane.marks}
    assert kinds == {"chunk", "round", "end", "event"}


def test_the_mask_of_a_wrong_mask_is_shown_whole(tree_trace: Trace) -> None:
    number = last_of(tree_trace, "draft", "mask")
    mask = tree_trace.tensor(number, "mask").clone()
    mask[3, 5] = not mask[3, 5]
    wrong = Trace(tree_trace.header, {**tree_trace.tensors, f"{number}.mask": mask})
    verdict = judge(wrong)
    assert verdict.rule == "tree.mask"
    table = run_page(wrong, verdict, argument="").tables[0]
    assert len(table.rows) == tree_trace.header.case.verify_nodes
    bad = [(row, column) for row, one in enumerate(table.rows) for column, cell in enumerate(one.cells) if cell.kind == "wrong"]
    assert bad == [(3, 6)]  # the first column names the node


def test_positions_of_a_tree_stand_below_its_nodes(tree_trace: Trace) -> None:
    number = last_of(tree_trace, "draft", "positions")
    positions = tree_trace.tensor(number, "positions").clone()
    positions[4] += 1
    verdict = judge(wrong := Trace(tree_trace.header, {**tree_trace.tensors, f"{number}.positions": positions}))
    expected, actual = run_page(wrong, verdict, argument="").trees
    for tree, value in ((expected, int(positions[4]) - 1), (actual, int(positions[4]))):
        [node] = [node for node in tree.nodes if node.wrong]
        assert (node.label, node.note) == ("4", str(value))


def test_no_page_of_a_run_names_a_folder_outside_of_it(busy_trace: Trace, tmp_path: Path) -> None:
    assert str(tmp_path.parent) not in html_of(run_page(busy_trace, judge(busy_trace), argument=""))
