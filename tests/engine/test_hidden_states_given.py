"""The hidden states that a request is given (output.hidden), on the real scheduler with the candidate fixes of live bugs."""

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.case import Case, EngineSettings, Request, Sampling, SGLangSettings
from eagletwin.harness.core.patch import Edit, Patch
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.engines.host import Host
from eagletwin.harness.judge.judge import judge

from ..rows import spread
from .asked import PROMPT, answered
from .changes import Change, bump, changed, first, lengthen, nan, percent
from .conftest import Runner

# a: in chunks, streamed, retracted; b: behind a cached page; c: its last alone, it samples; d: none
CASE = answered(
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
PLANTED: dict[str, tuple[Case, tuple[Edit, ...]]] = {
    "of a round one row alone": (
        CASE,
        (*ROWS, Edit(target=DECODE, match=MANY, replacement="hidden_states[start : start + 1]")),
    ),
    "of the row behind the token": (
        CASE,
        (*ROWS, Edit(target=DECODE, match=MANY, replacement="hidden_states[start + 1 : start + 1 + accept_len]")),
    ),
    "of another request of the batch": (
        CASE,
        (*ROWS, Edit(target=f"{RESULTS}.process_batch_result_decode", match="start = i * stride", replacement="start = i")),
    ),
    "of the last round all, past the request's end": (
        CASE,
        (
            *ROWS,
            Edit(
                target="sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept",
                match="hs = hs[: req.finished_len]",
                replacement="pass",
            ),
        ),
    ),
    "of the last chunk alone (live)": (CASE, ROWS[1:]),
    "a list after a retraction (live)": (CASE, ROWS[:1]),
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
    [(CASE, ROWS), (LAST, ()), (tree("llama-tiny"), ()), (tree("llama-eagle3"), _fix("hidden-aux"))],
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
    "fault", spread(sorted(PLANTED), lambda fault: PLANTED[fault][0].name, lambda fault: "(live)" in fault)
)
def test_a_fault_is_named(run: Runner, fault: str) -> None:
    case, edits = PLANTED[fault]
    trace, verdict = run(replace(case, exercises=()), *edits)
    assert (verdict.status, verdict.rule) == ("diverged", "output.hidden"), (verdict, trace.header.ending)
    assert judge(trace, frozenset({"output.hidden"})).status == "equal"


@pytest.mark.parametrize(("tensor", "change"), CHANGES)
def test_one_changed_number_is_found(given: Trace, tensor: str, change: Change) -> None:
    number = _ended(given, "a")
    verdict = judge(changed(given, {f"{number}.{tensor}": change(given.tensor(number, tensor))}))
    assert (verdict.status, verdict.rule) == ("diverged", "output.hidden"), verdict
