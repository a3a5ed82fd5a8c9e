"""What requests of a drawn case ask for besides their tokens (strategies.py draws the case)."""

from collections.abc import Collection
from typing import Literal

import msgspec
from hypothesis import strategies as st

from eagletwin.harness.core.case import Case, EngineSettings, Request, Sampling
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.dimensions import DIMENSIONS
from eagletwin.harness.families.valid import admits

# How requests of a drawn case sample: each in one of a few ways, or not at all (strategies.py draws the case).
#
# Retractions can be left out: with overlap they lose a round that is drawn again with other coins, and what the lost one
# committed has no reference then.

Kind = Literal["target", "rejection", "any"]  # what samples: the target alone, the draft too, either

# Simplest first. Below a half, tokens that a float32 cannot tell apart from each other's cut become common.
TEMPERATURES = (1.0, 0.7, 0.5, 1.6, 3.0)
TOP_KS = (0, 0, 2, 8, 40)
TOP_PS = (1.0, 1.0, 0.9, 0.5)


def samplings(greedy: bool) -> st.SearchStrategy[Sampling | None]:
    """How a request samples; `greedy`: one in four does not."""
    drawn: st.SearchStrategy[Sampling | None] = st.builds(
        Sampling, temperature=st.sampled_from(TEMPERATURES), top_k=st.sampled_from(TOP_KS), top_p=st.sampled_from(TOP_PS)
    )
    # not one_of, which takes a strategy that is named three times for one
    return st.integers(0, 3).flatmap(lambda number: st.none() if number == 3 else drawn) if greedy else drawn


def sampled(draw: st.DrawFn, case: Case, *, rejection: bool | None, greedy: bool, retract: bool) -> Case:
    """This case with at least one request that samples.

    rejection  whether the draft samples too; None: either, where it may
    greedy     whether some requests may be greedy
    retract    whether requests may be retracted (by an event; a small pool does it as well)
    """
    may = case.topk == 1 and RECIPES[case.model].samples_drafts
    rejected = may and (draw(st.booleans()) if rejection is None else rejection)
    ways = [draw(samplings(greedy)) for _ in case.requests]
    if all(way is None for way in ways):
        ways[0] = Sampling()
    if case.engine.sglang.deterministic:  # coins are hashed from a request's own seed then
        ways = [way and msgspec.structs.replace(way, seed=draw(st.integers(0, 255))) for way in ways]
    requests: tuple[Request, ...] = tuple(
        msgspec.structs.replace(request, sampling=way) for request, way in zip(case.requests, ways, strict=True)
    )
    settings = msgspec.structs.replace(case.engine.sglang, rejection_sampling=rejected, random_seed=draw(st.integers(0, 255)))
    kept = tuple(event for event in case.events if retract or event.kind != "retract")
    return msgspec.structs.replace(case, requests=requests, events=kept, engine=EngineSettings(sglang=settings))


# What requests may ask for, each drawn only where it is asked for, after all the rest: in every block that a search draws
# without it, cases are the same. Simplest comes first: a request shrinks to one that asks for nothing.
ASKS = {name: dimension for name, dimension in DIMENSIONS.items() if dimension.draw or dimension.draw_case}


@st.composite
def asking(draw: st.DrawFn, cases: st.SearchStrategy[Case], asks: Collection[str]) -> Case:
    """A case of which each request may ask for each of these, names of ASKS."""
    case, wanted = draw(cases), [ASKS[name] for name in ASKS if name in asks]
    vocabulary, requests = RECIPES[case.model].target.vocab_size, list[Request]()
    for request in case.requests:
        if any(ask.of_prompt for ask in wanted) and draw(st.integers(0, 7)) == 7:
            request = msgspec.structs.replace(request, max_new_tokens=0)
        for ask in wanted:
            if ask.draw is not None:
                request = ask.put(request, ask.draw(draw, request, vocabulary))
        for settle in (ask.settle for ask in ASKS.values() if ask.settle is not None):
            request = settle(case, request, vocabulary)
        requests.append(request)
    case = msgspec.structs.replace(case, requests=tuple(requests))
    for ask in reversed(wanted):
        case = case if ask.draw_case is None else ask.draw_case(draw, case, admits)
    return case
