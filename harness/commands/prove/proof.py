"""Prove a fix: red without it, green with it, on the real worker.

For an entry of the ledger the same case runs twice: with the fix and without it, one of the two by a change in memory; or, for
an approximation that the judge declares, as declared and as it should be. The proof holds if the first is `equal` and the
second is `diverged` by the rule that the entry names (`unknown`, if that rule is that the worker survives). A live bug that
no longer shows makes its proof fail: the entry must be brought up to date.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from eagletwin.cases.entry import Entry, Known, Side
from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.errors import EXIT_DIVERGED, EXIT_EQUAL, EXIT_HARNESS, EXIT_UNKNOWN, EagletwinError, InputError
from eagletwin.harness.core.run_spec import DEFAULT_RUN, RunSpec
from eagletwin.harness.engines.host import Host, WouldNotStart
from eagletwin.harness.engines.provision import releases
from eagletwin.harness.engines.release_hosts import hosts
from eagletwin.harness.judge.completeness import shows_instead

from ..matrix import Cell, Matrix, Question, refused


def _red(rule: str) -> str:
    """The status of the case on a worker with the bug: unknown if the worker does not survive it."""
    return "unknown" if rule.startswith("engine.") else "diverged"


@dataclass(frozen=True, slots=True)
class Proof:
    """Both sides of an entry: of one SGLang, where a side may be the release as it is; or of the releases around the fix.

    any_rule  whether the bug may show by another rule than the entry's: in another model another number can be the first
    another   a live bug with whose candidate fix alone the case is equal, too: what diverges may be that one
    wheels    whether the sides are the releases `last_bad` and `fixed`, unchanged but for the entry's `by_hand` and `beside`
    """

    entry: Known
    green: Cell
    red: Cell
    any_rule: bool = False
    another: str = ""
    wheels: bool = False

    @property
    def holds(self) -> bool:
        return (
            not self.errors
            and self.green.verdict.status == "equal"
            and not self.unchecked
            and not self.unreached
            and not self.another
            and self.red.verdict.status == _red(self.entry.rule)
            and (self.any_rule or self.red.verdict.rule in (self.entry.rule, self.stands_in))
        )

    @property
    def errors(self) -> list[EagletwinError]:
        """Why a side did not run; it proves nothing then, and stops no other proof."""
        return list(dict.fromkeys(side.error for side in (self.red, self.green) if side.error is not None))

    @property
    def why(self) -> str:
        """The same in words, with the releases that did not run."""
        if not self.wheels:
            return "; ".join(error.cause for error in self.errors)
        named = ((self.entry.last_bad, self.red.error), (self.entry.fixed, self.green.error))
        return self.entry.hidden or "; ".join(f"{release}: {error.cause}" for release, error in named if error is not None)

    @property
    def stands_in(self) -> str:
        """The rule by which the bug shows where a graph hides the entry's own from both sides; empty: none, or not needed."""
        green, red, rule = self.green.verdict, self.red.verdict, self.entry.rule
        hidden = all(verdict.unseen.get(rule) and not verdict.checked.get(rule) for verdict in (green, red))
        return red.rule if hidden and shows_instead(red.rule, rule) else ""

    @property
    def unreached(self) -> tuple[str, ...]:
        """Functions of a side's patch of which no changed statement ran: what came out says nothing of them. On the side that
        is wrong, those that were called: the bug may keep the case from calling the rest."""
        if self.wheels or self.green.outcome is None or self.red.outcome is None:
            return ()
        idle = (name for change in self.green.outcome.trace.changes if change.patch for name in change.idle)
        called = self.red.outcome.trace.header.unreached_edits or ()
        return (*dict.fromkeys(idle), *called)

    @property
    def unchecked(self) -> bool:
        """Whether the rule is one of kernels, and some of them ran with the fix where no such rule is checked."""
        outcome = self.green.outcome
        return self.entry.rule.startswith("kernel.") and outcome is not None and bool(outcome.trace.header.fallbacks)

    @property
    def exit_code(self) -> int:
        if self.holds:
            return EXIT_EQUAL
        for error in self.errors:
            return EXIT_UNKNOWN if self.wheels or isinstance(error, WouldNotStart) else error.exit_code
        unknown = bool(self.unchecked or self.unreached or self.another)
        if not unknown and self.green.verdict.status == "diverged":
            return EXIT_DIVERGED  # whatever the other side came to: it is wrong with the fix
        unknown = unknown or "unknown" in (self.green.verdict.status, self.red.verdict.status)
        return EXIT_UNKNOWN if unknown else EXIT_DIVERGED


