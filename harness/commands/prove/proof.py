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

from eagletwin.cases.entry import Entry, Known, Probe, Side
from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.check.confirm import Outcome, check
from eagletwin.harness.check.function_calls import ask, probe_text
from eagletwin.harness.core.errors import EXIT_DIVERGED, EXIT_EQUAL, EXIT_HARNESS, EXIT_UNKNOWN, EagletwinError, InputError
from eagletwin.harness.core.files import new_run_folder
from eagletwin.harness.core.run_spec import DEFAULT_RUN, RunSpec
from eagletwin.harness.core.verdict import Verdict
from eagletwin.harness.engines.host import Host, WouldNotStart
from eagletwin.harness.engines.provision import NotFetched, releases
from eagletwin.harness.engines.release_hosts import hosts
from eagletwin.harness.judge.completeness import shows_instead
from eagletwin.harness.page.run import write_run


def _red(rule: str) -> str:
    """The status of the case on a worker with the bug: unknown if the worker does not survive it."""
    return "unknown" if rule.startswith("engine.") else "diverged"


@dataclass(frozen=True, slots=True)
class Proof:
    """Both sides of an entry. What is changed on which of them is the entry's own: a side may be the release as it is.

    any_rule  whether the bug may show by another rule than the entry's: in another model another number can be the first
    another   a live bug with whose candidate fix alone the case is equal, too: what diverges may be that one
    """

    entry: Entry
    green: Outcome
    red: Outcome
    any_rule: bool = False
    another: str = ""

    @property
    def holds(self) -> bool:
        return (
            self.green.verdict.status == "equal"
            and not self.unchecked
            and not self.unreached
            and not self.another
            and self.red.verdict.status == _red(self.entry.rule)
            and (self.any_rule or self.red.verdict.rule in (self.entry.rule, self.stands_in))
        )

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
        idle = (name for change in self.green.trace.changes if change.patch for name in change.idle)
        called = self.red.trace.header.unreached_edits or ()
        return (*dict.fromkeys(idle), *called)

    @property
    def unchecked(self) -> bool:
        """Whether the rule is one of kernels, and some of them ran with the fix where no such rule is checked."""
        return self.entry.rule.startswith("kernel.") and bool(self.green.trace.header.fallbacks)

    @property
    def exit_code(self) -> int:
        if self.holds:
            return EXIT_EQUAL
        unknown = bool(self.unchecked or self.unreached or self.another)
        if not unknown and self.green.verdict.status == "diverged":
            return EXIT_DIVERGED  # whatever the other side came to: it is wrong with the fix
        unknown = unknown or "unknown" in (self.green.verdict.status, self.red.verdict.status)
        return EXIT_UNKNOWN if unknown else EXIT_DIVERGED


@dataclass(frozen=True, slots=True)
class NoProof:
    """An entry of which a side could not be run: `error` says why. It proves nothing, and stops no other proof."""

    entry: Entry
    error: EagletwinError

    @property
    def holds(self) -> bool:
        return False

    @property
    def exit_code(self) -> int:
        return EXIT_UNKNOWN if isinstance(self.error, WouldNotStart) else self.error.exit_code


def prove(host: Host, entries: Sequence[Entry], runs: Path, run: RunSpec = DEFAULT_RUN) -> Iterator[Proof | NoProof]:
    """Prove entries one by one, in folders of their own below `runs`. Raises InputError for options that fit no engine.

    An SGLang that cannot be imported is tried once: the entries that are left have the same answer.
    """
    dead: EagletwinError | None = None
    for entry in entries:
        try:
            if dead is not None:
                raise dead
            green, red = (_prove_side(host, entry, side, runs, run) for side in ("green", "red"))
            yield Proof(entry, green, red)
        except InputError:
            raise
        except EagletwinError as error:
            dead = error if isinstance(error, WouldNotStart) and not host.version else None
            yield NoProof(entry, error)


