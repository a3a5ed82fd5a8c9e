"""What a search takes for known: a case that is equal with the fix of a live bug, and nothing else, whatever rule it breaks."""

from collections.abc import Sequence
from dataclasses import replace as replaced
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from eagletwin.cases.blocks import SearchConstraints, block_of
from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.check.known import Explained, KnownBugMatcher, as_newest
from eagletwin.harness.check.trials import Trial, Trials, base_of
from eagletwin.harness.commands.fuzz.looking import NO_BLOCK, BlockRunner, CaseSeen
from eagletwin.harness.commands.fuzz.options import SearchOptions
from eagletwin.harness.commands.fuzz.pool import BlockPool, LocalWorkers
from eagletwin.harness.commands.fuzz.tally import Tally
from eagletwin.harness.core.case import Case, EngineSettings, Event, Grammar, Request, SGLangSettings
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.records import Ending
from eagletwin.harness.core.run_spec import DEFAULT_RUN
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.core.verdict import DECLARED_VIEW, Verdict
from eagletwin.harness.engines.host import Host
from eagletwin.harness.engines.source import INSTALLED, resolve
from eagletwin.harness.judge.judge import judge

from ..rows import long
from .planted_trees import plant

TAIL = LEDGER["multi-layer-chunk-tail-2"]
WORKER = "sglang.srt.speculative.multi_layer_eagle_worker_v2.MultiLayerEagleDraftWorker"
# one request in two chunks, and rounds behind them
CASE = replace(TAIL.case, exercises=(), requests=(Request(id="a", prompt=(7, 19, 3, 5), max_new_tokens=4),))


def explained(host: Host, case: Case, *edits: Edit) -> tuple[KnownBugMatcher, Explained]:
    patches = (Patch(name="planted", edits=edits),) if edits else ()
    matcher = KnownBugMatcher(host, replace(DEFAULT_RUN, mode=host.mode, patches=patches))
    trial = matcher.trials().look(case)
    assert trial.signature is not None
    return matcher, matcher.explain(trial, DECLARED_VIEW)


def test_what_a_remedy_makes_equal_is_known(host: Host) -> None:
    matcher, one = explained(host, CASE)
    assert [entry.id for entry in one.known] == [TAIL.id]
    assert one.trial.clean
    assert TAIL.id in [entry.id for entry in matcher.present(CASE, DECLARED_VIEW)]


@pytest.mark.long
def test_a_bug_of_overlap_is_known_where_a_draft_always_runs_with_it(host: Host) -> None:
    stream = LEDGER["retracted-stream"]
    _, one = explained(host, replace(stream.case, exercises=(), model="gemma-4-assistant"))
    assert [entry.id for entry in one.known] == [stream.id]
    assert one.trial.clean


def test_another_bug_in_the_same_case_is_new_though_the_known_one_comes_first(host: Host) -> None:
    """Of PR #22954's kind: the rule that the case breaks first is the known bug's, and it hides the other."""
    backup = "next_token_ids_backup = batch_result.next_token_ids.clone()"
    edit = Edit(target=f"{WORKER}._draft_extend_for_decode", match=backup, replacement=backup.removesuffix(".clone()"))
    _, one = explained(host, CASE, edit)
    assert one.known == ()
    assert TAIL.id in [entry.id for entry in one.mended]
    assert one.trial.signature is not None
    assert one.trial.signature.rule != TAIL.rule


def test_another_bug_of_the_same_rule_and_stage_is_new(host: Host) -> None:
    """The name of a rule excuses nothing."""
    seed = "self._seed_boundary_kv_stash("
    edit = Edit(
        target=f"{WORKER}._draft_extend_for_prefill",
        match=seed,
        replacement=f"forward_batch.input_ids[0] = 1\n{seed}",
    )
    _, one = explained(host, CASE, edit)
    assert one.known == ()
    assert one.trial.signature is not None
    assert one.trial.signature.rule == TAIL.rule


@pytest.mark.parametrize(("planted", "known"), [("pass", [TAIL.id]), ("forward_batch.input_ids[0] = 1", [])])
def test_where_a_remedy_does_not_fit_a_case_is_known_if_it_shows_what_the_base_shows(
    host: Host, planted: str, known: list[str]
) -> None:
    """A change of the function that a remedy edits: harmless, and of the same rule and stage as the bug."""
    seed = "self._seed_boundary_kv_stash("
    edit = Edit(target=f"{WORKER}._draft_extend_for_prefill", match=seed, replacement=f"{planted}; {seed[:-1]} (")
    matcher, one = explained(host, CASE, edit)
    assert TAIL.id in matcher.unfit
    assert [entry.id for entry in one.known] == known
    assert one.trial.clean == bool(known)
    assert TAIL.id not in [entry.id for entry in one.mended]


