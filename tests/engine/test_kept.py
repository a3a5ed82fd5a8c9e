"""Rows that must lie in the prefix cache: `radix.kept`, by faults planted in the real worker."""

from pathlib import Path

import msgspec
import pytest

from eagletwin.harness.core.case import Bias, Case, EngineSettings, Event, Logprobs, Request, SGLangSettings
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.run_spec import CPU
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.engines.host import Host
from eagletwin.harness.judge.judge import judge
from eagletwin.harness.judge.rules.prefix_cache import KeptRows

from ..rows import spread
from .changes import without
from .conftest import Runner

RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
REQUEST = "sglang.srt.managers.schedule_batch.Req"
CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
COMMON = "sglang.srt.mem_cache.common"
WINDOW = "sglang.srt.mem_cache.unified_cache.components.swa.SWAComponent"

# A prompt in two chunks, whose request ends inside a round, and one that ends with its prefill.
ENDING = Case(
    name="ending",
    model="llama-tiny",
    num_steps=3,
    page_size=4,
    chunks=(8,),
    requests=(
        Request(id="a", prompt=(5, 17, 33, 8, 60, 41, 2, 19, 77, 50, 3, 9, 12, 25), max_new_tokens=7),
        Request(id="b", prompt=(9, 8, 7, 6, 5, 4, 3, 2, 1), max_new_tokens=1, arrive=2),
    ),
    engine=EngineSettings(sglang=SGLangSettings(radix_cache=True, max_total_tokens=256)),
    exercises=("chunked_prefill",),
)

SHARED = (89, 84, 28, 73, 28, 28, 59, 72, 77, 89, 58, 18, 9, 74, 16, 39, 88, 88, 52, 39)
# A prompt parts from another where the window's rows of what both have are gone, and its request ends with its prefill.
BRANCH = Case(
    name="branch",
    model="gpt-oss-eagle3",
    num_steps=1,
    requests=(
        Request(id="a", prompt=(*SHARED, 46, 76, 93, 51, 72, 25, 72, 80, 11, 72, 73, 67, 81), max_new_tokens=14),
        Request(id="b", prompt=(*SHARED, 52, 66, 69, 89, 14), max_new_tokens=1, arrive=16),
    ),
    engine=EngineSettings(sglang=SGLangSettings(radix_cache=True, max_total_tokens=104)),
)

HALF = (22, 77, 13, 37, 20, 68, 62, 65, 88, 53, 31, 17, 67, 8, 54, 60, 82, 5, 62, 39, 34, 80, 18)
TOKENS = (*HALF, 45, 8, 7, 8, 88, 74, 6, 53, 32, 59, 8, 72, 33, 61, 68, 75, 34, 49, 34, 33, 63, 42, 7)
LONG = (59, 7, 11, 10, 46, 21, 94, 85, 39, 32, 77, 27, 77, 4, 74, 87, 20, 55, 81, 50, 92, 65, 47, 69, 56, 64, 34, 4, 3, 46)
OTHER = (73, 4, 54, 61, 73, 1, 26, 59, 62, 35, 83, 20, 4, 66, 62, 41, 9, 31, 95, 46, 5, 53, 17, 77, 45, 48, 53, 36, 86, 33)

# Its retraction evicts a part of its prompt's rows. It is looked up, and the room that it then needs evicts the rest.
RETRACTED = Case(
    name="retracted",
    model="gpt-oss-eagle3",
    num_steps=1,
    requests=(Request(id="a", prompt=TOKENS, max_new_tokens=8),),
    events=(Event(at=2, kind="retract"),),
    engine=EngineSettings(sglang=SGLangSettings(radix_cache=True, max_total_tokens=64)),
)

ON_HOST = msgspec.structs.replace(
    BRANCH,
    name="host",
    requests=(
        BRANCH.requests[0],
        Request(id="x", prompt=(*TOKENS, 1, 2, 3, 4), max_new_tokens=1, arrive=16),
        msgspec.structs.replace(BRANCH.requests[1], max_new_tokens=3, arrive=20),
    ),
    engine=EngineSettings(sglang=SGLangSettings(radix_cache=True, max_total_tokens=64, host_pages=128)),
)

