"""Rounds deserved are rounds used: SGLang's worker on the CPU engine, healthy and with bugs that cost drafts."""

from functools import lru_cache
from pathlib import Path

import pytest
from msgspec.structs import replace

from eagletwin.cases.regressions import LEDGER
from eagletwin.cases.tokens import tokens
from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.deserved.borrowed import began_on_drafts
from eagletwin.harness.deserved.compare import Compared, compare
from eagletwin.harness.deserved.cuts import possible_cuts
from eagletwin.harness.deserved.follow import Shape
from eagletwin.harness.deserved.pair import Pair, load_pair
from eagletwin.harness.deserved.sending import Sent
from eagletwin.harness.deserved.server import Answer
from eagletwin.harness.engines.host import Host
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.store import checkpoints
from eagletwin.harness.judge.story import stories

pytestmark = pytest.mark.slow


@lru_cache
def pair_of(model: str) -> Pair:
    target, draft = map(str, checkpoints(model))
    return load_pair(target, draft, "float32", "cpu")


def case_of(model: str, shape: Shape, chunk: int = 64) -> Case:
    """Seven requests with prompts of 1 to 30 tokens, of which two arrive later."""
    vocabulary = RECIPES[model].target.vocab_size
    sizes = (1, 2, 5, 9, 14, 22, 30)
    return Case(
        name="acceptance",
        model=model,
        num_steps=shape.num_steps,
        topk=shape.topk,
        num_draft_tokens=shape.num_draft_tokens if shape.topk > 1 else 0,
        chunked_prefill_size=chunk,
        requests=tuple(
            Request(id=f"r{n}", prompt=tokens(n, size, vocabulary), max_new_tokens=24, arrive=6 * (n > 4))
            for n, size in enumerate(sizes)
        ),
    )


def answers(trace: Trace) -> list[Answer]:
    """Of each request: what the trace did, as a server would have told it."""
    prompts = {request.id: request.prompt for request in trace.header.case.requests}
    return [
        Answer(
            prompt=prompts[name],
            tokens=tuple(story.tokens)[len(prompts[name]) :],
            rounds=len(story.rounds),
            starts=tuple(round.committed for round in story.rounds),
            accepted=None,
            cached=len(prompts[name]) - 1 if name.startswith("turn") else 0,  # at most
            finish="length",
        )
        for name, story in stories(trace, "slot_layout").items()
    ]


def compared(trace: Trace, shape: Shape) -> list[Compared]:
    """The same, beside what the pair deserves."""
    pair = pair_of(trace.header.case.model)
    return [compare(pair, shape, one, pair.read((*one.prompt, *one.tokens))) for one in answers(trace)]


SHAPES = [
    *(("llama-tiny", Shape(steps, 1, steps + 1)) for steps in (1, 3)),
    ("llama-gqa", Shape(3, 1, 4)),
    ("llama-gqa", Shape(4, 3, 12)),
    ("llama-tiny", Shape(2, 4, 8)),
    ("llama-eagle3-full", Shape(3, 1, 4)),
    ("llama-eagle3", Shape(4, 1, 5)),
    ("llama-eagle3", Shape(3, 2, 7)),
    ("llama-mtp", Shape(3, 1, 4)),
    ("llama-mtp-chain", Shape(4, 1, 5)),
]


@pytest.mark.parametrize(("model", "shape"), SHAPES)
def test_a_healthy_worker_uses_the_rounds_that_are_deserved(host: Host, tmp_path: Path, model: str, shape: Shape) -> None:
    case = case_of(model, shape)
    trace = host.engine(case, ()).run(case, tmp_path, fresh=False)
    found = compared(trace, shape)
    assert len(found) == len(case.requests)
    assert sum(one.used for one in found) > len(found)
    for one in found:
        assert one.equal, one
        assert one.deserved.fewest <= one.used <= one.deserved.most


