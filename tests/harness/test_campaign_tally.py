"""Which results of a campaign's jobs end in which exit code of `gpu run`: each comparison that was asked for counts."""

import pytest

from eagletwin.harness.commands.gpu.jobs import Beside, CaseResult, JobResult
from eagletwin.harness.commands.gpu.tally import comparisons, exit_code, statuses_of
from eagletwin.harness.core.mode import CPU

SAME = Beside(same=True, compared=9, largest=0.0)
EQUAL, KNOWN, WRONG = (
    CaseResult(case="x", status=status, known=known)
    for status, known in (("equal", ""), ("diverged", "33758"), ("diverged", ""))
)
JOBS: dict[str, tuple[JobResult, int]] = {
    "all the same": (JobResult(name="x", mode=CPU, seen=(EQUAL,), again=True, again_compared=9, beside=SAME), 0),
    "a known bug": (JobResult(name="x", mode=CPU, seen=(KNOWN,)), 0),
    "a divergence": (JobResult(name="x", mode=CPU, seen=(EQUAL, WRONG)), 1),
    "a job that did not run": (JobResult(name="x", mode=CPU, error="it fell"), 125),
    "another trace after the others": (JobResult(name="x", mode=CPU, seen=(EQUAL,), again=False, again_compared=9), 125),
    "nothing compared after the others": (JobResult(name="x", mode=CPU, seen=(EQUAL,), again=True), 125),
    "another number on the other engine": (
        JobResult(name="x", mode=CPU, seen=(EQUAL,), beside=Beside(same=False, compared=9, largest=0.1, differs="draft")),
        1,
    ),
    "a crash on the other engine": (
        JobResult(name="x", mode=CPU, seen=(EQUAL,), beside=Beside(same=True, compared=9, largest=0.0, unfinished="crashed")),
        125,
    ),
    "nothing compared on the other engine": (
        JobResult(name="x", mode=CPU, seen=(EQUAL,), beside=Beside(same=True, compared=0, largest=0.0)),
        125,
    ),
    "nothing at all": (JobResult(name="x", mode=CPU), 125),
}


@pytest.mark.parametrize("what", JOBS)
def test_every_comparison_of_a_campaign_counts(what: str) -> None:
    done, code = JOBS[what]
    assert exit_code(statuses_of(done)) == code
    assert any("DIFFERENT" in text or "UNKNOWN" in text for text in comparisons(done)) == (
        code != 0 and bool(done.beside or done.again is not None)
    )
