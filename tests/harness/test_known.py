"""Which bugs of the ledger a divergence is compared with, which remedies a case needs, and how many runs that takes."""

from collections.abc import Sequence
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from eagletwin.cases.entry import Entry
from eagletwin.cases.ledger import LEDGER
from eagletwin.cases.reach import case_in
from eagletwin.harness.check import known
from eagletwin.harness.check import trials as judging
from eagletwin.harness.check.confirm import minimize_workarounds, needed_in
from eagletwin.harness.check.known import (
    KINDS,
    KnownBugMatcher,
    Suspected,
    apart,
    candidates,
    cases_of_change,
    entries_of,
    entry_of_case,
    fewest,
    kind_of,
    may_be,
    may_be_another,
    may_show,
)
from eagletwin.harness.check.trials import judge_run
from eagletwin.harness.commands.options import spec_of
from eagletwin.harness.core.case import (
    Adapter,
    Adaptive,
    EngineSettings,
    Grammar,
    Logprobs,
    Penalties,
    Processor,
    Request,
    Sampling,
    SGLangSettings,
    Tier,
)
from eagletwin.harness.core.case import Case as KindCase
from eagletwin.harness.core.differs import Differs
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.records import Ending, EngineInfo
from eagletwin.harness.core.run_spec import CPU, DEFAULT_RUN, Mode, RunSpec
from eagletwin.harness.core.signature import Signature
from eagletwin.harness.core.trace import Trace, new_header
from eagletwin.harness.core.verdict import DECLARED_VIEW, Divergence, Verdict
from eagletwin.harness.engines.host import WouldNotStart
from eagletwin.harness.engines.provision import releases
from eagletwin.harness.engines.source import INSTALLED

# Which bugs of the ledger a divergence is compared with. tests/engine/test_fuzz.py runs them.


LIVE = LEDGER["retracted-chunk-tail"]


@pytest.mark.parametrize("edited", ["two-chunked", "29354", "mixed-grammar", "penalties"])
def test_a_change_of_a_function_that_an_entry_patches_brings_the_entry_s_own_case(edited: str) -> None:
    entry = LEDGER[edited]
    patch = entry.remedy or entry.revert
    assert patch is not None
    cases = cases_of_change(INSTALLED, RunSpec(patches=(replace(patch, name="mine"),)))
    found = [one.id for case in cases if (one := entry_of_case(case, CPU)) is not None]
    assert edited in found
    first = LEDGER[found[0]]  # `mixed-grammar` edits one function, and `penalties` this one and two more
    assert (first.remedy or first.revert).targets == patch.targets  # type: ignore[union-attr]
    assert all((LEDGER[name].remedy or LEDGER[name].revert).targets & patch.targets for name in found)  # type: ignore[union-attr]
    assert cases_of_change(INSTALLED, RunSpec(patches=(patch,))) == []  # the ledger's own, whose bug is to be found without


def test_an_own_case_has_the_overlap_that_its_bug_needs_and_none_is_run_where_a_gpu_is_needed() -> None:
    own = case_in(LEDGER["mixed-grammar"])
    assert own is not None
    assert own.engine.sglang.overlap
    assert case_in(LEDGER["draft-plan"]) is None


def ids(name: str, version: str, **run: object) -> list[str]:
    entry = LEDGER[name]
    return [one.id for one in candidates(entry.case, entry.rule, replace(DEFAULT_RUN, **run), version)]


def test_bugs_of_the_rule_are_tried_and_those_of_a_like_case_first() -> None:
    assert ids("retracted-chunk-tail", "0.5.23")[0] == "retracted-chunk-tail"
    assert ids("multi-layer-chunk-tail-2", "0.5.23")[0].startswith("multi-layer-")
    assert all(LEDGER[one].rule == "draft.input_ids" for one in ids("retracted-chunk-tail", "0.5.23"))


def test_bugs_that_the_release_does_not_have_are_not_tried() -> None:
    assert "retracted-chunk-tail" not in ids("retracted-chunk-tail", "0.5.12")
    assert "retracted-chunk-tail" not in ids("retracted-chunk-tail", "0.5.12+dirty.01234567")
    assert "retracted-chunk-tail" in ids("retracted-chunk-tail", "1a2b3c4d5e")  # of a commit, all live ones may be there


