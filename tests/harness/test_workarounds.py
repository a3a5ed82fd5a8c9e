"""Which candidate fixes a finding keeps, and that one which nothing calls is no doubt about a reproduction."""

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.check import trials as judging
from eagletwin.harness.check.confirm import needed, needed_in
from eagletwin.harness.check.known import apart, entries_of
from eagletwin.harness.check.trials import judge_run
from eagletwin.harness.commands.run_options import spec_of
from eagletwin.harness.core.differs import Differs
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.records import Ending, EngineInfo
from eagletwin.harness.core.run_spec import DEFAULT_RUN, RunSpec
from eagletwin.harness.core.signature import Signature
from eagletwin.harness.core.trace import Trace, new_header
from eagletwin.harness.core.verdict import DECLARED_VIEW, Divergence, Verdict
from eagletwin.harness.engines.host import WouldNotStart

ALL = tuple("abcdefgh")
ENGINE = EngineInfo(name="none", version="0", device="cpu", kernels="none", torch="0", triton="0")


def trial(rule: str = "draft.positions", actual: str = "1", later: int = 0, case: Any = None) -> Any:
    first = Divergence(
        rule=rule, request="a", round=0, stage="draft.decode", step=1, iteration=1, index="row 0", expected="0", actual=actual
    )
    verdict = Verdict(status="diverged", rule=rule, first=first, later={"draft.proposal": later})
    return SimpleNamespace(verdict=verdict, signature=Signature(rule=rule, stage="draft.decode"), case=case)


class Finding:
    """What a case shows with some workarounds: the finding with all of `needs`. runs: with which it was run."""

    def __init__(self, needs: str, without: Any = None) -> None:
        self.needs, self.without = set(needs), without or trial("slots")
        self.runs = list[str]()

    def look(self, some: tuple[str, ...]) -> Any:
        self.runs.append("".join(some))
        if isinstance(self.without, Exception) and not self.needs.issubset(some):
            raise self.without
        return trial() if self.needs.issubset(some) else self.without


@pytest.mark.parametrize("needs", ["", "c", "bg", "abcdefgh"])
def test_a_finding_keeps_the_workarounds_alone_that_it_needs(needs: str) -> None:
    assert needed(ALL, trial(), Finding(needs).look) == tuple(needs)


def test_that_none_is_needed_takes_one_run() -> None:
    finding = Finding("")
    assert needed(ALL, trial(), finding.look) == ()
    assert finding.runs == [""]


@pytest.mark.parametrize(
    "without",
    [
        trial("slots"),  # another bug shows first
        trial(actual="2"),  # the same number is wrong, by another bug as well
        SimpleNamespace(verdict=Verdict(status="equal"), signature=None),
        WouldNotStart("cause", consequence="c", remedy="r"),
    ],
)
def test_a_workaround_without_which_it_shows_something_else_stays(without: Any) -> None:
    assert needed(ALL, trial(), Finding("d", without).look) == ("d",)


def test_those_that_a_larger_case_needed_are_tried_before_all() -> None:
    finding = Finding("d")
    assert needed(ALL, trial(), finding.look, enough=("d", "e")) == ("d",)
    assert set(finding.runs) <= {"", "d", "e", "de"}


class Bugs:
    """An SGLang that shows the finding whatever the workarounds. base: whether the one without it is right with some."""

    def __init__(self, later: dict[tuple[str, ...], int], base: Any = lambda names: False) -> None:
        self._later, self._base = later, base

    def trials(self, entries: Any, _view: Any) -> Any:
        names = tuple(entry.id for entry in entries)
        return SimpleNamespace(look_alone=lambda _: trial(later=self._later.get(names, 3)))

    def right_in_base(self, _case: Any, entries: Any, _view: Any) -> bool:
        return bool(self._base(tuple(entry.id for entry in entries)))


NAMES = tuple(entry.id for entry in LEDGER.values() if entry.remedy is not None)[:3]


def kept(bugs: Any, *, last: bool = True) -> tuple[str, ...]:
    return needed_in(bugs, trial(later=3), NAMES, DECLARED_VIEW, last=last)


def test_what_shows_once_the_finding_is_fixed_keeps_its_workaround() -> None:
    """Without it the reproduction would never turn green."""
    with_second = Bugs({(): 9, NAMES[:1]: 9, NAMES[2:]: 9, (NAMES[0], NAMES[2]): 9})
    assert kept(with_second) == NAMES[1:2]
    assert kept(with_second, last=False) == ()  # a smaller case may not show it
    assert kept(Bugs({}, lambda names: NAMES[1] in names)) == NAMES[1:2]


def test_a_base_that_is_right_says_so_whatever_comes_after_the_finding() -> None:
    assert kept(Bugs({(): 9}, lambda names: True)) == ()


def test_candidate_fixes_are_told_from_other_changes() -> None:
    remedy = LEDGER[NAMES[0]]
    spec = spec_of({"revert": ["25015"], "remedy": [remedy.id]})
    run, names = apart(spec)
    assert (run, names) == (spec_of({"revert": ["25015"]}), (remedy.id,))
    assert apart(run) == (run, ())
    assert entries_of(names) == (remedy,)


MINE, REMEDY = (
    Patch(name=name, edits=(Edit(target=f"sglang.{name}", match="a", replacement="b"),)) for name in ("mine", "remedy")
)
IDLE = Verdict(status="unknown", reason="idle", vacuous=True)


def judged(monkeypatch: pytest.MonkeyPatch, run: RunSpec, *idle: str, differs: Differs | None = None) -> Verdict:
    """With which edits the judge is told that nothing called them: its answer is IDLE if there are any."""

    def judge(trace: Trace, *_: Any) -> Verdict:
        if trace.header.idle_edits:
            return IDLE
        return replace(IDLE, reason=trace.differs.doubt) if trace.differs is not None else Verdict(status="equal")

    monkeypatch.setattr(judging, "judge", judge)
    header = new_header(LEDGER["25015"].case, "", ENGINE, Ending(kind="finished"), (), idle_edits=idle)
    trace = Trace(replace(header, differs=differs) if differs is not None else header, {})
    verdict = judge_run(trace, run)
    assert trace.header.idle_edits == idle  # what is on disk stays as it was
    return verdict


def test_a_workaround_that_nothing_calls_is_no_doubt_and_a_patch_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for patches, workarounds, status in (
        ((), (REMEDY,), "equal"),
        ((REMEDY,), (), "unknown"),
        ((REMEDY,), (REMEDY,), "unknown"),
        ((MINE,), (REMEDY,), "equal"),
    ):
        run = replace(DEFAULT_RUN, patches=patches, workarounds=workarounds)
        assert judged(monkeypatch, run, "sglang.remedy").status == status
    run = replace(DEFAULT_RUN, patches=(MINE,), workarounds=(REMEDY,))
    assert judged(monkeypatch, run, "sglang.remedy", "sglang.mine") == IDLE


def test_a_reproduction_asks_for_the_finding_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """That it runs nothing else that a tree changes is a doubt about a `check`, and none about whether the finding is there."""
    differs = Differs(base="0", functions=("sglang.f",), ran=())
    assert differs.doubt
    assert judged(monkeypatch, DEFAULT_RUN, differs=differs).status == "unknown"
    assert (
        judged(monkeypatch, replace(DEFAULT_RUN, finding="draft.positions (draft.decode)"), differs=differs).status == "equal"
    )