# Cases with a branch of windows whose rows are gone when they are put there again: how many are kept, and how many there are.
BRANCHES = {
    "evicted after the look-up": (RETRACTED, 37, 48),
    "behind what is looked up, for the logprobs that are asked for": (
        msgspec.structs.replace(
            RETRACTED, requests=(Request(id="a", prompt=TOKENS, max_new_tokens=8, logprobs=Logprobs(start=10)),)
        ),
        9,
        48,
    ),
    "on the host": (ON_HOST, 19, 24),
    # all of the prompt that is looked up is there, and the first chunk ends where the branch does
    "on the host, of a prompt in two chunks": (
        msgspec.structs.replace(
            ON_HOST,
            requests=(
                *ON_HOST.requests[:2],
                Request(id="b", prompt=ON_HOST.requests[0].prompt[:25], max_new_tokens=1, arrive=20),
            ),
            chunks=(512, 512, 23),
        ),
        23,
        24,
    ),
    # `c` comes back from a retraction for lack of room, in the batch of `f`, whose branch was evicted for it: it has its slots
    "in slots that another request of the batch is given": (
        Case(
            name="slots",
            model="mimo-v2-window",
            num_steps=2,
            chunked_prefill_size=512,
            requests=(
                Request(id="c", prompt=LONG, max_new_tokens=9),
                Request(
                    id="d",
                    prompt=(*OTHER, 58, 22, 87, 38, 84, 46),
                    max_new_tokens=14,
                    logit_bias=(Bias(token=4, value=3.0), Bias(token=52, value=8.0)),
                ),
                Request(id="f", prompt=LONG[:23], max_new_tokens=1, arrive=7),
            ),
            engine=EngineSettings(sglang=SGLangSettings(radix_cache=True, max_total_tokens=96)),
        ),
        21,
        37,
    ),
}

PLANTED = {
    "a request that has ended is kept out of the cache": Edit(
        target=f"{RESULTS}._mamba_can_cache_finished_req",
        match="supports_mamba()\n    ):\n        return True",
        replacement="supports_mamba()\n    ):\n        return False",
    ),
    "what a request has at its end is not put there": Edit(
        target=f"{COMMON}.release_kv_cache", match="checkpoint = checkpoint and", replacement="checkpoint = False and"
    ),
    "an end counts a page too few": Edit(
        target=f"{REQUEST}.owned_kv_len",
        match="len(self.origin_input_ids) + len(self.output_ids_through_stop),",
        replacement="len(self.origin_input_ids) + len(self.output_ids_through_stop) - 4,",
    ),
    "chunks and prompts are not put there": Edit(
        target=f"{COMMON}.checkpoint_kv_cache", match="if not req.skip_radix_cache_insert:", replacement="if False:"
    ),
    "the last page of a chunk is left out": Edit(
        target=f"{COMMON}.checkpoint_kv_cache", match="up_to=req.extend_end)", replacement="up_to=req.extend_end - 4)"
    ),
    "a key is cut by a page": Edit(
        target=f"{CACHE}.checkpoint_into_tree",
        match="radix_key = radix_key.page_aligned(self.page_size)",
        replacement="radix_key = radix_key[: max(0, len(radix_key) - 4)].page_aligned(self.page_size)",
    ),
}

WINDOWED = {
    "what a request has that is back from a retraction is not put there": Edit(
        target=f"{COMMON}.checkpoint_kv_cache",
        match="if not req.skip_radix_cache_insert:",
        replacement="if not req.skip_radix_cache_insert and not req.retraction_count:",
    ),
    "what a request has at its end is not put there after a retraction": Edit(
        target=f"{COMMON}.release_kv_cache",
        match="checkpoint = checkpoint and",
        replacement="checkpoint = checkpoint and not req.retraction_count and",
    ),
    "a branch is put there a row too short": Edit(
        target=f"{WINDOW}.prepare_for_caching_req",
        match="return effective_cache_len",
        replacement="return effective_cache_len - 1",
    ),
    "a branch is half as long as what the cache has": Edit(
        target=f"{COMMON}.match_kv_cache",
        match="req.swa_branching_seqlen = match_result.swa_branching_seqlen",
        replacement="req.swa_branching_seqlen = (match_result.swa_branching_seqlen or 0) // 2 or None",
    ),
}


def test_what_requests_leave_is_in_the_cache(host: Host, tmp_path_factory: pytest.TempPathFactory) -> None:
    verdict = judge(host.engine(ENDING).run(ENDING, tmp_path_factory.mktemp("ending")))
    assert verdict.status == "equal", verdict
    assert verdict.checked["radix.kept"] > 0


