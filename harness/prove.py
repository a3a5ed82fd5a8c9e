"""Prove a fix: red without it, green with it, on the real worker.

For an entry of the ledger the same case runs twice: with the fix and without it, one of the two by a change in memory; or, for
an approximation that the judge declares, as declared and as it should be. The proof holds if the first is `equal` and the
second is `diverged` by the rule that the entry names (`unknown`, if that rule is that the worker survives). A live bug that
no longer shows makes its proof fail: the entry must be brought up to date.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from eagletwin.cases.entry import Entry

from .check import Outcome, check
from .engines.lock import releases
from .engines.process import Host, Limits
from .engines.provision import NotFetched
from .engines.wire import Kernels
from .errors import EXIT_DIVERGED, EXIT_EQUAL, EXIT_UNKNOWN, EagletwinError
from .judge import Verdict
from .paths import new_run_folder
from .probes import Probe, probe_text
from .releases.hosts import hosts


def _red(rule: str) -> str:
    """What the case comes to where the bug is: a worker that does not survive it leaves the case unknown."""
    return "unknown" if rule.startswith("engine.") else "diverged"


@dataclass(frozen=True, slots=True)
class Proof:
    entry: Entry
    fixed: Outcome
    reverted: Outcome

    @property
    def holds(self) -> bool:
        return (
            self.fixed.verdict.status == "equal"
            and self.reverted.verdict.status == _red(self.entry.rule)
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
            again = " ".join([entry.command(side, host.source.name), *host.mode.options])
            outcomes.append(check(engine, entry.case, folder, limits, view=side.view, again=again))
        yield Proof(entry, *outcomes)


def worst(codes: Sequence[int]) -> int:
    """One exit code for several: a divergence outweighs a doubt, and a doubt outweighs a success."""
    for code in (EXIT_DIVERGED, EXIT_UNKNOWN):
        if code in codes:
            return code
    return EXIT_EQUAL


@dataclass(frozen=True, slots=True)
class Seen:
    """What a release made of an entry or a probe, and that as a person reads it."""

    verdict: Verdict
    text: str


@dataclass(frozen=True, slots=True)
class WheelProof:
    """An entry on published wheels, unchanged but for what it says `by_hand` and `beside`: `bad`, the last before the fix, and
    `good`, the first with it.

    why  what kept a side from being run; then it is None
    """

    entry: Entry | Probe
    bad: Seen | None
    good: Seen | None
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
    entries: Sequence[Entry | Probe],
    runs: Path,
    limits: Limits,
    kernels: Kernels = "fast",
    tell: Callable[[str], None] = lambda text: None,
) -> Iterator[WheelProof]:
    """Prove fixed entries on the releases around their fix, each release started once. Live ones have no such pair."""
    wanted = {release for entry in entries if entry.last_bad for release in (entry.last_bad, entry.fixed)}
    found: dict[tuple[str, str], Seen] = {}
    failed: dict[tuple[str, str], str] = {}
    for name, host in hosts([name for name in releases() if name in wanted]):
        asked = [entry for entry in entries if entry.last_bad and name in (entry.last_bad, entry.fixed)]
        tell(f"SGLang {name}: {', '.join(entry.id for entry in asked)}")
        for entry in asked:
            try:
                found[entry.id, name] = _on_wheel(entry, name, host, runs, limits, kernels)
            except EagletwinError as error:
                failed[entry.id, name] = f"{name}: {error.cause}"
    for entry in entries:
        if entry.fixed:
            sides = [(entry.id, entry.last_bad), (entry.id, entry.fixed)]
            why = entry.hidden or "; ".join(failed[side] for side in sides if side in failed)
            yield WheelProof(entry, found.get(sides[0]), found.get(sides[1]), why)


def _on_wheel(
    entry: Entry | Probe, release: str, host: Host | NotFetched, runs: Path, limits: Limits, kernels: Kernels
) -> Seen:
    if isinstance(host, NotFetched):
        raise host
    if isinstance(entry, Probe):
        verdict = entry.ask(host)
        return Seen(verdict, probe_text(entry, verdict, host.version))
    changes = (entry.by_hand if release == entry.last_bad else None, entry.beside.get(release))
    patches = tuple(patch for patch in changes if patch is not None)
    again = f"eagletwin prove --releases {entry.id}" if patches else f"eagletwin check {entry.id} --sglang {release}"
    engine = host.engine(entry.case, patches, kernels)
    folder = new_run_folder(runs, f"{entry.id}-on-{release}")
    outcome = check(engine, entry.case, folder, limits, again=again)
    return Seen(outcome.verdict, f"{outcome.report}\n  folder: {folder}\n")