@pytest.mark.parametrize("model", ["llama-mtp", "llama-mtp-chain"])
def test_what_layers_deserve_depends_on_where_chunks_end(host: Host, tmp_path: Path, model: str) -> None:
    """Arrivals decide where a prompt is cut, and by itself full chunks do. A healthy worker is equal if the cuts are told, and
    if each way to cut is thought of."""
    shape, chunk, layers = Shape(3, 1, 4), 8, 3
    cut = unequal = 0
    for number, sizes in enumerate([(9,), (10,), (17,), (18,), (5, 5), (6, 9, 7, 3), (5, 7, 10, 9, 4, 3), (3, 4, 2, 9, 4, 8)]):
        case = case_of(model, shape, chunk)
        requests = tuple(
            Request(id=f"r{n}", prompt=tokens(31 * number + n, size, 64), max_new_tokens=24) for n, size in enumerate(sizes)
        )
        case, folder = replace(case, requests=requests), tmp_path / str(number)
        folder.mkdir()
        healthy = LEDGER["multi-layer-chunk-tail-3"].remedy
        assert healthy is not None
        trace = host.engine(case, (healthy,)).run(case, folder, fresh=False)
        pair = pair_of(model)
        for request, answer in zip(requests, answers(trace), strict=True):
            text, size = pair.read((*answer.prompt, *answer.tokens)), len(answer.prompt)
            prefills = [record for record in trace.header.records if (record.request, record.stage) == (request.id, "prefill")]
            ends = [record.numbers["end"] for record in prefills if not record.numbers["final"]]
            near = tuple(end for end in ends if end + layers > size)
            possible = possible_cuts("alone" if len(sizes) == 1 else "together", size, chunk, layers)
            assert near in possible
            assert compare(pair, shape, answer, text, (near,)).equal, (sizes, request.id, near)
            assert compare(pair, shape, answer, text, possible).equal
            cut += bool(near)
            unequal += not compare(pair, shape, answer, text).equal
    assert cut > 5
    assert unequal > 0  # else it made no difference


def test_what_cannot_be_told_is_an_answer_that_began_on_drafts_of_another(host: Host, tmp_path: Path) -> None:
    """A healthy worker whose layers meet the refused drafts of an earlier answer, as the next turn of a chat does."""
    shape, first = Shape(3, 1, 4), case_of("llama-mtp-chain", Shape(3, 1, 4))
    (tmp_path / "first").mkdir()
    said = answers(host.engine(first, ()).run(first, tmp_path / "first", fresh=False))[:5]
    turns = tuple(
        Request(id=f"turn{number}", prompt=(*one.prompt, *one.tokens[: 6 + 2 * number], 3, 4, 5), max_new_tokens=16, arrive=60)
        for number, one in enumerate(said)
    )
    server = replace(first.engine.sglang, radix_cache=True)
    case = replace(first, requests=(*first.requests[:5], *turns), engine=replace(first.engine, sglang=server))
    trace = host.engine(case, ()).run(case, tmp_path, fresh=False)
    untold = began_on_drafts([Sent(number, "together", one) for number, one in enumerate(answers(trace))], layers=3)
    assert untold == [False] * 5 + [True] * 5
    equal = [one.equal for one in compared(trace, shape)]
    assert all(one for one, cannot in zip(equal, untold, strict=True) if not cannot)
    assert not all(equal)  # else there were nothing to leave out


# (ledger entry, what is undone; None: it is live; model, shape, chunk size)
LOSING = [
    ("25015", "llama-tiny", Shape(5, 1, 6), 64),
    ("26329", "llama-tiny", Shape(3, 1, 4), 8),
    ("26997-hidden", "llama-tiny", Shape(2, 4, 8), 64),
    ("multi-layer-chunk-tail-3", "llama-mtp-chain", Shape(3, 1, 4), 8),
]


@pytest.mark.parametrize(("bug", "model", "shape", "chunk"), LOSING)
def test_a_bug_that_costs_drafts_is_found_where_the_ledger_says(
    host: Host, tmp_path: Path, bug: str, model: str, shape: Shape, chunk: int
) -> None:
    entry, case = LEDGER[bug], case_of(model, shape, chunk)
    patches = () if entry.revert is None else (entry.revert,)
    trace = host.engine(case, patches).run(case, tmp_path, fresh=False)
    found = compared(trace, shape)
    lost = [one for one in found if not one.equal]
    assert lost  # a wrong draft of a random pair is as often right by chance as it costs a round
    assert entry.loses is not None
    if entry.loses.condition == "prompts longer than a chunk":
        sizes = [len(request.prompt) for request in case.requests]
        assert all(one.equal for one, size in zip(found, sizes, strict=True) if size <= chunk)
