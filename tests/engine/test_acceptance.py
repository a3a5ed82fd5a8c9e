"""Rounds deserved are rounds used: SGLang's worker on the CPU engine, healthy and with bugs that cost drafts."""

from functools import lru_cache
from pathlib import Path

import pytest

from eagletwin.cases.regressions import LEDGER
from eagletwin.cases.strategies import tokens
from eagletwin.harness.core.case import Case, Request
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.deserved.compare import Compared, compare
from eagletwin.harness.deserved.follow import Shape
from eagletwin.harness.deserved.pair import Pair, load_pair
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


def compared(trace: Trace, shape: Shape) -> list[Compared]:
    """Of each request: what the trace did, as a server would have told it, beside what the pair deserves."""
    pair, found = pair_of(trace.header.case.model), []
    prompts = {request.id: request.prompt for request in trace.header.case.requests}
    for name, story in stories(trace, "slot_layout").items():
        text = tuple(story.tokens)
        answer = Answer(
            prompt=prompts[name],
            tokens=text[len(prompts[name]) :],
            rounds=len(story.rounds),
            starts=tuple(round.committed for round in story.rounds),
            accepted=None,
            cached=0,
            finish="length",
        )
        found.append(compare(pair, shape, answer, pair.read(text)))
    return found


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
