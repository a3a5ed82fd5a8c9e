"""Prove a fix: red without it, green with it, on the real worker.

For an entry of the ledger the same case runs twice: with the fix and without it, one of the two by a change in memory; or, for
an approximation that the judge declares, as declared and as it should be. The proof holds if the first is `equal` and the
second is `diverged` by the rule that the entry names (`unknown`, if that rule is that the worker survives). A live bug that
no longer shows makes its proof fail: the entry must be brought up to date.
"""

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from eagletwin.cases.entry import Entry, Known, Side
from eagletwin.cases.ledger import ENTRIES, remedies_of
from eagletwin.cases.reach import port_entry
from eagletwin.harness.check.known import may_be, may_be_another
from eagletwin.harness.core.errors import EXIT_DIVERGED, EXIT_EQUAL, EXIT_HARNESS, EXIT_UNKNOWN, EagletwinError, InputError
from eagletwin.harness.core.records import accept_lengths
from eagletwin.harness.core.run_spec import DEFAULT_ENGINE, DEFAULT_RUN, Engine, Mode, RunSpec
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.engines.host import Host, WouldNotStart
from eagletwin.harness.engines.provision import NotFetched, releases
from eagletwin.harness.engines.source import resolve
from eagletwin.harness.engines.start import Zygote
from eagletwin.harness.judge.completeness import shows_instead

from ..matrix import Cell, Matrix, Question, refused_cell

# One release after another, each in a process of its own; the next is imported while the last is asked.


def hosts(names: Sequence[str], engine: Engine = DEFAULT_ENGINE) -> Iterator[tuple[str, Host | NotFetched]]:
    """(release, its host, or why it cannot be had), in this order. A host is closed when the next is asked for."""
    started: dict[str, Zygote | NotFetched] = {}
    try:
        for number, name in enumerate(names):
            for ahead in names[number : number + 2]:
                if ahead not in started:
                    started[ahead] = _start(ahead, engine)
            zygote = started.pop(name)
            if isinstance(zygote, NotFetched):
                yield name, zygote
                continue
            with Host(zygote) as host:
                yield name, host
    finally:  # whatever stops the caller, no process outlives it
        for zygote in started.values():
            if isinstance(zygote, Zygote):
                zygote.close()


def _start(name: str, engine: Engine) -> Zygote | NotFetched:
    try:
        zygote = Zygote(resolve(name, engine), Mode(engine=engine))
    except NotFetched as error:
        return error
    zygote.start()
    return zygote


@dataclass(frozen=True, slots=True)
class Proof:
    """Both sides of an entry: of one release or tree, where a side may be that as it is; or of the releases around the fix.

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
            # unknown, if the worker does not survive it
            and self.red.verdict.status == ("unknown" if self.entry.rule.startswith("engine.") else "diverged")
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
    known = entry.id in ENTRIES and ENTRIES[entry.id].case == entry.case
    again = side.command("check", entry.id) if known else None
    return Question(what=entry.case, name=f"{entry.id}-{name}", out=runs, run=side, again=again)


def side_run(entry: Entry, side: Side, run: RunSpec) -> RunSpec:
    """The run of a side, with the run's own changes beside the entry's: after them, since the engine's own switch, which undoes
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
    engine = run.mode.engine
    for name, host in hosts([name for name in releases(engine) if name in wanted], engine):
        chosen = [entry for entry in fixed if entry.last_bad and name in (entry.last_bad, entry.fixed)]
        tell(f"{run.mode.title} {name}: {', '.join(entry.id for entry in chosen)}")
        for entry in chosen:
            found[entry.id, name] = matrix.ask(host, _on_wheel(entry, name, runs, run))
    for entry in fixed:
        hidden = refused_cell(InputError(entry.hidden, consequence="", remedy=""))
        green, red = (found.get((entry.id, release), hidden) for release in (entry.fixed, entry.last_bad))
        yield Proof(entry, green, red, wheels=True)


def _on_wheel(entry: Known, release: str, runs: Path, run: RunSpec) -> Question:
    name = f"{entry.id}-on-{release}"
    if not isinstance(entry, Entry):
        return Question(what=entry, name=name, out=runs)
    changes = (entry.by_hand if release == entry.last_bad else None, entry.beside.get(release))
    patches = tuple(patch for patch in changes if patch is not None)
    again = (
        run.command("prove", "--releases", entry.id) if patches else replace(run, release=release).command("check", entry.id)
    )
    return Question(what=entry.case, name=name, out=runs, run=replace(run, patches=patches), again=again)


# The claim of eagletwin in one case: with a wrong draft chain the tokens stay the same, and fewer drafts are accepted.

_TOKENS, _ROUNDS = 16, 24  # that a line shows


class _Decoded(NamedTuple):
    """A request as a trace has it. tokens: its answer. drafts: how many draft tokens each round accepted."""

    tokens: tuple[int, ...]
    drafts: tuple[int, ...]


def show_claim(host: Host, entry: Entry, run: RunSpec) -> str:
    """The entry's case for the claim with its fix and without it: tokens, rounds and accepted drafts, in at most twelve lines.

    Empty if the entry has none, or if here the two sides differ in their tokens or accept the same drafts.
    """
    if entry.claim is None:
        return ""
    right, wrong = (_run(host, entry, side_run(entry, side, run)) for side in (entry.green, entry.red))
    return claim_text(right, wrong, f"{entry.id} on {host.mode.title} {host.version}")


def _run(host: Host, entry: Entry, side: RunSpec) -> Trace:
    assert entry.claim is not None
    with tempfile.TemporaryDirectory() as folder:
        return host.engine(entry.claim, side.patches, side.kernels).run(entry.claim, Path(folder))