def test_a_bug_whose_remedy_is_applied_is_not_tried() -> None:
    assert LIVE.remedy is not None
    assert "retracted-chunk-tail" not in ids("retracted-chunk-tail", "0.5.23", patches=(LIVE.remedy,))


def test_a_bug_of_another_mode_is_not_tried() -> None:
    assert "draft-plan" not in ids("draft-plan", "0.5.23")


def test_a_bug_of_overlap_is_tried_where_the_draft_reads_the_target_s_rows_which_always_runs_with_it() -> None:
    entry = LEDGER["retracted-stream"]

    def found(model: str) -> list[str]:
        return [one.id for one in candidates(replace(entry.case, model=model), entry.rule, DEFAULT_RUN, "0.5.23")]

    assert found("llama-tiny") == []
    assert found("gemma-4-assistant-window") == ["retracted-stream"]


def test_a_search_asks_for_a_bug_where_a_case_is_like_any_that_shows_it() -> None:
    """A retracted request samples, or has penalties or a grammar; a plain one shows nothing."""
    penalized, constrained = LIVE.also
    [request] = penalized.requests
    assert may_show(LIVE, LIVE.case)
    assert may_show(LIVE, penalized)
    assert may_show(LIVE, constrained)
    plain = replace(request, penalties=None)
    assert not may_show(LIVE, replace(penalized, requests=(plain,)))
    assert may_show(LIVE, replace(penalized, requests=(replace(plain, min_new_tokens=3),)))
    assert may_show(LIVE, replace(penalized, requests=(replace(plain, grammar=Grammar(rules=("a*",))),)))


def test_a_search_in_bfloat16_asks_for_a_bug_that_rounding_shows_whatever_the_case_is() -> None:
    plain = replace(LIVE.case, requests=(replace(LIVE.case.requests[0], sampling=None),))
    assert not may_show(LIVE, plain)
    assert not may_show(LIVE, plain, Mode(overlap=True))
    assert may_show(LIVE, plain, Mode(dtype="bfloat16"))
    assert not may_show(LEDGER["penalties"], plain, Mode(dtype="bfloat16"))


def test_a_bug_of_plain_decode_is_asked_for_wherever_a_window_is_and_plain_decode_is_asked() -> None:
    entry = LEDGER["decode-window"]
    [plain] = entry.also
    other = replace(plain, model="mimo-v2-window")
    assert may_show(entry, plain)
    assert may_show(entry, other)
    assert not may_show(entry, replace(other, engine=LIVE.case.engine))
    assert not may_show(entry, replace(plain, model="llama-tiny"))


def test_a_bug_of_mixed_steps_and_grammars_is_asked_for_where_both_are() -> None:
    entry = LEDGER["mixed-grammar"]
    assert may_show(entry, entry.case)
    assert not may_show(entry, replace(entry.case, engine=LIVE.case.engine))
    assert not may_show(entry, replace(entry.case, requests=LIVE.case.requests))


def test_a_bug_of_sessions_and_hidden_states_is_asked_for_where_both_are() -> None:
    entry = LEDGER["session-hidden"]
    [request] = entry.case.requests
    assert may_show(entry, entry.case)
    assert not may_show(entry, replace(entry.case, requests=(replace(request, session=""),)))
    assert not may_show(entry, replace(entry.case, requests=(replace(request, hidden_states=""),)))


def test_a_bug_of_mixed_steps_is_asked_for_where_these_are() -> None:
    entry = LEDGER["mixed-memory"]
    assert may_show(entry, entry.case)
    assert may_show(entry, LEDGER["mixed-grammar"].case)
    assert not may_show(entry, replace(entry.case, engine=LIVE.case.engine))
    assert not may_show(LEDGER["pipeline-mixed"], replace(LEDGER["pipeline-mixed"].case, engine=LIVE.case.engine))
    assert ids("mixed-memory", "0.5.23")[0] == "mixed-memory"
    assert "mixed-memory" not in ids("mixed-memory", "0.5.18")


