"""Rows that must lie in the prefix cache: `radix.kept`, by faults planted in the real worker."""

import pytest

from eagletwin.harness.core.case import Case, EngineSettings, Request, SGLangSettings
from eagletwin.harness.core.patch import Edit
from eagletwin.harness.engines.host import Host
from eagletwin.harness.judge.judge import judge

from .conftest import Runner

RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
REQUEST = "sglang.srt.managers.schedule_batch.Req"
CACHE = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
COMMON = "sglang.srt.mem_cache.common"

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


def test_what_requests_leave_is_in_the_cache(host: Host, tmp_path_factory: pytest.TempPathFactory) -> None:
    verdict = judge(host.engine(ENDING).run(ENDING, tmp_path_factory.mktemp("ending")))
    assert verdict.status == "equal", verdict
    assert verdict.checked["radix.kept"] > 0


@pytest.mark.parametrize("fault", PLANTED)
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
