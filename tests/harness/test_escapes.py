"""docs/records/escapes.md: its rows name what there is, and its counts are theirs."""

import re
from collections import Counter
from pathlib import Path

from eagletwin.cases.ledger import with_probes
from eagletwin.harness.core.verdict import RULES

PAGE = Path(__file__).parents[2] / "docs" / "records" / "escapes.md"
STATES = ("shown", "in sight", "not")
COMMANDS = ("acceptance", "kernels")


def sections() -> dict[str, list[list[str]]]:
    """The cells of each row behind a table's head, by section."""
    _, *parts = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    rows = {part.split("\n")[0]: [line for line in part.split("\n") if line.startswith("| ")][1:] for part in parts}
    return {name: [[cell.strip() for cell in line.strip("|").split("|")] for line in lines] for name, lines in rows.items()}


def test_each_row_has_a_state_and_what_is_shown_names_by_what() -> None:
    ledger, rules = {entry.id for entry in with_probes(["all"])}, set(RULES)
    for rows in sections().values():
        for report, _, state, by, *_ in rows:
            assert state in STATES, report
            assert by, report
            named = re.findall(r"`([^`]+)`", by)
            if state == "shown":
                own = [name for name in named if name in ledger or name in rules or name in COMMANDS]
                assert own or "planted" in by, report
            for name in named:
                if re.fullmatch(r"[a-z]+\.[a-z_]+", name):
                    assert name in rules, (report, name)


def test_the_counts_are_those_of_the_rows() -> None:
    head = PAGE.read_text(encoding="utf-8").split("\n## ", 1)[0]
    for name, rows in sections().items():
        counted = Counter(row[2] for row in rows)
        assert f"| {name} | {' | '.join(str(counted[state]) for state in STATES)} |" in head, (name, counted)


def test_every_entry_of_the_ledger_has_its_row() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert not [entry.id for entry in with_probes(["all"]) if f"`{entry.id}`" not in text]