def test_a_bug_of_mixed_steps_and_states_is_asked_for_where_the_prefix_cache_has_pages() -> None:
    entry = LEDGER["mixed-state"]
    own = entry.case.engine.sglang
    assert may_show(entry, entry.case)
    assert may_show(entry, replace(entry.case, model="nemotron-h-nextn"))
    assert not may_show(entry, replace(entry.case, model="llama-tiny"))
    assert not may_show(entry, replace(entry.case, page_size=1))
    for other in (replace(own, mixed_chunks=False), replace(own, radix_cache=False)):
        assert not may_show(entry, replace(entry.case, engine=replace(entry.case.engine, sglang=other)))
    assert ids("mixed-state", "0.5.23")[0] == "mixed-state"
    assert "mixed-state" not in ids("mixed-state", "0.5.18")


def test_a_bug_of_requests_that_allow_no_token_is_asked_for_where_there_may_be_some() -> None:
    entry, refused = LEDGER["impossible-sampler"], LEDGER["guidance-refused"]
    [held_back] = entry.also
    [request] = held_back.requests
    assert may_show(entry, entry.case)
    assert may_show(entry, held_back)
    assert not may_show(entry, refused.case)  # it does not sample
    assert not may_show(entry, replace(held_back, requests=(replace(request, min_new_tokens=0),)))
    assert not may_show(entry, replace(held_back, requests=(replace(request, grammar=None),)))
    assert may_show(refused, refused.case)
    assert may_show(refused, entry.case)
    assert not may_show(refused, held_back)  # it has xgrammar
    assert ids("impossible-sampler", "0.5.23")[:2] == ["impossible-sampler", "guidance-refused"]
    assert ids("guidance-refused", "0.5.23")[0] == "guidance-refused"
    assert "guidance-refused" not in ids("guidance-refused", "0.5.9")


def test_a_bug_of_rows_on_their_way_to_the_host_is_asked_for_where_there_is_one() -> None:
    entry = LEDGER["host-abort"]
    assert may_show(entry, entry.case)
    assert may_show(entry, replace(entry.case, model="mimo-v2-window"))
    assert not may_show(entry, replace(entry.case, engine=LIVE.case.engine))
    assert ids("host-abort", "0.5.23")[0] == "host-abort"
    assert "host-abort" not in ids("host-abort", "0.5.20")


def test_a_live_bug_is_believed_without_a_run_where_the_tests_prove_it() -> None:
    """In the newest release, as they run it; a fixed bug never, nor one that a patch may have changed."""
    bug, newest = LEDGER["row-overflow"], SimpleNamespace(called=releases()[-1], tree="", base=None, engine="sglang")
    host: Any = SimpleNamespace(source=newest, mode=CPU)

    def believed(entry: Entry, **run: object) -> bool:
        return KnownBugMatcher(host, replace(DEFAULT_RUN, **run)).as_proven(entry, entry.within)

    assert bug.remedy is not None
    assert believed(bug)
    assert not believed(LEDGER["26329"])
    assert not believed(bug, kernels="interpreter")
    assert not believed(bug, patches=(replace(bug.remedy, name="a patch of what it edits"),))
    assert not KnownBugMatcher(host, DEFAULT_RUN).as_proven(bug, "true_tree")


# Which of the bugs that a case may show are tried first, and how many runs that takes.


class Case:
    """Right with all of `minimize_workarounds`; it breaks the rules of bugs a to d. runs: each that it ran with."""

    def __init__(self, needed: str, told: tuple[str, ...] = ()) -> None:
        self.needed, self.runs = set(needed), list[str]()
        apt: list[Any] = [
            SimpleNamespace(id=name, remedy=f"mends {name}", rule="r" if name <= "d" else "other") for name in "abcdefgh"
        ]
        self.suspected = Suspected(apt, "r", self.look, told)

    def look(self, entries: Any) -> Any:
        names = "".join(entry.id for entry in entries)
        if names not in self.runs:
            self.runs.append(names)
        return SimpleNamespace(clean=set(names) >= self.needed)