def claim_text(right: Trace, wrong: Trace, name: str) -> str:
    """The same of two traces of a case."""
    both = [_decode(trace) for trace in (right, wrong)]
    answers, drafts = ([[one[at] for one in side.values()] for side in both] for at in (0, 1))
    if answers[0] != answers[1] or drafts[0] == drafts[1]:
        return ""
    lines = [f"{name}: the tokens are the same without the fix, and fewer drafts are accepted.", ""]
    for title, side in zip(("with the fix", "without it"), both, strict=True):
        rounds = [accepted for decoded in side.values() for accepted in decoded.drafts]
        lines += [
            f"{title}:",
            f"  tokens           {_cut([token for decoded in side.values() for token in decoded.tokens], _TOKENS)}",
            f"  accepted drafts  {_cut(rounds, _ROUNDS)} = {sum(rounds)} in {len(rounds)} rounds",
        ]
    return "\n".join([*lines, "", "No test of the output sees this. The judge names the first wrong number:", ""])


def _decode(trace: Trace) -> dict[str, _Decoded]:
    records = trace.header.records
    return {
        record.request: _Decoded(
            tuple(trace.integers(number, "tokens")), tuple(length - 1 for length in accept_lengths(records, record.request))
        )
        for number, record in enumerate(records)
        if record.stage == "finished"
    }


def _cut(numbers: Sequence[int], most: int) -> str:
    return " ".join(map(str, numbers[:most])) + (" …" if len(numbers) > most else "")


# Prove an entry in another model than its own: its case carried over, until one shows both sides.
#
# Where another live bug of the release comes first in that model, its candidate fix stands beside both sides.

_IDLE = 3  # cases that never call what an entry edits, after which no other is tried


@dataclass(frozen=True, slots=True)
class ProofInModel:
    """What came out for one carried case. beside: the live bugs that are mended on both sides"""

    proof: Proof
    beside: tuple[str, ...]

    @property
    def own(self) -> bool:
        """Whether the bug shows by the entry's own rule."""
        return self.proof.holds and self.proof.red.verdict.rule == self.proof.entry.rule

    @property
    def idle(self) -> tuple[str, ...]:
        """Functions that the entry changes and of which no changed statement ran."""
        return tuple(name for name in self._idle_functions if name not in self._patched_functions)

    @property
    def mended_in_vain(self) -> bool:
        """Whether no changed statement of a function that is mended ran, so that the case says nothing."""
        return any(name in self._patched_functions for name in self._idle_functions)

    @property
    def _idle_functions(self) -> tuple[str, ...]:
        outcomes = (side.outcome for side in (self.proof.green, self.proof.red) if side.outcome is not None)
        changes = (change for outcome in outcomes for change in outcome.trace.changes)
        return tuple(dict.fromkeys(name for change in changes if change.patch for name in change.idle))

    @property
    def _patched_functions(self) -> set[str]:
        return {target for patch in remedies_of(self.beside) for target in patch.targets}


def prove_in_model(host: Host, entry: Entry, model: str, runs: Path, run: RunSpec) -> ProofInModel:
    """The proof by the entry's own rule, if a carried case gives one; else the first that shows the bug by another rule; else
    that of the case as it stands."""
    tried = list[ProofInModel]()
    for attempt in _attempts(host, entry, model, runs, run):
        if attempt.own:
            return attempt
        tried.append(attempt)
    return next((attempt for attempt in tried if attempt.proof.holds), tried[0])


def _attempts(host: Host, entry: Entry, model: str, runs: Path, run: RunSpec) -> Iterator[ProofInModel]:
    """Ends early where other prompts tell nothing: an engine refuses, or the worker never calls what is edited."""
    from eagletwin.harness.families.weights import target_says  # it imports torch

    idle, beside = 0, tuple[str, ...]()
    for one in port_entry(entry, model, target_says):
        attempt = _prove_patched(host, one, runs, run, beside)
        if attempt.mended_in_vain:
            attempt = _prove_patched(host, one, runs, run, ())
        yield attempt
        beside = attempt.beside  # what came first in this case comes first in the next one, too
        idle += bool(attempt.idle)
        if attempt.proof.errors or idle == _IDLE:
            return


def _prove_patched(host: Host, entry: Entry, runs: Path, run: RunSpec, beside: tuple[str, ...]) -> ProofInModel:
    """The proof, with these live bugs mended on both sides, and with those that come first all the same."""
    while True:
        proof = _proof(host, entry, runs, run, beside)
        if proof.errors or proof.green.verdict.status != "diverged":
            return ProofInModel(proof, beside)
        mended = side_run(entry, entry.green, with_remedies(run, beside))
        other = may_be(host, entry.case, proof.green.verdict.rule, mended)
        if not other or other in (*beside, entry.id):
            return ProofInModel(proof, beside)
        beside = (*beside, other)


def _proof(host: Host, entry: Entry, runs: Path, run: RunSpec, beside: tuple[str, ...]) -> Proof:
    """A live bug's divergence must be its own: a case that another's candidate fix cures, too, may show that other one."""
    mended = with_remedies(run, beside)
    [proof] = prove(host, [entry], runs, mended)
    proof = dataclasses.replace(proof, any_rule=True)
    if entry.remedy is None or not proof.holds:
        return proof
    red = side_run(entry, entry.red, mended)
    return dataclasses.replace(proof, another=may_be_another(host, entry, entry.case, proof.red.verdict.rule, red))


def with_remedies(run: RunSpec, beside: tuple[str, ...]) -> RunSpec:
    """The run, with these live bugs mended."""
    options = (word for name in beside for word in ("--remedy", name))
    return replace(run, patches=(*run.patches, *remedies_of(beside)), changes=(*run.changes, *options))