def prove(host: Host, entries: Sequence[Entry], runs: Path, run: RunSpec = DEFAULT_RUN) -> Iterator[Proof]:
    """Prove entries one by one, in folders of their own below `runs`. Raises InputError for options that fit no engine."""
    matrix = Matrix()
    for entry in entries:
        green = matrix.ask(host, _question(entry, "green", runs, run))
        red = green if green.error is not None else matrix.ask(host, _question(entry, "red", runs, run))
        yield Proof(entry, green, red)


def _question(entry: Entry, name: str, runs: Path, run: RunSpec) -> Question:
    side = side_run(entry, entry.green if name == "green" else entry.red, run)
    known = entry.id in LEDGER and LEDGER[entry.id].case == entry.case
    again = side.command("check", entry.id) if known else None
    return Question(what=entry.case, name=f"{entry.id}-{name}", out=runs, run=side, again=again)


def side_run(entry: Entry, side: Side, run: RunSpec) -> RunSpec:
    """The run of a side, with the run's own changes beside the entry's: behind them, since SGLang's own switch, which undoes
    some fixes, must read the source of what it changes."""
    own = entry.run(side, run)
    return replace(own, patches=(*own.patches, *run.patches), changes=(*own.changes, *run.changes))


def worst(codes: Sequence[int]) -> int:
    """One exit code for several: a divergence outweighs a failure of the harness, that a doubt, and a doubt a success."""
    for code in (EXIT_DIVERGED, EXIT_HARNESS, EXIT_UNKNOWN):
        if code in codes:
            return code
    return EXIT_EQUAL if codes else EXIT_UNKNOWN


def prove_on_wheels(
    entries: Sequence[Known],
    runs: Path,
    run: RunSpec = DEFAULT_RUN,
    tell: Callable[[str], None] = lambda text: None,
) -> Iterator[Proof]:
    """Prove fixed entries on the releases around their fix, each release started once. Live ones have no such pair."""
    matrix, fixed = Matrix(), [entry for entry in entries if entry.fixed]
    wanted = {release for entry in fixed if entry.last_bad for release in (entry.last_bad, entry.fixed)}
    found: dict[tuple[str, str], Cell] = {}
    for name, host in hosts([name for name in releases() if name in wanted]):
        chosen = [entry for entry in fixed if entry.last_bad and name in (entry.last_bad, entry.fixed)]
        tell(f"SGLang {name}: {', '.join(entry.id for entry in chosen)}")
        for entry in chosen:
            found[entry.id, name] = matrix.ask(host, _on_wheel(entry, name, runs, run))
    for entry in fixed:
        hidden = refused(InputError(entry.hidden, consequence="", remedy=""))
        green, red = (found.get((entry.id, release), hidden) for release in (entry.fixed, entry.last_bad))
        yield Proof(entry, green, red, wheels=True)


def _on_wheel(entry: Known, release: str, runs: Path, run: RunSpec) -> Question:
    name = f"{entry.id}-on-{release}"
    if not isinstance(entry, Entry):
        return Question(what=entry, name=name, out=runs)
    changes = (entry.by_hand if release == entry.last_bad else None, entry.beside.get(release))
    patches = tuple(patch for patch in changes if patch is not None)
    again = run.command("prove", "--releases", entry.id) if patches else replace(run, sglang=release).command("check", entry.id)
    return Question(what=entry.case, name=name, out=runs, run=replace(run, patches=patches), again=again)
