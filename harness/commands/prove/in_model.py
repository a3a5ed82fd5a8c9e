"""Prove an entry in another model than its own: its case carried over, until one shows both sides.

Where another live bug of the release comes first in that model, its candidate fix stands beside both sides.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from eagletwin.cases.entry import Entry
from eagletwin.cases.ledger import remedies_of
from eagletwin.cases.reach import carried
from eagletwin.harness.check.known import may_be, may_be_another
from eagletwin.harness.core.run_spec import RunSpec
from eagletwin.harness.engines.host import Host

from .proof import Proof, prove, side_run

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
        return tuple(name for name in self._idle_functions if name not in self._mended)

    @property
    def mended_in_vain(self) -> bool:
        """Whether no changed statement of a function that is mended ran, so that the case says nothing."""
        return any(name in self._mended for name in self._idle_functions)

    @property
    def _idle_functions(self) -> tuple[str, ...]:
        outcomes = (side.outcome for side in (self.proof.green, self.proof.red) if side.outcome is not None)
        changes = (change for outcome in outcomes for change in outcome.trace.changes)
        return tuple(dict.fromkeys(name for change in changes if change.patch for name in change.idle))

    @property
    def _mended(self) -> set[str]:
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
    for one in carried(entry, model, target_says):
        attempt = _mended(host, one, runs, run, beside)
        if attempt.mended_in_vain:
            attempt = _mended(host, one, runs, run, ())
        yield attempt
        beside = attempt.beside  # what came first in this case comes first in the next one, too
        idle += bool(attempt.idle)
        if attempt.proof.errors or idle == _IDLE:
            return


def _mended(host: Host, entry: Entry, runs: Path, run: RunSpec, beside: tuple[str, ...]) -> ProofInModel:
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