def test_what_explained_the_case_before_is_tried_first() -> None:
    case = Case("c", ("c",))
    assert case.suspected.alone() == ("c",)
    assert case.runs == ["c"]


@pytest.mark.parametrize("told", [("a",), ("h",), ("a", "b"), ("unknown",)])
def test_what_explained_another_case_hides_nothing(told: tuple[str, ...]) -> None:
    assert Case("c", told).suspected.alone() == ("c",)
    assert Case("bg", told).suspected.alone() == ()
    assert Case("bg", told).suspected.again() == ()
    assert Case("bg", told).suspected.together() == ("b", "g")


def test_several_that_explained_the_case_before_are_tried_before_all() -> None:
    case = Case("bd", ("b", "d"))
    assert case.suspected.alone() == ()
    assert case.suspected.again() == ("b", "d")
    assert case.runs == ["a", "b", "c", "d", "bd"]


def test_of_several_that_are_enough_none_is_named_that_is_not_needed() -> None:
    assert Case("be", ("b", "e", "g")).suspected.again() == ("b", "e")


# The fewest remedies that a case needs, and how many runs it takes to tell.


EIGHT = tuple("abcdefgh")


class FewestCase:
    """Right with all of `minimize_workarounds`, or all of one of several. runs: the different questions that were asked."""

    def __init__(self, *needed: str) -> None:
        self.needed = [frozenset(one) for one in needed]
        self.runs = set[frozenset[str]]()

    def clean(self, parts: Sequence[str]) -> bool:
        self.runs.add(frozenset(parts))
        return any(one <= set(parts) for one in self.needed)


@pytest.mark.parametrize("parts", [EIGHT[:count] for count in range(1, 9)])
def test_what_is_needed_is_found_whatever_it_is(parts: tuple[str, ...]) -> None:
    for size in range(1, len(parts) + 1):
        for wanted in combinations(parts, size):
            assert fewest(parts, FewestCase("".join(wanted)).clean) == wanted


def test_one_of_eight_takes_few_runs() -> None:
    for part in EIGHT:
        case = FewestCase(part)
        fewest(EIGHT, case.clean)
        assert len(case.runs) <= 6


def test_of_two_that_do_the_same_the_first_is_named() -> None:
    assert fewest(EIGHT, FewestCase("b", "g").clean) == ("b",)


def test_none_of_those_named_can_be_left_out() -> None:
    for first in combinations(EIGHT[:5], 2):
        for second in combinations(EIGHT[:5], 3):
            case = FewestCase("".join(first), "".join(second))
            found = fewest(EIGHT[:5], case.clean)
            assert case.clean(found)
            assert not any(case.clean([one for one in found if one != part]) for part in found)


def test_what_is_wrong_with_more_than_it_needs_is_named_by_what_makes_it_right() -> None:
    """Two remedies that do each other harm: halves mislead, and one after the other is taken away."""

    def clean(parts: Sequence[str]) -> bool:
        return set(parts) in ({"a", "b", "c", "d"}, {"a", "b", "d"}, {"b", "d"})

    found = fewest("abcd", clean)
    assert clean(found)
    assert found == ("b", "d")


# Which candidate fixes a finding keeps, and that one which nothing calls is no doubt about a reproduction.


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
    assert minimize_workarounds(ALL, trial(), Finding(needs).look) == tuple(needs)


def test_that_none_is_needed_takes_one_run() -> None:
    finding = Finding("")
    assert minimize_workarounds(ALL, trial(), finding.look) == ()
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
    assert minimize_workarounds(ALL, trial(), Finding("d", without).look) == ("d",)


def test_those_that_a_larger_case_needed_are_tried_before_all() -> None:
    finding = Finding("d")
    assert minimize_workarounds(ALL, trial(), finding.look, enough=("d", "e")) == ("d",)
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


# By what a case is compared with those of the ledger: a field is a part of it, or stands here with the reason why not.


