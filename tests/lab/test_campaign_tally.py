"""Which results of a campaign's jobs end in which exit code of `gpu run`: each comparison that was asked for counts."""

import msgspec
import pytest

from eagletwin.harness.core.run_spec import CPU

from .gpu.job import Beside, CaseResult, JobResult, MustShow
from .gpu.tally import comparisons, exit_code, proofs, statuses_of

SAME = Beside(same=True, compared=9, largest=0.0)
EQUAL, KNOWN, WRONG = (
    CaseResult(case="x", status=status, known=known)
    for status, known in (("equal", ""), ("diverged", "33758"), ("diverged", ""))
)


def red(rule: str, broken: str, unseen: dict[str, int] | None = None, hidden: str = "") -> JobResult:
    """The red side of an entry of this rule, on which this one broke."""
    seen = CaseResult(case="x", status="diverged", rule=broken, unseen=unseen or {})
    return JobResult(name="x", mode=CPU, seen=(seen,), expected=MustShow(rule=rule, hidden=hidden))


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
    "a bug that is found": (red("draft.kv", "draft.kv"), 0),
    "any rule of a planted fault": (red("", "draft.kv"), 0),
    "a bug that shows in what a graph left": (red("draft.positions", "draft.scratch_kv", {"draft.positions": 3}), 0),
    "the same where nothing was hidden": (red("draft.positions", "draft.scratch_kv"), 125),
    "a bug by another rule": (red("draft.kv", "draft.mask"), 125),
    "a bug that is not found": (JobResult(name="x", mode=CPU, seen=(EQUAL,), expected=MustShow(rule="draft.kv")), 125),
    "a worker that dies of its bug": (
        JobResult(
            name="x",
            mode=CPU,
            seen=(CaseResult(case="x", status="unknown", rule="engine.crash"),),
            expected=MustShow(rule="engine.crash"),
        ),
        0,
    ),
    "a bug that did not run": (JobResult(name="x", mode=CPU, error="it fell", expected=MustShow(rule="draft.kv")), 125),
    "a bug that shows where it should be hidden": (red("draft.kv", "draft.kv", hidden="a graph"), 125),
}

# Of these alone nothing has a verdict that is a proof's: the mode hides the bug.
HIDDEN = JobResult(name="x", mode=CPU, seen=(EQUAL,), expected=MustShow(rule="draft.kv", hidden="a graph"))


@pytest.mark.parametrize("what", JOBS)
def test_every_comparison_of_a_campaign_counts(what: str) -> None:
    done, code = JOBS[what]
    assert exit_code(statuses_of(done)) == code
    assert any("DIFFERENT" in text or "UNKNOWN" in text for text in comparisons(done)) == (
        code != 0 and bool(done.beside or done.again is not None)
    )


def test_a_bug_that_its_mode_hides_is_neither_found_nor_missed() -> None:
    assert statuses_of(HIDDEN) == {"hidden": 1}
    green = JobResult(name="x", mode=CPU, seen=(EQUAL,))
    assert exit_code(statuses_of(HIDDEN) + statuses_of(green)) == 0


def test_the_sides_of_an_entry_make_a_line() -> None:
    def side(name: str, of: JobResult) -> JobResult:
        return msgspec.structs.replace(of, name=name)

    green = JobResult(name="x", mode=CPU, seen=(EQUAL,))
    broken = JobResult(name="x", mode=CPU, seen=(CaseResult(case="x", status="diverged", rule="draft.mask"),))
    lines = list(
        proofs(
            [
                side("25015/graphs/red", red("draft.positions", "draft.scratch_kv", {"draft.positions": 3})),
                side("25015/graphs/green", green),
                side("8409/eager/green", green),
                side("8409/eager/red", red("draft.kv", "draft.kv")),
                side("8409/graphs/green", broken),
                side("8409/graphs/red", red("draft.kv", "draft.kv")),
                side("chain-hidden/graphs/green", green),
                side("chain-hidden/graphs/red", HIDDEN),
                side("small-tree/eager/green", green),
                side("small-tree/graphs/green", green),
                side("small-tree/graphs/red", JobResult(name="x", mode=CPU, seen=(EQUAL,), expected=MustShow(rule="a"))),
                green,
            ]
        )
    )
    assert lines == [
        "25015 graphs: proven by draft.scratch_kv",
        "8409 eager: proven",
        "8409 graphs: GREEN IS diverged draft.mask",
        "chain-hidden graphs: hidden: a graph",
        "small-tree eager: only one side was run",
        "small-tree graphs: red is NOT FOUND: equal",
    ]
