"""What an answer says beside its tokens (output.finish, output.counts, output.stream), on the real scheduler."""

import pytest
from msgspec.structs import replace

from eagletwin.harness.core.case import Event, Request
from eagletwin.harness.core.patch import Edit
from eagletwin.harness.core.records import Finish
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.engines.host import Host
from eagletwin.harness.judge.judge import judge

from ..rows import spread
from .asked import PROMPT, answered
from .conftest import Runner

# a: its length; b: a stop token, in the middle of an accepted path, after a cached page; c: an abort. a, c: retracted
CASE = answered(
    "answers",
    {},
    {},
    Request(id="c", prompt=PROMPT, max_new_tokens=12, arrive=7, stream=True),
    events=(Event(at=12, kind="abort", request="c"),),
)

REQUEST = "sglang.srt.managers.schedule_batch.Req"
RESOLVE = (
    "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor._resolve_spec_v2_tokens"
)
ACCEPT = "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept"
PREPARE = "sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_extend"

PLANTED = {
    "cached tokens of each chunk, and not of the first alone": (
        Edit(target=PREPARE, match="req.already_computed = seq_len", replacement="pass"),
        "output.counts",
    ),
    "the bonus token is an accepted draft": (
        Edit(
            target=RESOLVE,
            match="req.spec_num_correct_drafts += num_correct_drafts",
            replacement="req.spec_num_correct_drafts += num_correct_drafts + 1",
        ),
        "output.counts",
    ),
    "the verify count begins anew after a retraction": (
        Edit(
            target=f"{REQUEST}.reset_for_retract",
            match="self.prefix_len = 0",
            replacement="self.prefix_len = self.spec_verify_ct = 0",
        ),
        "output.counts",
    ),
    "a round that accepts no draft is in no histogram": (
        Edit(
            target=f"{REQUEST}.update_spec_correct_drafts_histogram",
            match="self.spec_correct_drafts_histogram[num_correct_drafts] += 1",
            replacement="self.spec_correct_drafts_histogram[num_correct_drafts] += num_correct_drafts > 0",
        ),
        "output.counts",
    ),
    "the first token of the path is the matched one": (
        Edit(
            target=f"{REQUEST}._check_token_based_finish",
            match="FINISH_MATCHED_TOKEN(matched=token_id)",
            replacement="FINISH_MATCHED_TOKEN(matched=new_accepted_tokens[0])",
        ),
        "output.finish",
    ),
    "a stop is a length": (
        Edit(
            target=f"{REQUEST}._check_token_based_finish",
            match="FINISH_MATCHED_TOKEN(matched=token_id)",
            replacement="FINISH_LENGTH(length=self.sampling_params.max_new_tokens)",
        ),
        "output.finish",
    ),
    "a length is that of what was committed": (
        Edit(
            target=f"{REQUEST}.update_finish_state",
            match="length=self.sampling_params.max_new_tokens",
            replacement="length=len(self.output_ids)",
        ),
        "output.finish",
    ),
    "the detokenizer lacks the first id of each message": (
        Edit(
            target=ACCEPT,
            match="decode_ids[req.send_decode_id_offset :]",
            replacement="decode_ids[req.send_decode_id_offset + 1 :]",
        ),
        "output.stream",
    ),
    "after a retraction the detokenizer gets all ids again": (
        Edit(
            target=f"{REQUEST}.reset_for_retract",
            match="self.prefix_len = 0",
            replacement="self.prefix_len = self.send_decode_id_offset = 0",
        ),
        "output.stream",
    ),
    "tokens wait for another step": (
        Edit(target=ACCEPT, match="req.sampling_params.stream_interval or self.default_stream_interval", replacement="2"),
        "output.stream",
    ),
}


@pytest.fixture(scope="module")
def answered(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return host.engine(CASE).run(CASE, tmp_path_factory.mktemp("answers"))


def test_every_end(answered: Trace) -> None:
    verdict = judge(answered)
    assert verdict.status == "equal", verdict
    ends = {record.request: record.numbers for record in answered.header.records if record.stage == "finished"}
    assert {name: numbers["finish"] for name, numbers in ends.items()} == {
        "a": Finish.LENGTH,
        "b": Finish.STOP,
        "c": Finish.ABORT,
    }
    assert ends["b"]["cached_tokens"] == 4
    assert {name: numbers["retractions"] for name, numbers in ends.items()} == {"a": 1, "b": 0, "c": 1}


def test_a_streamed_request_of_no_new_tokens_is_sent_its_end_alone(run: Runner) -> None:
    case = replace(CASE, requests=(*CASE.requests[:2], replace(CASE.requests[2], max_new_tokens=0)), events=())
    trace, verdict = run(case)
    assert verdict.status == "equal", verdict
    number, record = next(
        (number, record)
        for number, record in enumerate(trace.header.records)
        if (record.stage, record.request) == ("finished", "c")
    )
    assert record.numbers["finish"] == Finish.LENGTH
    assert trace.array(number, "sent").reshape(-1, 3)[:, 0].tolist() == [0]


@pytest.mark.parametrize("fault", spread(sorted(PLANTED), lambda fault: PLANTED[fault][-1]))
def test_a_fault_is_named(run: Runner, fault: str) -> None:
    edit, rule = PLANTED[fault]
    trace, verdict = run(CASE, edit)
    assert (verdict.status, verdict.rule) == ("diverged", rule), (verdict, trace.header.ending)
    assert judge(trace, frozenset({rule})).status == "equal"
