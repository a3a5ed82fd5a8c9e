"""A diverged trace looked at once more, with all that a verdict leaves out: every divergence, the numbers around the first, and
what the reference says of each request. For the argument and the page; what is judged is the same."""

from dataclasses import dataclass
from typing import get_args

from eagletwin.harness.core.trace import Trace
from eagletwin.harness.core.verdict import DECLARED_VIEW, Divergence, Verdict, View

from .compare import Exhibit
from .judge import all_divergences, compared
from .sessions import as_asked
from .story import Story


@dataclass(frozen=True, slots=True)
class Closer:
    """trace        the rank that the first divergence is on; of a pipeline the last stage
    divergences  all, in the order in which data flows
    exhibit      the numbers of the first; None: it has none but those that it names
    stories      the requests of that rank
    failure      why there is no second look; empty if there is one
    """

    trace: Trace
    divergences: tuple[Divergence, ...]
    exhibit: Exhibit | None
    stories: dict[str, Story]
    failure: str = ""


def look_closer(trace: Trace, verdict: Verdict) -> Closer | None:
    """None of a verdict without a divergence, and of one that is not what this trace says by itself."""
    first, without = verdict.first, frozenset(verdict.without)
    if first is None:
        return None
    try:
        trace = as_asked(trace)
        findings, by_rank = compared(trace, without, _view(verdict))
    except Exception as error:  # the verdict stands, so a report of it must come out, and say what it lacks
        failure = f"the judge failed when it looked at the trace again: {type(error).__name__}: {error}"
        return Closer(trace, (first,), None, {}, failure)
    divergences = all_divergences(trace, findings, without)
    if not divergences or divergences[0].place != first.place:
        return None
    order = min((order for order, _ in findings.divergences), default=())
    rank = 0 if trace.earlier else first.rank or 0
    return Closer(trace.judged_of(first.rank), tuple(divergences), findings.exhibits.get(order), by_rank[rank])


def _view(verdict: Verdict) -> View:
    """A verdict names a view that is not what is declared."""
    return next((view for view in get_args(View) if view == verdict.view), DECLARED_VIEW)
