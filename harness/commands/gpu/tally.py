"""What a campaign's jobs count for: every comparison that was asked for reaches the exit code of `gpu run`."""

from collections import Counter
from collections.abc import Iterator, Mapping

from eagletwin.harness.core.errors import EXIT_DIVERGED, EXIT_EQUAL, EXIT_UNKNOWN

from .jobs import JobResult


def statuses_of(done: JobResult) -> Counter[str]:
    """Verdicts of a job, by status: one a case, and one for each further comparison that failed.

    known     a case that diverged by a bug that is known
    unknown   also a job that did not run to its end; a trace that was another after the other cases (a state leak, as in
              `check`); and a comparison in which nothing was compared, or one of whose two runs did not finish
    diverged  also a trace that is different on the engine next to it, beyond the judge's bound
    """
    statuses = Counter("known" if seen.known else seen.status for seen in done.seen)
    statuses["unknown"] += bool(done.error) + (done.again is not None and not (done.again and done.again_compared))
    if done.beside is not None:
        if done.beside.unfinished or not done.beside.compared:
            statuses["unknown"] += 1
        elif not done.beside.same:
            statuses["diverged"] += 1
    return +statuses


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
    judged = statuses.get("equal", 0) + statuses.get("known", 0)
    return EXIT_UNKNOWN if statuses.get("unknown") or not judged else EXIT_EQUAL