@pytest.mark.parametrize("fault", spread(PLANTED))
def test_a_fault_of_the_cache_is_named(run: Runner, fault: str) -> None:
    trace, verdict = run(ENDING, PLANTED[fault])
    assert (verdict.status, verdict.rule) == ("diverged", "radix.kept"), verdict
    assert judge(trace, frozenset({"radix.kept"})).status == "equal"


def test_of_a_prompt_behind_a_branch_of_windows_no_more_than_the_branch_is_kept(run: Runner) -> None:
    """SGLang's own limit: were all of it demanded, this case would diverge."""
    trace, verdict = run(BRANCH)
    assert verdict.status == "equal", verdict
    records = trace.header.records
    (hit,) = (record.numbers["start"] for record in records if record.stage == "prefill" and record.request == "b")
    ended = next(record.iteration for record in records if record.stage == "finished" and record.request == "b")
    iterations = {record.iteration: n for n, record in enumerate(records) if record.stage == "iteration"}
    more = len(trace.array(iterations[ended], "cached")) - len(trace.array(iterations[ended - 1], "cached"))
    assert (hit, more) == (0, 0)  # of its 24 rows 19 were there as those of `a`, and 5 are not


@pytest.mark.parametrize("branch", spread(BRANCHES, lambda branch: branch.startswith("on the host")))
def test_a_branch_is_what_the_cache_had_when_the_request_was_looked_up(
    run: Runner, branch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, kept, whole = BRANCHES[branch]
    trace, verdict = run(case)
    assert verdict.status == "equal", verdict
    monkeypatch.setattr(KeptRows, "_parting", lambda *_: 0)  # were all of it demanded
    verdict = judge(trace)
    assert (verdict.status, verdict.rule) == ("diverged", "radix.kept"), verdict
    assert verdict.first is not None
    assert (verdict.first.expected, verdict.first.actual) == (str(whole), str(kept))


@pytest.mark.parametrize(("stage", "expected"), [("iteration", "45"), ("batch", "48")])
def test_what_the_cache_has_before_or_behind_the_look_up_is_something_else(run: Runner, stage: str, expected: str) -> None:
    trace, _ = run(RETRACTED)
    records = list(enumerate(trace.header.records))
    look_up = max(n for n, record in records if record.stage == "looked_up")
    iteration = trace.header.records[look_up].iteration
    (other,) = (n for n, record in records if record.stage == stage and record.iteration == iteration)
    tensors = {**trace.tensors, f"{look_up}.cached": trace.array(other, "cached")}
    verdict = judge(Trace(trace.header, tensors))
    assert (verdict.status, verdict.rule) == ("diverged", "radix.kept"), verdict
    assert verdict.first is not None
    assert (verdict.first.expected, verdict.first.actual) == (expected, "37")


def test_a_look_up_that_was_not_recorded_is_no_pass(run: Runner) -> None:
    trace, _ = run(BRANCH)
    verdict = judge(without(trace, lambda _, record: record.stage == "looked_up"))
    assert verdict.status == "unknown"
    assert "look-up in the prefix cache in iteration 0" in verdict.reason


@pytest.mark.parametrize("fault", spread(WINDOWED))
def test_a_fault_of_the_cache_of_a_model_with_windows_is_named(run: Runner, fault: str) -> None:
    trace, verdict = run(RETRACTED, WINDOWED[fault])
    assert (verdict.status, verdict.rule) == ("diverged", "radix.kept"), verdict
    assert judge(trace, frozenset({"radix.kept"})).status == "equal"


# `a` ends with a result that is looked at as the retraction comes. The room that `b` needs then evicts all its rows.
AT_A_RETRACTION = Case(
    name="ends-at-a-retraction",
    model="llama-tiny",
    num_steps=1,
    requests=(
        Request(id="a", prompt=LONG, max_new_tokens=2),
        Request(id="b", prompt=TOKENS, max_new_tokens=2, arrive=2),
    ),
    events=(Event(at=2, kind="retract"),),
    engine=EngineSettings(sglang=SGLangSettings(radix_cache=True, max_total_tokens=64)),
)


def test_what_a_request_leaves_is_there_when_its_end_is_seen_and_may_be_evicted_at_once(
    overlapped: Host, tmp_path: Path
) -> None:
    trace = overlapped.engine(AT_A_RETRACTION).run(AT_A_RETRACTION, tmp_path)
    verdict = judge(trace)
    assert verdict.status == "equal", verdict
    records = list(enumerate(trace.header.records))
    [(read, then)] = ((n, record) for n, record in records if record.stage == "read")
    [ended] = (record for _, record in records if (record.stage, record.request) == ("finished", "a"))
    [later] = (n for n, record in records if record.stage == "iteration" and record.iteration == ended.iteration)
    assert (then.iteration, ended.iteration) == (2, 3)
    # of its 32 tokens the last one has no row yet
    assert (len(trace.array(read, "cached")), len(trace.array(later, "cached"))) == (31, 0)
    verdict = judge(without(trace, lambda _, record: record.stage == "read"))
    assert (verdict.status, "last result was looked at" in verdict.reason) == ("unknown", True), verdict


def test_with_overlap_what_is_never_put_there_is_named_at_a_retraction_too(overlapped: Host, tmp_path: Path) -> None:
    patches = (Patch(name="planted", edits=(PLANTED["a key is cut by a page"],)),)
    verdict = judge(overlapped.engine(AT_A_RETRACTION, patches).run(AT_A_RETRACTION, tmp_path))
    assert (verdict.status, verdict.rule) == ("diverged", "radix.kept"), verdict
    assert verdict.first is not None
    assert (verdict.first.request, verdict.first.stage) == ("a", "finished")
    assert (verdict.first.expected, verdict.first.actual) == ("31", "27")


# b's first step behind its prefill is a mixed one, whatever comes then: its end, a round, another mixed step.
MIXED = Case(
    name="mixed",
    model="llama-tiny",
    num_steps=1,
    requests=(
        Request(id="a", prompt=(49,), max_new_tokens=1, arrive=1),
        Request(id="b", prompt=(49, 8, 33), max_new_tokens=2),
    ),
    engine=EngineSettings(sglang=SGLangSettings(radix_cache=True, mixed_chunks=True)),
    exercises=("mixed_step",),
)
_NEW, _RUNS = MIXED.requests
BEHIND_MIXED = {
    "its end": MIXED,
    "a round": msgspec.structs.replace(MIXED, requests=(_NEW, msgspec.structs.replace(_RUNS, max_new_tokens=6))),
    "another mixed step": msgspec.structs.replace(
        MIXED,
        requests=(
            _NEW,
            msgspec.structs.replace(_RUNS, max_new_tokens=6),
            Request(id="c", prompt=(7, 5), max_new_tokens=1, arrive=2),
        ),
    ),
}
NOT_PUT_THERE = Edit(
    target=f"{RESULTS}.process_batch_result_prefill",
    match="elif not batch.decoding_reqs or req not in batch.decoding_reqs:",
    replacement="elif False:",
)


@pytest.mark.parametrize("case", spread(BEHIND_MIXED.values()), ids=BEHIND_MIXED)
def test_with_overlap_a_mixed_step_begins_before_the_prefill_s_rows_are_put_into_the_cache(
    overlapped: Host, tmp_path: Path, case: Case
) -> None:
    """And not without."""
    for host, name in ((overlapped, "overlap"), (overlapped.beside(mode=CPU), "no overlap")):
        (tmp_path / name).mkdir()
        verdict = judge(host.engine(case).run(case, tmp_path / name))
        assert verdict.status == "equal", (name, verdict)


@pytest.mark.parametrize("behind", ["a round", "another mixed step"])
def test_with_overlap_rows_that_are_never_put_there_are_named_a_step_later(
    overlapped: Host, tmp_path: Path, behind: str
) -> None:
    patches = (Patch(name="planted", edits=(NOT_PUT_THERE,)),)
    case = BEHIND_MIXED[behind]
    verdict = judge(overlapped.engine(case, patches).run(case, tmp_path))
    assert (verdict.status, verdict.rule) == ("diverged", "radix.kept"), verdict
    assert verdict.first is not None
    assert (verdict.first.iteration, verdict.first.request) == (2, "b")
    assert (str(verdict.first.expected), str(verdict.first.actual)) == ("2", "0")


def test_without_overlap_they_are_named_in_the_mixed_step(run: Runner) -> None:
    _, verdict = run(BEHIND_MIXED["a round"], NOT_PUT_THERE)
    assert (verdict.status, verdict.rule) == ("diverged", "radix.kept"), verdict
    assert verdict.first is not None
    assert (verdict.first.iteration, verdict.first.request) == (1, "b")
