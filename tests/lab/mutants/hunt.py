"""Searching for one mutant: the cases of a default search that run its place, until one is not equal."""

import time
from collections.abc import Iterator, Sequence

from msgspec import Struct
from msgspec.structs import replace

from eagletwin.harness.check.trials import Trial, Trials
from eagletwin.harness.core.errors import EagletwinError
from eagletwin.harness.core.run_spec import Limits
from eagletwin.harness.engines.host import Host, PatchDoesNotApply, WouldNotStart

from .corpus import Known
from .draw import Mutant

LIMITS = Limits(step=20.0, case=60.0)
KILLED = ("rule", "crash", "unknown", "refused")
COUNTED = (*KILLED, "survived")


class Hunted(Struct, frozen=True, kw_only=True):
    """What came of one mutant.

    outcome  `rule`; `crash` (or a hang); `unknown`: a trace that cannot be judged; `refused`: no engine could be built;
             `survived`; `not run`: no case ran the place; `unfit`: the edit does not apply; `harness`: eagletwin failed
    by       the rule, or the exception
    cases    that ran the place, until it was killed; of: how many there were to run; undecided: those left so
    case     the number in the corpus of the case that killed it; -1: none. told: the option of the search that draws it
    """

    mutant: Mutant
    outcome: str
    by: str = ""
    cases: int = 0
    of: int = 0
    undecided: int = 0
    case: int = -1
    told: str = ""
    seconds: float = 0.0


def hunt(host: Host, mutant: Mutant, corpus: Sequence[Known], most: int, seconds: float) -> Hunted:
    """Up to `most` cases that run the place, for up to so many seconds."""
    begun = time.monotonic()
    order = list(in_turn(mutant, corpus))
    found = Hunted(mutant=mutant, outcome="not run", of=len(order))
    unfit = 0
    for number in order:
        if found.cases >= most or time.monotonic() > begun + seconds:
            break
        known = corpus[number]
        run = replace(known.run, patches=(*known.run.patches, mutant.patch), limits=LIMITS)
        trials = Trials(host, run)
        try:
            trial = trials.look(known.case)
            if trial.signature is not None and not trial.verdict.undecided:
                trial = trials.look_alone(known.case)
        except PatchDoesNotApply:
            unfit += 1
            if unfit >= 3 and not found.cases:  # a remedy has the same text, as a rule
                found = replace(found, outcome="unfit")
                break
            continue
        except WouldNotStart as error:
            found = replace(found, outcome="refused", by=" ".join(error.cause.split())[:200], case=number)
            break
        except EagletwinError as error:
            found = replace(found, outcome="harness", by=" ".join(str(error).split())[:300], case=number)
            break
        if trial.verdict.vacuous or _passed_by(trial, mutant):
            continue
        found = replace(found, cases=found.cases + 1, outcome="survived")
        if trial.verdict.undecided:
            found = replace(found, undecided=found.undecided + 1)
        elif trial.signature is not None:
            outcome, by = _killed(trial)
            found = replace(found, outcome=outcome, by=by, case=number)
            break
    told = corpus[found.case].told if found.case >= 0 else ""
    return replace(found, told=told, seconds=round(time.monotonic() - begun, 2))


def _passed_by(trial: Trial, mutant: Mutant) -> bool:
    """Whether the function was called and the mutated statement did not run."""
    unreached = trial.header.unreached_edits or ()
    return trial.verdict.status == "equal" and f"{mutant.target}: {mutant.match.strip()!r}" in unreached


def _killed(trial: Trial) -> tuple[str, str]:
    signature = trial.signature
    assert signature is not None
    if trial.verdict.status == "diverged":
        return "rule", signature.rule
    return "crash" if signature.rule else "unknown", str(signature)


def in_turn(mutant: Mutant, corpus: Sequence[Known]) -> Iterator[int]:
    """The cases that run the mutant's place: first that with most that no case before it had, and again."""
    left = {number: known.traits for number, known in enumerate(corpus) if known.runs(mutant.file, mutant.block)}
    had: set[str] = set()
    while left:
        best = max(left, key=lambda number: len(left[number] - had))
        if had and not left[best] - had:
            had.clear()
            continue
        had |= left.pop(best)
        yield best