def test_what_the_base_does_not_show_is_new_though_it_records_the_same(host: Host) -> None:
    """A change may end the engine after its last record."""
    seed = "self._seed_boundary_kv_stash("
    edit = Edit(target=f"{WORKER}._draft_extend_for_prefill", match=seed, replacement=f"pass; {seed[:-1]} (")
    matcher = KnownBugMatcher(host, replace(DEFAULT_RUN, mode=host.mode, patches=(Patch(name="planted", edits=(edit,)),)))
    trial = matcher.trials().look(CASE)
    right = replaced(trial, verdict=replace(trial.verdict, status="equal", first=None))
    assert right.numbers == trial.numbers
    assert matcher.base is not None
    matcher.base.look = lambda *_: right  # type: ignore[method-assign]
    assert matcher.explain(trial, DECLARED_VIEW).known == ()


# Rows of KV indices four entries too short: as the ledger's indices-overflow, which its wider rows mend as well, and in cases
# that the release is right in.
OVERFLOW = LEDGER["indices-overflow"]
NEAR = "hidden_states=+target_hidden_states,"
SHORT_ROWS = Edit(
    target="sglang.srt.layers.attention.triton_backend.TritonMultiStepDraftBackend.__init__",
    match="self.max_context_len = self.attn_backends[0].max_context_len",
    replacement="self.max_context_len = self.attn_backends[0].max_context_len - 4",
)


@pytest.mark.parametrize(("num_steps", "known"), [(4, []), *long((5, [OVERFLOW.id]))])
def test_what_a_remedy_makes_equal_is_new_where_the_sglang_without_the_change_is_right(
    host: Host, num_steps: int, known: list[str]
) -> None:
    case = replace(OVERFLOW.case, exercises=(), num_steps=num_steps)
    matcher, one = explained(host, case, SHORT_ROWS)
    assert [entry.id for entry in one.known] == known
    assert [entry.id for entry in one.cured] == ([] if known else [OVERFLOW.id])
    assert one.trial.clean == bool(known)
    assert matcher.right_in_base(case, (), DECLARED_VIEW) == (not known)


def test_there_is_no_base_where_nothing_is_changed_but_by_remedies(host: Host) -> None:
    assert base_of(host, DEFAULT_RUN) is None
    assert base_of(host, TAIL.run(TAIL.green)) is None
    assert base_of(host, replace(DEFAULT_RUN, patches=(Patch(name="planted", edits=(SHORT_ROWS,)),))) is not None