# A value of each field that makes a case another kind of case. Where one field alone does not, what stands beside it.
CHANGES: dict[str, tuple[object, dict[str, object]]] = {
    "Case.model": ("step-3.5", {}),
    "Case.requests": ((Request(id="a", prompt=(1,), max_new_tokens=1, stream=True),), {}),
    "Case.num_steps": (4, {"Case.num_draft_tokens": 4, "Case.topk": 2}),
    "Case.topk": (2, {}),
    "Case.num_draft_tokens": (2, {}),
    "Case.page_size": (4, {"SGLangSettings.mixed_chunks": True}),
    "Case.engine": (EngineSettings(sglang=SGLangSettings(rejection_sampling=True)), {}),
    "SGLangSettings.graphs": ((1, 2), {}),
    "SGLangSettings.prefill_graphs": ((16,), {"SGLangSettings.graphs": (1, 2)}),
    "Request.sampling": (Sampling(), {}),
    "Request.stream": (True, {}),
    "Request.processor": (Processor(), {}),
    "Request.logprobs": (Logprobs(start=0), {}),
    "Request.penalties": (Penalties(presence=1.0), {}),
    "Request.hidden_states": ("last", {}),
    "Request.min_new_tokens": (1, {}),
    "Request.grammar": (Grammar(rules=("a*",)), {}),
    "Request.session": ("s", {}),
    "Request.adapter": (Adapter(), {"Request.session": "s"}),
    "Sampling.min_p": (0.5, {}),
    "Logprobs.start": (0, {}),
    "SGLangSettings.radix_cache": (True, {"SGLangSettings.mixed_chunks": True, "Case.page_size": 4}),
    "SGLangSettings.context_length": (64, {}),
    "SGLangSettings.rejection_sampling": (True, {}),
    "SGLangSettings.draft_window": (4, {}),
    "SGLangSettings.mixed_chunks": (True, {}),
    "SGLangSettings.host_pages": (4, {}),
    "SGLangSettings.adaptive": (Adaptive(tiers=(Tier(batch=1, steps=(1,)),)), {}),
    "SGLangSettings.plain_decode": (True, {}),
    "SGLangSettings.grammar_backend": ("llguidance", {"Request.grammar": Grammar(rules=("a*",))}),
    "SGLangSettings.attn_dp_size": (2, {}),
    "EngineSettings.sglang": (SGLangSettings(rejection_sampling=True), {}),
}

_SIZE = "a size, or a moment: the search draws each, and no live bug needs one value of it"
_VALUE = "which value it has, where that it is there at all is a dimension"
_NONE = "no live bug that has a candidate fix needs it"
_TEXT = "a name, or what is said about the case"
IRRELEVANT: dict[str, str] = {
    **dict.fromkeys(("Case.schema", "Case.name", "Case.exercises", "Request.id"), _TEXT),
    **dict.fromkeys(("Case.chunked_prefill_size", "Case.chunks", "Case.events", "Request.prompt"), _SIZE),
    **dict.fromkeys(("Request.max_new_tokens", "Request.arrive", "Request.stop", "Request.n", "Request.after"), _SIZE),
    "Request.dp_rank": _VALUE,
    **dict.fromkeys(("SGLangSettings.max_running_requests", "SGLangSettings.max_total_tokens"), _SIZE),
    **dict.fromkeys(("Sampling.temperature", "Sampling.top_k", "Sampling.top_p", "Sampling.seed"), _VALUE),
    **dict.fromkeys(("Logprobs.top", "Logprobs.tokens", "Processor.kind", "Processor.seed"), _VALUE),
    **dict.fromkeys(("Penalties.frequency", "Penalties.presence", "Penalties.repetition"), _VALUE),
    **dict.fromkeys(("Grammar.kind", "Grammar.rules", "Adapter.seed", "Adapter.rank", "Adapter.on"), _VALUE),
    **{f"Adaptive.{name}": _VALUE for name in ("tiers", "alpha", "interval", "warmup", "up", "down", "ceiling")},
    **dict.fromkeys(("SGLangSettings.draft_sink", "SGLangSettings.host_policy", "SGLangSettings.random_seed"), _VALUE),
    **dict.fromkeys(("SGLangSettings.max_loras_per_batch", "SGLangSettings.lora_backend"), _VALUE),
    "Request.logit_bias": _NONE,
    "EngineSettings.vllm": _NONE,
    "SGLangSettings.update_weights": _NONE,
    "SGLangSettings.accept_single": _NONE,
    "SGLangSettings.accept_acc": _NONE,
    "SGLangSettings.deterministic": _NONE,
    "SGLangSettings.overlap": _NONE,
    "SGLangSettings.cuda_branches": _NONE,
    "SGLangSettings.attention_backend": "an entry names it in `needs`, which counts the option of the run, too",
}

