"""What requests are sent beside their tokens, and the hidden states that a worker hands to its draft."""

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from eagletwin.cases.ledger import LEDGER, remedies_of
from eagletwin.harness.core.case import Case, EngineSettings, Event, Request, Sampling, SGLangSettings
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.records import Finish
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.engines.host import Host
from eagletwin.harness.families import RECIPES, runs_on
from eagletwin.harness.families.weights import model_pair
from eagletwin.harness.judge.bounds import FLOAT32
from eagletwin.harness.judge.experts import Ties
from eagletwin.harness.judge.judge import judge
from eagletwin.harness.judge.replay import replay_requests
from eagletwin.reference.llama import target_rows

from ..rows import spread
from .asked import PROMPT, answered
from .changes import Change, bump, changed, first, lengthen, nan, percent
from .conftest import Runner

# What an answer says beside its tokens (output.finish, output.counts, output.stream), on the real scheduler.


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
def answers(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return host.engine(CASE).run(CASE, tmp_path_factory.mktemp("answers"))


def test_every_end(answers: Trace) -> None:
    verdict = judge(answers)
    assert verdict.status == "equal", verdict
    ends = {record.request: record.numbers for record in answers.header.records if record.stage == "finished"}
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


# The hidden states that a request is given (output.hidden), on the real scheduler with the candidate fixes of live bugs.


# a: in chunks, streamed, retracted; b: behind a cached page; c: its last alone, it samples; d: none
HIDDEN_CASE = answered(
    "hidden-states",
    {"hidden_states": "all"},
    {"hidden_states": "all"},
    Request(id="c", prompt=PROMPT, max_new_tokens=8, arrive=7, sampling=Sampling(temperature=0.7), hidden_states="last"),
    Request(id="d", prompt=PROMPT[3:], max_new_tokens=5, arrive=7),
    exercises=("states_of_path", "states_of_chunks", "radix_hit", "retraction_in_decode", "early_stop"),
)
LAST = Case(  # SGLang is started for the last ones alone
    name="last-hidden-states",
    model="llama-tiny",
    num_steps=3,
    chunked_prefill_size=8,
    requests=tuple(
        Request(id=name, prompt=PROMPT[n:], max_new_tokens=6 + n, stream=True, hidden_states="last")
        for n, name in enumerate("ab")
    ),
    exercises=("states_of_path",),
)

EARLY = Case(  # its second sample is retracted before the token of its prefill was counted: it is sent messages of no tokens
    name="early-hidden-states",
    model="llama-tiny",
    num_steps=1,
    topk=3,
    page_size=16,
    requests=(Request(id="b", prompt=tuple(range(7, 40)), max_new_tokens=2, hidden_states="all", n=2),),
    chunks=(16, 32, 64),
    exercises=("states_of_chunks", "retraction"),
    engine=EngineSettings(sglang=SGLangSettings(max_total_tokens=272)),
)


def tree(model: str) -> Case:
    requests = tuple(Request(id=name, prompt=PROMPT[n:], max_new_tokens=9, hidden_states="all") for n, name in enumerate("ab"))
    return Case(
        name="hidden-states-of-a-tree",
        model=model,
        num_steps=2,
        topk=4,
        num_draft_tokens=8,
        requests=requests,
        exercises=("states_of_path", "path_not_in_front"),
    )


def _ended(trace: Trace, request: str) -> int:
    return next(n for n, record in enumerate(trace.header.records) if (record.stage, record.request) == ("finished", request))


def _one_more(counts: Tensor) -> Tensor:
    return counts + torch.eye(len(counts), dtype=counts.dtype)[0]


def _fix(name: str) -> tuple[Edit, ...]:
    remedy = LEDGER[name].remedy
    assert remedy is not None
    return remedy.edits


ROWS = _fix("hidden-rows")
RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
DECODE = f"{RESULTS}._append_decode_hidden_states"
MANY = "hidden_states[start : start + accept_len]"

# Fault -> the case, the edits.
HIDDEN_PLANTED: dict[str, tuple[Case, tuple[Edit, ...]]] = {
    "of a round one row alone": (
        HIDDEN_CASE,
        (*ROWS, Edit(target=DECODE, match=MANY, replacement="hidden_states[start : start + 1]")),
    ),
    "of the row behind the token": (
        HIDDEN_CASE,
        (*ROWS, Edit(target=DECODE, match=MANY, replacement="hidden_states[start + 1 : start + 1 + accept_len]")),
    ),
    "of another request of the batch": (
        HIDDEN_CASE,
        (*ROWS, Edit(target=f"{RESULTS}.process_batch_result_decode", match="start = i * stride", replacement="start = i")),
    ),
    "of the last round all, past the request's end": (
        HIDDEN_CASE,
        (
            *ROWS,
            Edit(
                target="sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept",
                match="hs = hs[: req.finished_len]",
                replacement="pass",
            ),
        ),
    ),
    "of the last chunk alone (live)": (HIDDEN_CASE, ROWS[1:]),
    "a list after a retraction (live)": (HIDDEN_CASE, ROWS[:1]),
    "the last of a round, whether or not the request ended before": (
        LAST,
        (Edit(target=DECODE, match="start + valid_accept_len - 1", replacement="start + accept_len - 1"),),
    ),
    "an EAGLE-3 head's layers (live)": (tree("llama-eagle3"), ()),
    "of the first nodes of a tree": (
        tree("llama-eagle3"),
        tuple(
            replace(edit, replacement=edit.match) if edit.target.endswith("run_eagle_verify") else edit
            for edit in _fix("hidden-aux")
        ),
    ),
}
CHANGES: list[tuple[str, Change]] = [
    ("given_hidden", percent),
    ("given_hidden", nan),
    ("given_widths", bump),
    ("given_entries", bump),
    ("given_counts", bump),
    ("given_counts", lengthen),
    ("last_hidden", percent),
    ("last_widths", bump),
]


@pytest.fixture(scope="module")
def given(host: Host, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    return host.engine(LAST).run(LAST, tmp_path_factory.mktemp("states"))


@pytest.mark.parametrize(
    ("case", "edits"),
    [(HIDDEN_CASE, ROWS), (LAST, ()), (tree("llama-tiny"), ()), (tree("llama-eagle3"), _fix("hidden-aux"))],
    ids=["chain", "last", "tree", "eagle3"],
)
def test_what_it_is_given_is_right(run: Runner, case: Case, edits: tuple[Edit, ...]) -> None:
    _, verdict = run(case, *edits)
    assert verdict.status == "equal", verdict
    assert verdict.checked["output.hidden"] > 10


@pytest.fixture(scope="module")
def early(overlapped: Host, tmp_path_factory: pytest.TempPathFactory) -> Trace:
    edits = (*ROWS, *_fix("hidden-no-tokens"))
    return overlapped.engine(EARLY, (Patch(name="fixes", edits=edits),)).run(EARLY, tmp_path_factory.mktemp("early"))


def test_a_message_of_no_tokens_may_hold_the_prompts(early: Trace) -> None:
    verdict = judge(early)
    assert verdict.status == "equal", verdict
    number = _ended(early, "b.2")
    sent, counts = early.array(number, "sent").reshape(-1, 3)[:, 0].tolist(), early.integers(number, "given_counts")
    assert sent[:-1] == [0] * (len(sent) - 1)
    assert (sent[-1], counts) == (2, [*[1] * (len(sent) - 1), 2])
    assert len(sent) > 1


@pytest.mark.parametrize(("tensor", "change"), [("last_hidden", first), ("last_hidden", nan), ("given_counts", _one_more)])
def test_and_nothing_else(early: Trace, tensor: str, change: Change) -> None:
    number = _ended(early, "b.2")
    verdict = judge(changed(early, {f"{number}.{tensor}": change(early.tensor(number, tensor))}))
    assert (verdict.status, verdict.rule) == ("diverged", "output.hidden"), verdict


@pytest.mark.parametrize(
    "fault", spread(sorted(HIDDEN_PLANTED), lambda fault: HIDDEN_PLANTED[fault][0].name, lambda fault: "(live)" in fault)
)
def test_a_fault_is_named_in_hidden(run: Runner, fault: str) -> None:
    case, edits = HIDDEN_PLANTED[fault]
    trace, verdict = run(replace(case, exercises=()), *edits)
    assert (verdict.status, verdict.rule) == ("diverged", "output.hidden"), (verdict, trace.header.ending)
    assert judge(trace, frozenset({"output.hidden"})).status == "equal"


@pytest.mark.parametrize(("tensor", "change"), CHANGES)
def test_one_changed_number_is_found(given: Trace, tensor: str, change: Change) -> None:
    number = _ended(given, "a")
    verdict = judge(changed(given, {f"{number}.{tensor}": change(given.tensor(number, tensor))}))
    assert (verdict.status, verdict.rule) == ("diverged", "output.hidden"), verdict


# The real worker feeds the hidden states that the recipe declares: it would diverge from a reference that fed the others.


@pytest.mark.parametrize(
    "name",
    sorted(
        name
        for name, recipe in RECIPES.items()
        if recipe.drafts == ("draft",)
        and recipe.reads_states
        and runs_on(recipe, "sglang")
        and recipe.target.compressed is None
    ),
)
def test_the_worker_feeds_the_target_states_that_the_recipe_declares_and_residual_draft_states(
    run: Runner, busy_case: Case, name: str
) -> None:
    case = msgspec.structs.replace(busy_case, model=name)
    if RECIPES[name].target.states:  # what a cached prefix keeps of states is not judged
        settings = msgspec.structs.replace(case.engine.sglang, radix_cache=False)
        case = msgspec.structs.replace(case, engine=msgspec.structs.replace(case.engine, sglang=settings))
    if page := RECIPES[name].page:
        longer = tuple(msgspec.structs.replace(one, prompt=one.prompt * 4) for one in case.requests)
        settings = msgspec.structs.replace(case.engine.sglang, max_total_tokens=16 * page)
        case = msgspec.structs.replace(case, page_size=page, chunked_prefill_size=page, requests=longer)
        case = msgspec.structs.replace(case, engine=msgspec.structs.replace(case.engine, sglang=settings))
    # a live bug that shows in all chains of a recipe
    mended = remedies_of(["dsa-draft-reads-worker"] if RECIPES[name].target.index is not None else [])
    trace, verdict = run(case, *(edit for patch in mended for edit in patch.edits))
    assert verdict.status == "equal"
    assert trace.header.fallbacks == ()  # no kernel of this family needs Triton's interpreter
    ties: Ties = "as the trace" if verdict.excused else None
    told, target = replay_requests(trace, "slot_layout", ties), model_pair(name).reference_target()
    seen = {"draft.extend": 0, "draft.decode": 0}
    for number, record in enumerate(trace.header.records):
        if record.stage == "draft.extend":
            replay, hidden = told[record.request], trace.array(number, "hidden_in")
            assert replay.target is not None
            rows = slice(record.step, record.step + len(hidden))
            assert FLOAT32.error_of(replay.target.hidden[rows], hidden).max() < 1
            other = target_rows(target, RECIPES[name].target, torch.tensor(replay.tokens[:-1])).residual.numpy()
            if RECIPES[name].target_hidden != "post_norm":  # the residual stream, but one layer later
                size = RECIPES[name].target.hidden_size
                other = np.concatenate([replay.target.hidden[:, size:], other], -1)
            assert FLOAT32.error_of(other[rows], hidden).min() > 100
            seen[record.stage] += 1
        if record.stage == "draft.decode" and record.step == 2:
            growth = told[record.request].growths[record.round]
            assert FLOAT32.error_of(growth.hidden[1], trace.array(number, "hidden_in")).max() < 1
            seen[record.stage] += 1
    assert min(seen.values()) > 2