@pytest.mark.long
def test_another_bug_in_the_case_of_an_entry_is_shown_past_that_entry(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes up when the search asks whether the entry's bug is here. With its remedy the other bug is left."""
    best = "topk_p, topk_index = fast_topk(probs, self.topk, dim=-1)\n"
    edit = Edit(
        target="sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft_forward",
        match=f"{best}                forward_batch.positions.add_(1)",
        replacement=f"{best}if i > 0:\n    forward_batch.positions.add_(1)",
    )
    matcher = KnownBugMatcher(host, replace(DEFAULT_RUN, patches=(Patch(name="planted", edits=(edit,)),)))
    entry = LEDGER["tree-window"]
    monkeypatch.setattr(matcher, "as_proven", lambda entry, view: False)
    matcher.present(replace(entry.case, exercises=()), DECLARED_VIEW)
    seen = [
        one
        for one in BlockRunner(matcher, SearchOptions(only=("llama-tiny",)).plan).drain_unexpected()
        if isinstance(one, CaseSeen)
    ]
    assert matcher.unexpected == []
    [shown] = [one for one in seen if one.case.model == entry.case.model and one.case.topk == entry.case.topk]
    assert (shown.block, shown.known) == (NO_BLOCK, ())
    assert entry.id in shown.mended
    assert shown.signature is not None
    assert shown.signature.rule == "draft.positions"


@pytest.mark.long
def test_a_known_bug_is_mended_in_the_cases_that_may_show_it(host: Host) -> None:
    """The cases of a block with min_p run with the remedy of `min-p`; those of them that ask for none could not show it."""
    asked = SearchConstraints(held={"model": "llama-tiny", "topk": 1}, sampling="target", asks=("min_p",))
    looking, tally, asking = BlockRunner(KnownBugMatcher(host, DEFAULT_RUN), SearchOptions().plan), Tally(), list[bool]()
    for number in range(3):
        for seen in looking.run(block_of(5, number, asked)):
            assert isinstance(seen, CaseSeen)
            assert "min-p" in seen.mended
            asking.append(any(one.sampling is not None and one.sampling.min_p > 0 for one in seen.case.requests))
            tally.add(seen)
    assert tally.known["min-p"].mended == sum(asking) < len(asking)


# Greedy requests that come back in chunks of one token, shrunk from cases of searches: a text that has ended, and rules.
COMES_BACK = Case(
    name="comes-back",
    model="qwen3-eagle3-norm",
    num_steps=1,
    chunks=(64, 1),
    requests=(Request(id="a", prompt=(20,), max_new_tokens=2, grammar=Grammar(rules=("(b|a)",))),),
    events=(Event(at=1, kind="retract"),),
    engine=EngineSettings(sglang=SGLangSettings(grammar_backend="llguidance")),
)
RULES = Grammar(kind="ebnf", rules=("d|bB(c|a|d)", "((b|d|c|a))*|aA|cAac"))
BACK_IN_A_TREE = replace(
    COMES_BACK,
    model="qwen3-moe-eagle3",
    num_steps=2,
    topk=2,
    num_draft_tokens=4,
    requests=(Request(id="a", prompt=(74,), max_new_tokens=7, grammar=RULES),),
    engine=EngineSettings(),
)


@pytest.mark.long
@pytest.mark.parametrize("case", [COMES_BACK, BACK_IN_A_TREE], ids=["a text that has ended", "rules, in a tree"])
@pytest.mark.parametrize("overlap", [False, True], ids=["no overlap", "overlap"])
def test_a_chunk_s_tail_of_a_greedy_request_with_a_grammar_is_known(
    host: Host, overlapped: Host, case: Case, overlap: bool
) -> None:
    _, one = explained(overlapped if overlap else host, case)
    assert [entry.id for entry in one.known] == ["retracted-chunk-tail"]
    assert one.trial.clean


def test_what_does_not_show_again_alone_is_not_known(host: Host) -> None:
    matcher = KnownBugMatcher(host, DEFAULT_RUN)
    trial = matcher.trials().look(CASE)
    assert trial.signature is not None
    leaked = replaced(
        trial, before=(CASE,), verdict=replace(trial.verdict, first=replace(trial.verdict.first, rule="draft.kv"))
    )
    assert matcher.explain(leaked, DECLARED_VIEW).known == ()


@pytest.mark.long
def test_a_case_that_ran_first_on_a_cpu_is_not_run_alone_once_more(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = list[Case]()
    look_alone = Trials.look_alone

    def counted(trials: Trials, case: Case) -> Trial:
        alone.append(case)
        return look_alone(trials, case)

    monkeypatch.setattr(Trials, "look_alone", counted)
    matcher = KnownBugMatcher(host, DEFAULT_RUN)
    first = replaced(matcher.trials().look(CASE), before=())
    assert matcher.explain(first, DECLARED_VIEW).known == (TAIL,)
    assert not alone
    second = replaced(first, before=(CASE,))
    assert matcher.explain(second, DECLARED_VIEW).known == (TAIL,)
    crashed = replaced(first, header=replace(first.header, ending=Ending(kind="crashed")))
    assert matcher.explain(crashed, DECLARED_VIEW).known == (TAIL,)
    assert alone == [CASE, CASE]
    plain = replace(CASE, engine=EngineSettings(sglang=SGLangSettings(plain_decode=True)))
    beside = replaced(matcher.trials().look(plain), before=())
    assert matcher.explain(beside, DECLARED_VIEW).known == (TAIL,)
    assert alone == [CASE, CASE, plain]


def test_a_trace_is_judged_once_and_another_one_anew(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    judged = list[Trace]()

    def judge_and_count(trace: Trace, *how: Any) -> Verdict:
        judged.append(trace)
        return judge(trace, *how)

    monkeypatch.setattr("eagletwin.harness.check.trials.judge", judge_and_count)
    trials = KnownBugMatcher(host, DEFAULT_RUN).trials()
    seen, alone = trials.look(CASE), trials.look_alone(CASE)
    assert len(judged) == 1
    assert alone.verdict == seen.verdict
    assert alone.verdict.rule == TAIL.rule
    expected = judge(judged[0])
    another = replaced(seen, header=replace(seen.header, tensors_sha256="another"))
    trials._known = dict.fromkeys(trials._known, another)
    assert trials.look_alone(CASE).verdict == expected
    assert len(judged) == 2


@pytest.mark.parametrize("shown", [True, False])
def test_a_bug_is_mended_only_where_its_own_case_shows_it(host: Host, shown: bool) -> None:
    matcher = KnownBugMatcher(host, DEFAULT_RUN if shown else TAIL.run(TAIL.green))
    assert (TAIL.id in [entry.id for entry in matcher.present(CASE, DECLARED_VIEW)]) == shown


@pytest.mark.long
def test_two_processes_come_to_the_same_as_one(host: Host) -> None:
    options = SearchOptions(only=("llama-tiny", "chains"), left_out=("sampling",))
    matcher = KnownBugMatcher(host, DEFAULT_RUN)
    alone = [list(block) for block in islice(BlockPool(matcher, options.plan).blocks(), 6)]
    with BlockPool(KnownBugMatcher(host, DEFAULT_RUN), options.plan, LocalWorkers(host, options, 1)) as pool:
        shared = [list(block) for block in islice(pool.blocks(), 6)]
    assert [_brief(block) for block in alone] == [_brief(block) for block in shared]
    assert sum(map(len, shared)) >= 20
    earlier = tuple(one for one in alone[1][:2] if isinstance(one, CaseSeen))
    rest = list(BlockRunner(matcher, options.plan).block(1, earlier))  # of a block that a worker left
    assert _brief(rest) == _brief(alone[1][2:])


def _brief(block: Sequence[object]) -> list[object]:
    return [(one.case, one.verdict.status, one.signature, one.known) if isinstance(one, CaseSeen) else one for one in block]


# A tree of several layers whose prompt has a chunk of one token, and whose accepted path is not in front.
TWO = replace(
    LEDGER["multi-layer-topk-path"].case,
    exercises=(),
    num_steps=3,
    topk=4,
    chunks=(5, 2, 2, 2, 2),
    requests=(
        Request(id="a", prompt=(17, 31, 3, 78, 57, 23, 89), max_new_tokens=6, arrive=1),
        Request(id="b", prompt=(31, 54, 11, 62, 35, 71, 29, 45, 70, 57), max_new_tokens=1, arrive=2),
        Request(id="c", prompt=(31, 56, 56), max_new_tokens=5),
    ),
)


@pytest.mark.long
def test_of_a_case_that_shows_two_bugs_both_are_named_and_neither_can_be_left_out(host: Host) -> None:
    """Of the two bugs that the second remedy mends that is named whose rule breaks without it."""
    second = LEDGER["multi-layer-topk-windows"]
    matcher, one = explained(host, TWO)
    assert [entry.id for entry in one.known] == [TAIL.id, second.id]
    assert one.trial.clean
    assert not any(matcher.trials((entry,)).look(TWO).clean for entry in one.known)
    assert matcher.trials((TAIL,)).look(TWO).verdict.rule == second.rule


@pytest.mark.long
def test_a_new_fault_beside_two_known_bugs_is_new(host: Host) -> None:
    backup = "next_token_ids_backup = batch_result.next_token_ids.clone()"
    edit = Edit(target=f"{WORKER}._draft_extend_for_decode", match=backup, replacement=backup.removesuffix(".clone()"))
    _, one = explained(host, TWO, edit)
    assert (one.known, one.cured) == ((), ())
    assert {TAIL.id, "multi-layer-topk-path"} <= {entry.id for entry in one.mended}
    assert one.trial.signature is not None


@pytest.mark.long
def test_the_ledger_is_believed_where_the_proofs_are_and_nowhere_else(host: Host) -> None:
    """No case is run to see that a live bug is there, where the code that its remedy edits is as in the newest release."""
    matcher = KnownBugMatcher(host, DEFAULT_RUN)
    assert TAIL.id in [entry.id for entry in matcher.present(CASE, DECLARED_VIEW)]
    assert matcher.trials().ran == 0
    undone = LEDGER["25015"].revert
    assert undone is not None
    reverted = KnownBugMatcher(host, replace(DEFAULT_RUN, patches=(undone,)))
    assert TAIL.id in [entry.id for entry in reverted.present(CASE, DECLARED_VIEW)]
    assert reverted.ran == 0
    near = Edit(target=f"{WORKER}._draft_extend_for_prefill", match="hidden_states=target_hidden_states,", replacement=NEAR)
    for edit, runs in ((SHORT_ROWS, False), (near, True)):
        changed = KnownBugMatcher(host, replace(DEFAULT_RUN, patches=(Patch(name="planted", edits=(edit,)),)))
        assert TAIL.id in [entry.id for entry in changed.present(CASE, DECLARED_VIEW)]
        assert (changed.trials().ran > 0) == runs


def test_a_search_that_is_not_to_know_a_bug_neither_mends_it_nor_explains_anything_with_it(host: Host) -> None:
    bug = TAIL.case
    known, unknown = (
        KnownBugMatcher(host, DEFAULT_RUN),
        KnownBugMatcher(host, DEFAULT_RUN, unknown=(TAIL.id, "multi-layer-chunk-tail-3")),
    )
    assert TAIL in known.present(bug, TAIL.within)
    assert TAIL not in unknown.present(bug, TAIL.within)
    assert known.views(bug) == unknown.views(bug)
    assert known.explain(known.trials().look(bug), TAIL.within).known == (TAIL,)
    left = unknown.explain(unknown.trials().look(bug), TAIL.within)
    assert left.known == ()
    assert left.trial.signature == unknown.trials().look(bug).signature


def test_a_view_that_accepts_a_bug_is_searched_where_the_bug_is(host: Host) -> None:
    """A plain draft whose rows a change puts right is judged as it is trained alone."""
    case, remedy = LEDGER["standalone-keys"].case, LEDGER["standalone-shift"].remedy
    assert remedy is not None
    fix = Patch(name="fix", edits=remedy.edits, otherwise=remedy.otherwise)
    assert KnownBugMatcher(host, DEFAULT_RUN).views(case) == (DECLARED_VIEW, "shifted")
    mended = KnownBugMatcher(host, replace(DEFAULT_RUN, patches=(fix,)))
    assert mended.views(case) == (DECLARED_VIEW,)
    hidden = LEDGER["hidden-standalone"]
    assert hidden in mended.present(hidden.case, DECLARED_VIEW)
    assert not mended.unexpected


@pytest.mark.long
def test_what_a_request_is_sent_is_wrong_in_any_view(host: Host) -> None:
    """In the declared view a plain draft model's own rows are wrong first; with both bugs mended the case is right."""
    entry = LEDGER["hidden-standalone"]
    matcher = KnownBugMatcher(host, DEFAULT_RUN)
    assert entry.within != DECLARED_VIEW
    assert all(entry in matcher.present(entry.case, view) for view in (DECLARED_VIEW, entry.within))
    one = matcher.explain(matcher.trials().look(entry.case), DECLARED_VIEW)
    assert {bug.id for bug in one.known} == {entry.id, "standalone-shift"}
    assert LEDGER["standalone-keys"] not in matcher.applicable(LEDGER["standalone-keys"].case, DECLARED_VIEW)


@pytest.mark.long
def test_and_with_overlap_where_its_own_case_is_right(overlapped: Host) -> None:
    """A retraction that falls into another step shows grammar-end there; its own case does not."""
    matcher = KnownBugMatcher(overlapped, replace(DEFAULT_RUN, mode=overlapped.mode))
    entry = LEDGER["grammar-end"]
    case = replace(entry.case, model="llama-standalone", exercises=())
    assert entry in matcher.applicable(case, "shifted")
    assert LEDGER["25015"] not in matcher.applicable(replace(LEDGER["25015"].case, model="llama-standalone"), "shifted")


def test_a_tree_has_a_live_bug_without_a_run_unless_the_code_of_its_fix_was_changed(tmp_path: Path) -> None:
    function, text = f"{WORKER}._draft_extend_for_decode", "batch_result.next_token_ids.clone()"
    file = "srt/speculative/multi_layer_eagle_worker_v2.py"
    tree = resolve(str(plant(tmp_path, (file, text, text.removesuffix(".clone()")))))
    remedies = [entry.remedy for entry in LEDGER.values() if entry.remedy is not None]
    of_function = [remedy for remedy in remedies if function in remedy.targets]
    others = [remedy for remedy in remedies if function not in remedy.targets and remedy.edits and not remedy.switches]
    assert of_function
    assert not any(as_newest(tree, remedy) for remedy in of_function)
    assert all(as_newest(tree, remedy) for remedy in others)
    assert all(as_newest(INSTALLED, remedy) for remedy in remedies)