STRUCTS = (
    KindCase,
    Request,
    Sampling,
    Processor,
    Logprobs,
    Penalties,
    Grammar,
    Adapter,
    EngineSettings,
    SGLangSettings,
    Adaptive,
)
FIELDS = [f"{struct.__name__}.{field.name}" for struct in STRUCTS for field in msgspec.structs.fields(struct)]


def _case(values: dict[str, object]) -> KindCase:
    """The plainest case with these values."""
    of: dict[str, dict[str, Any]] = {struct.__name__: {} for struct in STRUCTS}
    for name, value in values.items():
        struct, field = name.split(".")
        of[struct][field] = value
    request = {"id": "a", "prompt": (1, 2), "max_new_tokens": 2, **of["Request"]}
    for name, kind in (("sampling", Sampling), ("logprobs", Logprobs)):
        if of[kind.__name__]:
            request[name] = kind(**of[kind.__name__])
    engine = EngineSettings(sglang=SGLangSettings(**of["SGLangSettings"]))
    usual = {"name": "plain", "model": "llama-tiny", "num_steps": 2, "requests": (Request(**request),), "engine": engine}
    return KindCase(
        **{**usual, **of["Case"], **({"engine": EngineSettings(**of["EngineSettings"])} if of["EngineSettings"] else {})}
    )


def test_each_field_of_a_case_is_a_part_of_its_kind_or_has_a_reason_not_to_be() -> None:
    assert set(FIELDS) == CHANGES.keys() | IRRELEVANT.keys()
    assert not CHANGES.keys() & IRRELEVANT.keys()


@pytest.mark.parametrize("name", CHANGES)
def test_a_field_that_counts_changes_the_kind(name: str) -> None:
    value, beside = CHANGES[name]
    struct = name.split(".")[0]
    plain: dict[str, object] = {"Sampling": {"Request.sampling": Sampling()}, "Logprobs": {"Request.logprobs": Logprobs()}}.get(
        struct, {}
    )
    assert kind_of(_case({**plain, **beside})) != kind_of(_case({**beside, name: value}))


def test_each_dimension_is_one_that_a_case_of_the_ledger_has_and_another_lacks() -> None:
    kinds = [kind_of(case) for entry in LEDGER.values() for case in (entry.case, *entry.also)]
    assert [name for name in KINDS if len({kind[name] for kind in kinds}) < 2] == []


HOST: Any = SimpleNamespace(source=SimpleNamespace(called="0.5.23"))


@pytest.mark.parametrize("rule", ["output.hidden", "engine.crash"])
def test_every_candidate_is_tried_however_many_there_are(monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    """A known bug whose fix is not tried would be called new."""
    case = LEDGER["25015"].case
    found = candidates(case, rule, DEFAULT_RUN, "0.5.23")
    assert len(found) > 4
    remedies = list(dict.fromkeys(entry.remedy for entry in found))
    last = next(entry for entry in found if entry.remedy == remedies[-1])
    tried = list[str]()

    def cures(_: object, entry: Any, *__: object) -> bool:
        tried.append(entry.id)
        return bool(entry.remedy == last.remedy)

    monkeypatch.setattr(known, "_cures", cures)
    assert may_be(HOST, case, rule, DEFAULT_RUN) == last.id
    assert len(tried) == len(remedies)  # each builds an engine
    assert may_be_another(HOST, found[0], case, rule, DEFAULT_RUN) == last.id
