"""The form of a ledger entry: what a known bug is, how its fix is undone, and the smallest case that shows it."""

from dataclasses import dataclass

from eagletwin.harness.case import Case
from eagletwin.harness.patch import Patch


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One known bug.

    id        the number of the pull request that fixed it
    rule      the rule that the case breaks without the fix
    buggy     releases that have the bug; fixed: the first without it
    trigger   what a run needs for the bug to matter
    revert    undoes the fix on a current SGLang, in memory
    case      minimal: equal with the fix, diverged without
    """

    id: str
    title: str
    rule: str
    buggy: str
    fixed: str
    trigger: str
    revert: Patch
    case: Case
