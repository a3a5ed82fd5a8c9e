"""Which bugs of the ledger a divergence is compared with. tests/engine/test_findings.py runs them."""

from types import SimpleNamespace
from typing import Any

from msgspec.structs import replace

from eagletwin.cases.entry import Entry
from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.check.known import Mends, candidates, may_show
from eagletwin.harness.core.case import Grammar
from eagletwin.harness.core.run_spec import CPU, DEFAULT_RUN, Mode
from eagletwin.harness.engines.provision import releases

LIVE = LEDGER["retracted-chunk-tail"]


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
    assert ids("context-end-reads", "0.5.23") == []


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
    bug, newest = LEDGER["row-overflow"], SimpleNamespace(called=releases()[-1], tree="", base=None)
    host: Any = SimpleNamespace(source=newest, mode=CPU)

    def believed(entry: Entry, **run: object) -> bool:
        return Mends(host, replace(DEFAULT_RUN, **run)).as_proven(entry, entry.within)

    assert bug.remedy is not None
    assert believed(bug)
    assert not believed(LEDGER["26329"])
    assert not believed(bug, kernels="interpreter")
    assert not believed(bug, patches=(replace(bug.remedy, name="a patch of what it edits"),))
    assert not Mends(host, DEFAULT_RUN).as_proven(bug, "true_tree")