def _prove_side(host: Host, entry: Entry, name: str, runs: Path, run: RunSpec) -> Outcome:
    side = side_run(entry, entry.green if name == "green" else entry.red, run)
    folder = new_run_folder(runs, f"{entry.id}-{name}")
    engine = host.engine(entry.case, side.patches, side.kernels)
    known = entry.id in LEDGER and LEDGER[entry.id].case == entry.case
    again = side.command("check", entry.id if known else folder / "case.json")
    outcome = check(engine, entry.case, folder, side, again=again)
    write_run(outcome)
    return outcome


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


@dataclass(frozen=True, slots=True)
class WheelSide:
    """What a release made of an entry or a probe, and that as a person reads it. folder: the run folder; a probe has none."""

    verdict: Verdict
    text: str
    folder: Path | None = None


@dataclass(frozen=True, slots=True)
class WheelProof:
    """An entry on published wheels, unchanged but for the entry's `by_hand` and `beside`: `bad`, the last before the fix, and
    `good`, the first with it.

    why  why a side, which is None then, was not run
    """

    entry: Known
    bad: WheelSide | None
    good: WheelSide | None
    why: str = ""

    @property
    def holds(self) -> bool:
        return (
            self.bad is not None
            and self.good is not None
            and self.bad.verdict.status == _red(self.entry.rule)
            and self.bad.verdict.rule == self.entry.rule
            and self.good.verdict.status == "equal"
        )

    @property
    def exit_code(self) -> int:
        if self.holds:
            return EXIT_EQUAL
        sides = (self.bad, self.good)
        return EXIT_UNKNOWN if any(side is None or side.verdict.status == "unknown" for side in sides) else EXIT_DIVERGED


def prove_on_wheels(
    entries: Sequence[Known],
    runs: Path,
    run: RunSpec = DEFAULT_RUN,
    tell: Callable[[str], None] = lambda text: None,
) -> Iterator[WheelProof]:
    """Prove fixed entries on the releases around their fix, each release started once. Live ones have no such pair."""
    wanted = {release for entry in entries if entry.last_bad for release in (entry.last_bad, entry.fixed)}
    found: dict[tuple[str, str], WheelSide] = {}
    failed: dict[tuple[str, str], str] = {}
    for name, host in hosts([name for name in releases() if name in wanted]):
        asked = [entry for entry in entries if entry.last_bad and name in (entry.last_bad, entry.fixed)]
        tell(f"SGLang {name}: {', '.join(entry.id for entry in asked)}")
        for entry in asked:
            try:
                found[entry.id, name] = _on_wheel(entry, name, host, runs, run)
            except EagletwinError as error:
                failed[entry.id, name] = f"{name}: {error.cause}"
    for entry in entries:
        if entry.fixed:
            sides = [(entry.id, entry.last_bad), (entry.id, entry.fixed)]
            why = entry.hidden or "; ".join(failed[side] for side in sides if side in failed)
            yield WheelProof(entry, found.get(sides[0]), found.get(sides[1]), why)


def _on_wheel(entry: Known, release: str, host: Host | NotFetched, runs: Path, run: RunSpec) -> WheelSide:
    if isinstance(host, NotFetched):
        raise host
    if isinstance(entry, Probe):
        verdict = ask(entry, host)
        return WheelSide(verdict, probe_text(entry, verdict, host.version))
    changes = (entry.by_hand if release == entry.last_bad else None, entry.beside.get(release))
    patches = tuple(patch for patch in changes if patch is not None)
    again = run.command("prove", "--releases", entry.id) if patches else replace(run, sglang=release).command("check", entry.id)
    engine = host.engine(entry.case, patches, run.kernels)
    folder = new_run_folder(runs, f"{entry.id}-on-{release}")
    outcome = check(engine, entry.case, folder, run, again=again)
    write_run(outcome)
    return WheelSide(outcome.verdict, f"{outcome.report}\n  folder: {folder}\n", folder)
