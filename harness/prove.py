"""Prove a fix: red without it, green with it, on the real worker.

For an entry of the ledger the same case runs twice: with the fix and without it, one of the two by a change in memory; or, for
an approximation that the judge declares, as declared and as it should be. The proof holds if the first is `equal` and the
second is `diverged` by the rule that the entry names (`unknown`, if that rule is that the worker survives). A live bug that
no longer shows makes its proof fail: the entry must be brought up to date.
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
            and self.reverted.verdict.status == ("unknown" if self.entry.rule.startswith("engine.") else "diverged")
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
        for side, name in ((entry.green, "fixed"), (entry.red, "reverted")):
            folder = new_run_folder(runs, f"{entry.id}-{name}")
            engine = host.engine(entry.case, side.patches, kernels)
            outcomes.append(
                check(engine, entry.case, folder, limits, view=side.view, again=entry.command(side, host.source.name))
            )
        yield Proof(entry, *outcomes)


def worst(codes: Sequence[int]) -> int:
    """One exit code for several: a divergence outweighs a doubt, and a doubt outweighs a success."""
    for code in (EXIT_DIVERGED, EXIT_UNKNOWN):
        if code in codes:
            return code
    return EXIT_EQUAL
