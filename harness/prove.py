"""Prove a fix: red without it, green with it, on the real worker.

For an entry of the ledger the same case runs twice: as the release is, and with the fix undone in memory. The proof holds if
the first is `equal` and the second is `diverged` by the rule that the entry names.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from eagletwin.cases.entry import Entry

from .check import Outcome, check
from .engines.process import Host, Limits
from .engines.wire import Kernels
from .errors import EXIT_DIVERGED, EXIT_EQUAL, EXIT_UNKNOWN
from .paths import new_run_folder


@dataclass(frozen=True, slots=True)
class Proof:
    entry: Entry
    fixed: Outcome
    reverted: Outcome

    @property
    def holds(self) -> bool:
        return (
            self.fixed.verdict.status == "equal"
            and self.reverted.verdict.status == "diverged"
            and self.reverted.verdict.rule == self.entry.rule
        )

    @property
    def exit_code(self) -> int:
        if self.holds:
            return EXIT_EQUAL
        unknown = "unknown" in (self.fixed.verdict.status, self.reverted.verdict.status)
        return EXIT_UNKNOWN if unknown else EXIT_DIVERGED


def prove(host: Host, entries: Sequence[Entry], runs: Path, limits: Limits, kernels: Kernels = "fast") -> Iterator[Proof]:
    """Prove entries one by one, in folders of their own below `runs`. Raises what building an engine raises."""
    for entry in entries:
        outcomes = []
        for patches, name in (((), f"{entry.id}-fixed"), ((entry.revert,), f"{entry.id}-reverted")):
            again = f"eagletwin check {entry.id}" + (f" --revert {entry.id}" if patches else "")
            folder = new_run_folder(runs, name)
            engine = host.engine(entry.case, patches, kernels)
            outcomes.append(check(engine, entry.case, folder, limits, again=again))
        yield Proof(entry, *outcomes)


def worst(codes: Sequence[int]) -> int:
    """One exit code for several: a divergence outweighs a doubt, and a doubt outweighs a success."""
    for code in (EXIT_DIVERGED, EXIT_UNKNOWN):
        if code in codes:
            return code
    return EXIT_EQUAL
