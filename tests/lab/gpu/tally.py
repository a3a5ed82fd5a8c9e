"""What a campaign's jobs count for: every comparison that was asked for reaches the exit code of `gpu run`."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from eagletwin.harness.core.errors import EXIT_DIVERGED, EXIT_EQUAL, EXIT_UNKNOWN
from eagletwin.harness.core.terminal import count
from eagletwin.harness.judge.completeness import shows_instead

from .job import JobResult

RACES = "races/"  # how the names of jobs with a missing wait begin


def statuses_of(done: JobResult) -> Counter[str]:
    """Verdicts of a job, by status: one a case, and one for each further comparison that failed.

    known     a case that diverged by a bug that is known
    unknown   also a job that did not run to its end; a trace that was another after the other cases (a state leak, as in
              `check`); and a comparison in which nothing was compared, or one of whose two runs did not finish
    diverged  also a trace that is different on the engine next to it, beyond the judge's bound
    found     an engine with a bug, whose job says what must be found; hidden: nothing shows in its mode, as the job says.
              Where it is otherwise, that is unknown
    """
    if done.expected is not None:
        return Counter({_found(done).kind: 1})
    statuses = Counter("known" if seen.known else seen.status for seen in done.seen)
    statuses["unknown"] += bool(done.error) + (done.again is not None and not (done.again and done.again_compared))
    if done.beside is not None:
        if done.beside.unfinished or not done.beside.compared:
            statuses["unknown"] += 1
        elif not done.beside.same:
            statuses["diverged"] += 1
    return +statuses


@dataclass(frozen=True, slots=True)
class _Shown:
    """kind: found, hidden, or unknown. words: in short, for a table."""

    kind: str
    words: str


def _found(done: JobResult) -> _Shown:
    """What a job with a bug has shown."""
    assert done.expected is not None
    rule, hidden = done.expected.rule, done.expected.hidden
    if done.error or not done.seen:
        return _Shown("unknown", "did not run")
    ends = "unknown" if rule.startswith("engine.") else "diverged"  # a worker that does not survive leaves no verdict
    shown = [one for one in done.seen if one.status == ends]
    if not shown:
        if all(one.status == "equal" for one in done.seen):
            return _Shown("hidden", f"hidden: {hidden}") if hidden else _Shown("unknown", "NOT FOUND: equal")
        return _Shown("unknown", f"UNKNOWN: {next(one.reason for one in done.seen if one.status != 'equal')}")
    if hidden:
        return _Shown("unknown", f"NOT HIDDEN: {shown[0].rule}")
    if not rule or shown[0].rule == rule:
        return _Shown("found", "" if rule else shown[0].rule)
    if shows_instead(shown[0].rule, rule) and shown[0].unseen.get(rule):
        return _Shown("found", f"by {shown[0].rule}")
    return _Shown("unknown", f"ANOTHER RULE: {shown[0].rule}")


def proofs(results: Iterable[JobResult]) -> Iterator[str]:
    """Each entry of the ledger that was run, with what came of its two sides in each mode."""
    sides: dict[tuple[str, str], dict[str, JobResult]] = {}
    for done in results:
        match done.name.split("/"):
            case [entry, mode, "green" | "red" as side]:
                sides.setdefault((entry, mode), {})[side] = done
    for (entry, mode), both in sorted(sides.items()):
        green, red = both.get("green"), both.get("red")
        if green is None or red is None:
            yield f"{entry} {mode}: only one side was run"
            continue
        fails = [f"{one.status} {one.rule} {one.reason}".strip() for one in green.seen if one.status != "equal"]
        fails += ["did not run"] if green.error or not green.seen else []
        found = _found(red)
        words = {"found": "proven", "hidden": ""}.get(found.kind, "red is")
        yield f"{entry} {mode}: " + (f"GREEN IS {fails[0]}" if fails else f"{words} {found.words}".strip())


def waits(results: Iterable[JobResult]) -> Iterator[str]:
    """Each missing wait that was planted, and in which case what showed it."""
    for done in sorted(results, key=lambda done: done.name):
        if done.expected is None or not done.name.startswith(RACES):
            continue
        found = _found(done)
        how = next((f"by {one.rule} in case {n}: {one.where}" for n, one in enumerate(done.seen, 1) if one.where), "")
        how = how or found.words + ("" if found.kind == "hidden" else f" in {count(len(done.seen), 'case')}")
        yield f"{done.name.removeprefix(RACES)}: {'found ' if found.kind == 'found' else ''}{how}"


def comparisons(done: JobResult) -> Iterator[str]:
    """The further comparisons of a job as a person reads them."""
    if done.again is not None:
        same = "the same" if done.again_compared else "UNKNOWN: nothing was compared"
        yield f"again {same if done.again else 'DIFFERENT: ' + done.again_differs}"
    if done.beside is not None:
        differs = "the same" if done.beside.same else f"DIFFERENT: {done.beside.differs}"
        word = f"UNKNOWN: {done.beside.unfinished}" if done.beside.unfinished else differs
        yield f"beside {word if done.beside.compared else 'UNKNOWN: nothing was compared'} ({done.beside.largest:.1e})"


def exit_code(statuses: Mapping[str, int]) -> int:
    """A divergence outweighs a doubt; if no case has a verdict, the result is unknown."""
    if statuses.get("diverged"):
        return EXIT_DIVERGED
    judged = sum(statuses.get(word, 0) for word in ("equal", "known", "found"))
    return EXIT_UNKNOWN if statuses.get("unknown") or not judged else EXIT_EQUAL
