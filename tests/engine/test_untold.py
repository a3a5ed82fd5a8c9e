"""Why no draft of a recording is compared with its checkpoints: each cause is named, and what can be compared is."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from eagletwin.harness.core.case import Event, Sampling
from eagletwin.harness.core.recording import RecordedServer, Weighed
from eagletwin.harness.core.trace import Trace
from eagletwin.harness.deserved.follow import Shape
from eagletwin.harness.deserved.pair import Pair, load_served
from eagletwin.harness.deserved.recorded import weigh
from eagletwin.harness.engines.host import Host
from eagletwin.harness.families.store import checkpoints

from ..deserved.started import STARTED
from ..rows import spread
from .recorded import integers_of
from .test_acceptance import case_of, pair_of

pytestmark = pytest.mark.slow

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


def weighed(pair: Pair, those: list[Trace], **arguments: str) -> list[Weighed]:
    said = RecordedServer(recording=2, engine=those[0].header.engine, arguments=arguments, launch="")
    return [weigh(pair, one, said, altered=False) for one in those]


def causes(those: list[Weighed]) -> set[str]:
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
