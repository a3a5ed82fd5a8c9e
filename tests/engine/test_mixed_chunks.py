"""Mixed chunks: a prefill batch gives each request that runs one token, without drafts, on the real scheduler."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.check.known import KnownBugMatcher
from eagletwin.harness.core.case import Case, EngineSettings, Grammar, GrammarBackend, Request, SGLangSettings
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.records import Finish
from eagletwin.harness.core.run_spec import DEFAULT_RUN
from eagletwin.harness.core.verdict import DECLARED_VIEW
from eagletwin.harness.engines.host import Host
from eagletwin.harness.judge.judge import judge

from ..rows import long, spread
from .conftest import Runner
from .older import host_of

LONG = (5, 9, 33, 8, 1, 2, 7, 55, 61, 12)
CASE = Case(
    name="mixed-chunks",
    model="llama-tiny",
    num_steps=2,
    chunked_prefill_size=4,
    requests=(
        Request(id="a", prompt=LONG[:3], max_new_tokens=14),
        Request(id="b", prompt=LONG, max_new_tokens=6, arrive=2),
        Request(id="c", prompt=LONG[2:], max_new_tokens=5, arrive=6),
    ),
    exercises=("mixed_step", "chunked_prefill", "accept_all", "batch_grows", "batch_shrinks"),
    engine=EngineSettings(sglang=SGLangSettings(mixed_chunks=True)),
)
MIX = "sglang.srt.managers.schedule_batch.ScheduleBatch.mix_with_running"
RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"

# Fault -> its edit, and the rule that names it first.
PLANTED: dict[str, tuple[Edit, str]] = {
    "the row of a running request goes into the slot before its own": (
        Edit(
            target=MIX,
            match="[r.seqlen - 1 for r in running_batch.reqs],",
            replacement="[r.seqlen - 2 for r in running_batch.reqs],",
        ),
        "draft.slots",
    ),
    "a running request's row has the position before its own": (
        Edit(
            target=MIX,
            match="running_prefix_lens = [r.seqlen - 1 for r in running_batch.reqs]",
            replacement="running_prefix_lens = [r.seqlen - 2 for r in running_batch.reqs]",
        ),
        "target.inputs",
    ),
    "the row is not counted as committed": (
        Edit(
            target=f"{RESULTS}.process_batch_result_prefill",
            match="req.kv.kv_committed_len += 1",
            replacement="pass",
        ),
        "draft.slots",
    ),
    "the token before the last one is consumed": (
        Edit(
            target="sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker._draft_extend_for_prefill",
            match="tail_tokens[i]",
            replacement="tail_tokens[0]",
        ),
        "draft.input_ids",
    ),
}


def test_a_mixed_step_is_right(run: Runner) -> None:
    _, verdict = run(CASE)
    assert verdict.status == "equal", verdict


def test_and_of_an_eagle3_head(run: Runner) -> None:
    _, verdict = run(replace(CASE, model="llama-eagle3", exercises=("mixed_step",)))
    assert verdict.status == "equal", verdict


@pytest.mark.parametrize("fault", spread(sorted(PLANTED), lambda fault: PLANTED[fault][-1]))
def test_a_fault_is_named(run: Runner, fault: str) -> None:
    edit, rule = PLANTED[fault]
    trace, verdict = run(replace(CASE, exercises=()), edit)
    assert (verdict.status, verdict.rule) == ("diverged", rule), (verdict, trace.header.ending)


OF_B = ("b", "finished")
# Backend -> how the red side ends: a request that is given a token outside its grammar is aborted, or nobody is answered.
OUTSIDE: dict[GrammarBackend, str] = {"xgrammar": "finished", "llguidance": "crashed"}


@pytest.mark.parametrize("arrive", [1, *long(2)], ids=["behind a prefill", "behind a round"])
@pytest.mark.parametrize("backend", sorted(OUTSIDE))
def test_with_overlap_a_running_request_is_masked_by_the_step_before_and_by_all_its_text_with_the_candidate_fix(
    overlapped: Host, tmp_path: Path, backend: GrammarBackend, arrive: int
) -> None:
    entry = LEDGER["mixed-grammar"]
    assert entry.remedy is not None
    new, running = entry.case.requests
    running = replace(running, max_new_tokens=6, grammar=Grammar(rules=("abc",)))
    own = SGLangSettings(mixed_chunks=True, grammar_backend=backend)
    case = replace(entry.case, requests=(replace(new, arrive=arrive), running), engine=EngineSettings(sglang=own))
    for name, patches in (("red", ()), ("green", (entry.remedy,))):
        (tmp_path / name).mkdir()
        trace = overlapped.engine(case, patches).run(case, tmp_path / name)
        verdict = judge(trace)
        if patches:
            assert verdict.status == "equal", verdict
            assert trace.header.ending.kind == "finished"
        else:
            assert (verdict.status, verdict.rule) == ("diverged", "grammar.mask"), verdict
            assert trace.header.ending.kind == OUTSIDE[backend], trace.header.ending
            found = [record.numbers["finish"] for record in trace.header.records if (record.request, record.stage) == OF_B]
            assert found == ([Finish.ABORT] if OUTSIDE[backend] == "finished" else [])


MEMORY = LEDGER["mixed-memory"]
# As a search found it: a hybrid model, a tree, pages. What decoding sets aside is of whole pages, too.
IN_PAGES = replace(
    MEMORY.case,
    name="mixed-memory-in-pages",
    model="qwen3.5-nextn",
    topk=4,
    num_draft_tokens=16,
    page_size=4,
    engine=EngineSettings(sglang=SGLangSettings(mixed_chunks=True, max_total_tokens=124)),
)


@pytest.mark.parametrize("case", [*long(MEMORY.case), IN_PAGES], ids=["a chain", "a tree in pages"])
@pytest.mark.parametrize("overlap", [False, *long(True)], ids=["no overlap", "overlap"])
def test_the_rest_of_a_prompt_keeps_its_slots_with_the_candidate_fix_and_ends_the_worker_without(
    host: Host, overlapped: Host, tmp_path: Path, case: Case, overlap: bool
) -> None:
    assert MEMORY.remedy is not None
    case = replace(case, exercises=())
    on = overlapped if overlap else host
    for name, patches in (("red", ()), ("green", (MEMORY.remedy,))):
        (tmp_path / name).mkdir()
        trace = on.engine(case, patches).run(case, tmp_path / name)
        verdict = judge(trace)
        if patches:
            assert verdict.status == "equal", verdict
        else:
            assert (verdict.status, verdict.rule) == ("unknown", "engine.crash"), verdict
            assert "ut of memory" in verdict.reason


@pytest.mark.parametrize("case", [MEMORY.case, *long(IN_PAGES)], ids=["a chain", "a tree in pages"])
def test_a_search_knows_it(host: Host, case: Case) -> None:
    case = replace(case, exercises=())
    matcher = KnownBugMatcher(host, DEFAULT_RUN)
    one = matcher.explain(matcher.trials().look(case), DECLARED_VIEW)
    assert [entry.id for entry in one.known] == [MEMORY.id]
    assert one.trial.clean
    assert MEMORY in matcher.present(case, DECLARED_VIEW)


@pytest.mark.parametrize("without", spread(["mixed chunks", "a prompt in chunks", "a full pool"]))
def test_nothing_ends_without_what_it_takes(run: Runner, without: str) -> None:
    own = MEMORY.case.engine.sglang
    other = {
        "mixed chunks": replace(MEMORY.case, engine=EngineSettings(sglang=replace(own, mixed_chunks=False))),
        "a prompt in chunks": replace(MEMORY.case, chunked_prefill_size=64),
        "a full pool": replace(MEMORY.case, engine=EngineSettings(sglang=replace(own, max_total_tokens=72))),
    }[without]
    _, verdict = run(replace(other, exercises=()))
    assert verdict.status == "equal", verdict


def test_with_windows_a_chunk_waits_for_slots(run: Runner) -> None:
    trace, verdict = run(replace(MEMORY.case, model="gpt-oss-eagle3", exercises=()))
    assert verdict.status == "equal", verdict
    read = [(one.iteration, one.numbers["end"]) for one in trace.header.records if (one.request, one.stage) == ("a", "prefill")]
    assert read == [(1, 43), (2, 45), (4, 49)]  # in between b decodes, and ends


STATE = LEDGER["mixed-state"]
# In pages of 16, and a step of the grid each: what is kept is up to 15 tokens too late. A third request comes to the prefix.
WIDE = replace(
    STATE.case,
    name="mixed-state-in-pages-of-16",
    model="nemotron-h-nextn",
    page_size=16,
    chunked_prefill_size=48,
    requests=(
        STATE.case.requests[0],
        replace(STATE.case.requests[1], prompt=(7, 5, 3) * 42),
        Request(id="c", prompt=(*(7, 5, 3) * 42, 1, 2, 3, 4), max_new_tokens=4, arrive=16),
    ),
    exercises=(),
)


@pytest.mark.long
@pytest.mark.parametrize("overlap", [*long(False), True], ids=["no overlap", "overlap"])
def test_a_chunk_of_a_model_with_states_ends_with_a_page_with_the_candidate_fix_and_inside_one_without(
    host: Host, overlapped: Host, tmp_path: Path, overlap: bool
) -> None:
    assert STATE.remedy is not None
    on, ends = overlapped if overlap else host, {}
    for name, patches in (("red", ()), ("green", (STATE.remedy,))):
        (tmp_path / name).mkdir()
        trace = on.engine(STATE.case, patches).run(STATE.case, tmp_path / name)
        verdict = judge(trace)
        assert (verdict.status, verdict.rule) == (("equal", "") if patches else ("diverged", STATE.rule)), verdict
        ends[name] = [one.numbers["end"] for one in trace.header.records if (one.request, one.stage) == ("b", "prefill")]
    assert ends == {"red": [64, 129, 194], "green": [64, 128, 192, 194]}


@pytest.mark.long
def test_who_comes_to_such_a_prefix_goes_on_from_a_wrong_state(host: Host, tmp_path: Path) -> None:
    assert STATE.remedy is not None
    for name, patches in (("red", ()), ("green", (STATE.remedy,))):
        (tmp_path / name).mkdir()
        trace = host.engine(WIDE, patches).run(WIDE, tmp_path / name)
        if patches:
            assert judge(trace).status == "equal"
        else:
            first = judge(trace, frozenset({"state.tracked"})).first
            assert first is not None
            assert (first.rule, first.request) == ("target.state", "c")


# A running request takes a token of a chunk of one page: what is left ends inside it, so that the prompt goes on.
SHORT = replace(
    WIDE,
    name="mixed-state-behind-less-than-a-page",
    page_size=4,
    chunked_prefill_size=512,
    chunks=(4, 8, 4),
    requests=(
        Request(id="a", prompt=(59,), max_new_tokens=3),
        Request(id="b", prompt=(7, 5, 3, 9) * 6, max_new_tokens=1),
    ),
)


@pytest.mark.long
def test_nothing_is_kept_of_a_chunk_behind_one_of_less_than_a_page(host: Host, tmp_path: Path) -> None:
    entry, kept = STATE.remedy, {}
    assert entry is not None
    cut = Patch(name="whole pages alone", edits=(entry.edits[0],))
    for name, patches in (("red", (cut,)), ("green", (entry,))):
        (tmp_path / name).mkdir()
        trace = host.engine(SHORT, patches).run(SHORT, tmp_path / name)
        verdict = judge(trace)
        chunks = [one.numbers for one in trace.header.records if (one.request, one.stage) == ("b", "prefill")]
        kept[name] = [(one["start"], one["end"]) for one in chunks], verdict.status, verdict.first and verdict.first.actual
    assert kept["green"][1:] == ("equal", None), kept
    assert kept["red"][1:] == ("diverged", "a state after 23 rows of b, inputs of a convolution after 23 rows of b"), kept
    assert kept["red"][0] == kept["green"][0]
    assert any(start % 4 for start, _ in kept["green"][0])


@pytest.mark.long
def test_a_search_knows_a_state_of_another_prefix(host: Host) -> None:
    case = replace(STATE.case, exercises=())
    matcher = KnownBugMatcher(host, DEFAULT_RUN)
    one = matcher.explain(matcher.trials().look(case), DECLARED_VIEW)
    assert [entry.id for entry in one.known] == [STATE.id]
    assert one.trial.clean
    assert STATE in matcher.present(WIDE, DECLARED_VIEW)


@pytest.mark.long
@pytest.mark.parametrize("without", ["mixed chunks", "pages", "a third chunk", "a request that runs"])
def test_states_are_right_without_what_it_takes(run: Runner, without: str) -> None:
    own, [a, b] = STATE.case.engine.sglang, STATE.case.requests
    other = {
        "mixed chunks": replace(STATE.case, engine=EngineSettings(sglang=replace(own, mixed_chunks=False))),
        "pages": replace(STATE.case, page_size=1),
        "a third chunk": replace(STATE.case, requests=(a, replace(b, prompt=b.prompt[:129]))),
        "a request that runs": replace(STATE.case, requests=(b,)),
    }[without]
    _, verdict = run(replace(other, exercises=()))
    assert verdict.status == "equal", verdict


def test_a_chunk_s_state_that_a_mixed_step_does_not_keep_is_named(run: Runner) -> None:
    """As up to 0.5.22 (#39342); in pages of 1, where all states are right."""
    fault = Edit(target=MIX, match="if self.mamba_track_indices is not None:", replacement="if False:")
    case = replace(STATE.case, page_size=1, exercises=())
    assert run(case)[1].status == "equal"
    _, verdict = run(case, fault)
    assert (verdict.status, verdict.rule) == ("diverged", "state.tracked"), verdict


# As 0.5.23 has it: what a prefill keeps a state by goes on behind the merge, and the rows of requests that run keep none.
KEPT = Edit(
    target=MIX,
    match="self.merge_batch(running_batch)",
    replacement=(
        'names = ["mamba_track_indices", "mamba_track_mask", "mamba_track_seqlens"]\n'
        "tracked = {name: getattr(self, name) for name in names}\n"
        "self.merge_batch(running_batch)\n"
        "for name, rows in tracked.items():\n"
        '    none = False if "mask" in name else -1\n'
        "    setattr(self, name, torch.cat([rows, rows.new_full((running_bs,), none)]))"
    ),
)


@pytest.mark.long
def test_before_mixed_steps_kept_states_chunks_ended_inside_pages_too(tmp_path: Path) -> None:
    """In 0.5.20 either bug alone breaks the rule, and without both nothing is wrong."""
    kept, remedy = Patch(name="kept", edits=(KEPT,)), STATE.remedy
    assert remedy is not None
    case, found = replace(STATE.case, exercises=()), {}
    with host_of("0.5.20") as old:
        for name, patches in {"neither": (kept, remedy), "this one": (kept,), "#39342": (remedy,)}.items():
            (tmp_path / name).mkdir()
            found[name] = judge(old.engine(case, patches).run(case, tmp_path / name)).first
    assert found["neither"] is None
    assert found["this one"] is not None
    assert found["this one"].rule == "state.tracked"
    assert found["this one"].actual.startswith("a state after 193 rows of b,")
    assert found["#39342"] is not None
    assert (found["#39342"].rule, found["#39342"].actual) == ("state.tracked", "of no row of any request")
