"""Rounds deserved are rounds used, healthy and with bugs that cost drafts; and why no draft of a recording is compared."""

from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from eagletwin.cases.ledger import LEDGER
from eagletwin.harness.core.case import Case, Event, Request, Sampling
from eagletwin.harness.core.recording import RecordedServer, RecordingComparison
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.deserved.conditions import Seen, why_untold
from eagletwin.harness.deserved.follow import Shape
from eagletwin.harness.deserved.precision import Pair, load_pair, load_served
from eagletwin.harness.deserved.recorded import compare_recording
from eagletwin.harness.deserved.rounds import Compared, compare, possible_cuts
from eagletwin.harness.deserved.server import Answer, Sent
from eagletwin.harness.engines.host import Host
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.dimensions.dimension import tokens
from eagletwin.harness.families.store import checkpoints
from eagletwin.harness.judge.judge import judge
from eagletwin.harness.judge.replay import replay_requests

from ..deserved.fake_server import STARTED
from ..rows import long, spread
from .recorded import integers_of

# Rounds deserved are rounds used: SGLang's worker on the CPU engine, healthy and with bugs that cost drafts.


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
            tokens=tuple(replay.tokens)[len(prompts[name]) :],
            rounds=len(replay.rounds),
            starts=tuple(round.committed for round in replay.rounds),
            accepted=None,
            cached=len(prompts[name]) - 1 if name.startswith("turn") else 0,  # at most
            finish="length",
        )
        for name, replay in replay_requests(trace, "slot_layout").items()
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


@pytest.mark.parametrize(("model", "shape"), spread(SHAPES, lambda row: row[1].topk > 1, lambda row: "mtp" in row[0]))
def test_a_healthy_worker_uses_the_rounds_that_are_deserved(host: Host, tmp_path: Path, model: str, shape: Shape) -> None:
    case = case_of(model, shape)
    trace = host.engine(case, ()).run(case, tmp_path, fresh=False)
    found = compared(trace, shape)
    assert len(found) == len(case.requests)
    assert sum(one.used for one in found) > len(found)
    for one in found:
        assert one.equal, one
        assert one.deserved.fewest <= one.used <= one.deserved.most


@pytest.mark.long
@pytest.mark.parametrize("model", [*long("llama-mtp"), "llama-mtp-chain"])
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


def untold_of(trace: Trace) -> list[bool]:
    """Of its answers, as if all had been sent at once, which cannot be told."""
    case, not_looked_at = trace.header.case, cast("Any", None)
    seen = [Seen(Sent(number, "together", one), not_looked_at) for number, one in enumerate(answers(trace))]
    started = replace(STARTED, chunk=case.chunked_prefill_size, page_size=case.page_size)
    return [why is not None for why in why_untold(seen, case.num_steps, started)]


STEM = tokens(97, 12, 64)
LONGER = (41, 55, 43, 35, 20, 59, 10, 48, 26, 17, 34, 59, 34, 28, 4, 13, 3, 34, 46, 31, 28, 22, 49, 12, 29, 25, 27, 23)
# What begins alike, and how it is read: (steps, chunk, prompts, when each comes, of which recordings say what was drafted)
ALIKE = {
    "parting": (3, 64, [(*STEM, *tokens(n, 2 + n, 64)) for n in range(5)], (0, 40, 80, 120, 160), {"r0"}),
    "twice": (3, 2, [(18, 17), (18, 17), (15, 9, 3, 47, 28, 8, 35, 57, 20)], (1, 30, 0), {"r0", "r2"}),
    "longer": (4, 11, [LONGER[:9], LONGER], (0, 0), {"r0"}),
}


