"""The missed bugs of docs/records/detection.md: their rows name rules that exist, and the counts are theirs."""

import re
from collections import Counter
from pathlib import Path

from eagletwin.harness.judge.rules import catalogue

PAGE = Path(__file__).parents[2] / "docs" / "records" / "detection.md"
STATES = ("judged", "not run")


def section() -> str:
    return PAGE.read_text(encoding="utf-8").split("\n## Missed bugs\n", 1)[1].split("\n## ", 1)[0]


def rows() -> list[list[str]]:
    """The cells of each row of the list of reports."""
    lines = [line for line in section().partition("| report |")[2].split("\n") if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_each_row_has_a_state_and_a_reason_and_names_rules_that_exist() -> None:
    assert len(rows()) > 30
    for report, _, state, why in rows():
        assert state in STATES, report
        assert why, report
        for name in re.findall(r"`([a-z]+\.[a-z_]+)`", why):
            assert name in catalogue(), (report, name)


def test_the_counts_are_those_of_the_rows() -> None:
    counted = Counter(state for _, _, state, _ in rows())
    assert f"| {' | '.join(str(counted[state]) for state in STATES)} |" in section()
