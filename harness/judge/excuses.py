"""Why numbers that are not the reference's own are no divergences: what a verdict names and counts. Called by judge.py."""

from collections import Counter
from collections.abc import Iterator

from eagletwin.harness.core.verdict import MOST_EXCUSES, Excuse, View

from .compare import Findings
from .routing import Nudge, Ties


def of_experts(ties: Ties) -> Excuse:
    """Ties of experts were decided so."""
    if isinstance(ties, Nudge):
        return Excuse(kind="nudge", part=ties.part, expert=ties.expert, size=ties.size)
    return Excuse(kind="experts")


def excuses(findings: Findings, reached: tuple[str, ...], view: View) -> tuple[dict[str, int], tuple[Excuse, ...]]:
    """How many there are of each kind, and the first of them in the order in which data flows."""
    every = [excuse for _, excuse in sorted(findings.excuses, key=lambda pair: pair[0])]
    every += _views(reached, view)
    return dict(Counter(excuse.kind for excuse in every)), tuple(every[:MOST_EXCUSES])


def _views(reached: tuple[str, ...], view: View) -> Iterator[Excuse]:
    """The views in which what SGLang does counts as right, where the case reached what they differ in from the papers."""
    used: dict[View, bool] = {
        "slot_layout": view != "true_tree" and "branch_changes_parent" in reached,
        "last_fed": view != "committed" and "look_ahead_rejected" in reached,
        "shifted": view == "shifted",
    }
    return (Excuse(kind="view", view=name) for name, counts in used.items() if counts)
