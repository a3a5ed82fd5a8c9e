"""Cases that sample: drawn like any other (strategies.py), and then each request samples in one of a few ways, or is greedy.

Drawn only where they are asked for, so that what is drawn elsewhere stays as it is. Retractions can be left out: with overlap
they lose a round that is drawn again with other coins, and what the lost one committed has no reference then.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, Literal

import msgspec
from hypothesis import strategies as st

from eagletwin.harness.case import Case, EngineSettings, Request, Sampling
from eagletwin.harness.models.recipes import RECIPES

from .strategies import MAX_REQUESTS, Focus, cases

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


def rejects(focus: Focus, **changed: Any) -> Focus:
    """The configuration with what rejection sampling must have: a chain, and a draft of the target's vocabulary."""
    own = RECIPES[focus.model].draft_vocab_size is not None
    return replace(focus, topk=1, model="llama-tiny" if own else focus.model, **changed)


Kind = Literal["target", "rejection", "any"]


def searched(kind: Kind, *, retract: bool) -> Callable[..., st.SearchStrategy[Case]]:
    """For a search: what draws cases of a focus, with the fields of it that are held."""

    def draws(focus: Focus, held: Collection[str] = ()) -> st.SearchStrategy[Case]:
        rejection = None if kind == "any" else kind == "rejection"
        return sampling_cases(rejects(focus) if rejection else focus, held=held, rejection=rejection, retract=retract)

    return draws


@st.composite
def sampling_cases(
    draw: st.DrawFn,
    focus: Focus | None = None,
    *,
    held: Collection[str] = (),
    rejection: bool | None = None,
    greedy: bool = True,
    retract: bool = True,
    max_requests: int = MAX_REQUESTS,
) -> Case:
    """A valid case of which at least one request samples.

    rejection  whether the draft samples too; None: either, where it may
    greedy     whether some requests may be greedy
    retract    whether requests may be retracted (by an event; a small pool does it as well)
    """
    case = draw(cases(focus, held=held, max_requests=max_requests))
    may = case.topk == 1 and RECIPES[case.model].draft_vocab_size is None
    rejected = may and (draw(st.booleans()) if rejection is None else rejection)
    ways = [draw(samplings(greedy)) for _ in case.requests]
    if all(way is None for way in ways):
        ways[0] = Sampling()
    requests: tuple[Request, ...] = tuple(
        msgspec.structs.replace(request, sampling=way) for request, way in zip(case.requests, ways, strict=True)
    )
    settings = msgspec.structs.replace(case.engine.sglang, rejection_sampling=rejected, random_seed=draw(st.integers(0, 255)))
    events = tuple(event for event in case.events if retract or event.kind != "retract")
    return msgspec.structs.replace(case, requests=requests, events=events, engine=EngineSettings(sglang=settings))