@pytest.mark.parametrize("name", spread(ALIKE))
def test_what_rests_on_rows_of_others_is_untold_and_all_else_is_equal(host: Host, tmp_path: Path, name: str) -> None:
    """A healthy worker: over HTTP, and in what a server would have recorded of each request."""
    steps, chunk, prompts, arrive, told = ALIKE[name]
    healthy, shape, pair = LEDGER["multi-layer-chunk-tail-3"].remedy, Shape(steps, 1, steps + 1), pair_of("llama-mtp")
    assert healthy is not None
    case = case_of("llama-mtp", shape, chunk)
    requests = tuple(
        Request(id=f"r{n}", prompt=prompt, max_new_tokens=16, arrive=at)
        for n, (prompt, at) in enumerate(zip(prompts, arrive, strict=True))
    )
    engine = replace(case.engine, sglang=replace(case.engine.sglang, radix_cache=True))
    case = replace(case, requests=requests, engine=engine)
    trace = host.engine(case, (healthy,)).run(case, tmp_path, fresh=False)
    assert judge(trace).status == "equal"
    ways = [possible_cuts("together", len(one.prompt), chunk, steps) for one in answers(trace)]
    equal = [
        compare(pair, shape, one, pair.read((*one.prompt, *one.tokens)), those).equal
        for one, those in zip(answers(trace), ways, strict=True)
    ]
    assert all(is_equal or cannot for is_equal, cannot in zip(equal, untold_of(trace), strict=True)), equal
    assert all(equal) == (name == "twice")  # else there were nothing to leave out
    said = RecordedServer(recording=2, engine=trace.header.engine, arguments={}, launch="")
    weighed = {one.header.case.requests[0].id: compare_recording(pair, one, said, altered=False) for one in integers_of(trace)}
    assert not any(one.divergences for one in weighed.values())
    assert {request for request, one in weighed.items() if one.checked["draft.proposal"]} == told
    causes = {request: one.untold.cause for request, one in weighed.items() if one.untold is not None}
    assert causes == dict.fromkeys(weighed.keys() - told, "rows of another request")


@pytest.mark.long
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
    case = replace(first, requests=(*first.requests, *turns), engine=replace(first.engine, sglang=server))
    trace = host.engine(case, ()).run(case, tmp_path, fresh=False)
    untold = untold_of(trace)
    # Each but the first, which has one token, may have been given rows of the next turn as well; two are unlike all others.
    assert untold == [False, *[True] * 4, False, False, *[True] * 5]
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


@pytest.mark.parametrize(("bug", "model", "shape", "chunk"), spread(LOSING, lambda row: "mtp" in row[1]))
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


# Why no draft of a recording is compared with its checkpoints: each cause is named, and what can be compared is.


CHAIN, TREE = Shape(3, 1, 4), Shape(3, 2, 6)


def recordings(
    host: Host, folder: Path, model: str, shape: Shape, *events: Event, new_tokens: int = 24, arrive: int | None = None
) -> list[Trace]:
    """Of a healthy worker: what a server would have recorded of each request."""
    case = case_of(model, shape)
    requests = tuple(
        replace(request, max_new_tokens=new_tokens, arrive=request.arrive if arrive is None else arrive)
        for request in case.requests
    )
    case = replace(case, requests=requests, events=events)
    return list(integers_of(host.engine(case, ()).run(case, folder, fresh=False)))


def weighed(pair: Pair, those: list[Trace], **arguments: str) -> list[RecordingComparison]:
    said = RecordedServer(recording=2, engine=those[0].header.engine, arguments=arguments, launch="")
    return [compare_recording(pair, one, said, altered=False) for one in those]


def causes(those: list[RecordingComparison]) -> set[str]:
    """Why none of the drafts was compared; "": some were."""
    for one in those:
        assert (one.untold is None) == bool(one.checked["draft.proposal"])
    return {"" if one.untold is None else one.untold.cause for one in those}


@pytest.mark.parametrize(("shape", "cause"), spread([(CHAIN, ""), (TREE, "a round lost")]))
def test_a_round_that_a_retraction_lost_is_untold_of_a_tree(host: Host, tmp_path: Path, shape: Shape, cause: str) -> None:
    found = weighed(pair_of("llama-tiny"), recordings(host, tmp_path, "llama-tiny", shape, Event(at=3, kind="retract")))
    assert cause in causes(found)
    assert not any(one.divergences for one in found)


