"""The divergences that docs/explanation/trees.md shows are what the worker does and what is said of it."""

from pathlib import Path

import pytest

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.check.argument import argue
from eagletwin.harness.engines.host import Host
from eagletwin.harness.judge.judge import judge

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("name", ["8409", "26997-kv"])
def test_the_argument_with_its_tree_is_the_documented_one(host: Host, tmp_path: Path, name: str) -> None:
    entry, text = LEDGER[name], (DOCS / "explanation/trees.md").read_text()
    trace = host.engine(entry.case, entry.red.patches).run(entry.case, tmp_path)
    said = argue(trace.header, judge(trace, view=entry.red.view), trace=trace).split("\n")
    begin, end = said.index(f"  {entry.rule}"), next(n for n, line in enumerate(said) if line.startswith("  node: token"))
    floats = ("  expected", "  actual")  # their last digit is the machine's
    for line in said[begin : end + 1]:
        assert line.startswith(floats) or f"\n{line}\n" in text, line
    assert f"`{entry.command(entry.red)}`" in text