@pytest.mark.parametrize(("model", "shape"), [("llama-tiny", TREE), ("llama-mtp", CHAIN)])
def test_a_token_that_a_second_prefill_gave_is_no_draft_that_the_last_round_accepted(
    host: Host, tmp_path: Path, model: str, shape: Shape
) -> None:
    """A request is retracted, prefilled again and over by that: no round follows that would show the gap."""
    those = recordings(host, tmp_path, model, shape, Event(at=3, kind="retract"), new_tokens=3, arrive=0)
    found = weighed(pair_of(model), those)
    assert "a round lost" in causes(found)
    assert not any(one.divergences for one in found)


@pytest.mark.parametrize(("steps", "dtype"), spread([(3, "float32"), (1, "bfloat16")]))
def test_trees_of_several_layers_are_untold(host: Host, tmp_path: Path, steps: int, dtype: str) -> None:
    target, draft = map(str, checkpoints("llama-mtp"))
    pair = load_served(target, draft, replace(STARTED, dtype=dtype), "cpu")
    found = weighed(pair, recordings(host, tmp_path, "llama-mtp", Shape(steps, 2, steps + 1))[:1])
    assert causes(found) == {"trees of several layers"}
    assert all(one.checked["verify.accept"] for one in found)


def test_drafts_that_were_drawn_by_chance_are_untold(host: Host, tmp_path: Path) -> None:
    greedy = recordings(host, tmp_path, "llama-tiny", CHAIN)
    drawn = [as_if_sampled(one) for one in greedy]
    pair = pair_of("llama-tiny")
    assert causes(weighed(pair, drawn, speculative_use_rejection_sampling="True")) == {"drawn by chance"}
    assert causes(weighed(pair, drawn, speculative_use_rejection_sampling="False")) == {""}
    assert causes(weighed(pair, greedy, speculative_use_rejection_sampling="True")) == {""}


def as_if_sampled(trace: Trace) -> Trace:
    case = trace.header.case
    requests = tuple(replace(request, sampling=Sampling(temperature=0.8)) for request in case.requests)
    return Trace(replace(trace.header, case=replace(case, requests=requests)), trace.tensors)


@pytest.mark.parametrize(("steps", "cause"), spread([(3, "16 bits"), (1, "")]))
def test_layers_that_are_fed_drafts_are_untold_in_16_bits(host: Host, tmp_path: Path, steps: int, cause: str) -> None:
    """One layer that proposes is fed none: of it all can be told."""
    target, draft = map(str, checkpoints("llama-mtp"))
    pair = load_served(target, draft, replace(STARTED, dtype="bfloat16"), "cpu")
    those = recordings(host, tmp_path, "llama-mtp", Shape(steps, 1, steps + 1))
    assert causes(weighed(pair, those[:2])) == {cause}


def test_a_request_of_one_token_has_no_draft_and_its_token_is_compared(host: Host, tmp_path: Path) -> None:
    found = weighed(pair_of("llama-tiny"), recordings(host, tmp_path, "llama-tiny", CHAIN, new_tokens=1))
    assert causes(found) == {"no round"}
    assert {one.checked["verify.accept"] for one in found} == {1}


def test_choices_that_near_ties_leave_open_are_counted_of_a_tree(host: Host, tmp_path: Path) -> None:
    """With a band as wide as a logit, each round is open."""
    pair = pair_of("llama-tiny")
    [one, *_] = weighed(
        Pair(pair.target, pair.draft, pair.of_target, pair.of_draft, tie=1.0),
        recordings(host, tmp_path, "llama-tiny", TREE)[3:],
    )
    assert 0 < one.open <= one.checked["draft.proposal"]
