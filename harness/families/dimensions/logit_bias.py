"""Requests that add to their logits: a bias of some tokens, and a custom processor for all of them."""

from collections.abc import Iterator
from typing import Literal

from eagletwin.harness.core.case import Bias, Case, Processor, Request

from .dimension import Refusal, of_requests, st

BIASES = (-4.0, 3.0, 8.0, -100.0)
SEEDS = 16  # of processors


def _draw_biases(draw: st.DrawFn, _request: Request, vocabulary: int) -> tuple[Bias, ...]:
    drawn = draw(st.lists(st.tuples(st.integers(0, vocabulary - 1), st.sampled_from(BIASES)), max_size=8))
    return tuple(Bias(token=token, value=value) for token, value in sorted(dict(drawn).items()))


def _refusals(_case: Case, request: Request) -> Iterator[Refusal]:
    if len({bias.token for bias in request.logit_bias}) < len(request.logit_bias):
        yield ": two entries of logit_bias for one token", "add them up"


def _draw_processor(draw: st.DrawFn, _request: Request, _vocabulary: int) -> Processor | None:
    kind: Literal["add", "forbid"] = draw(st.sampled_from(("add", "forbid")))
    processor = Processor(kind=kind, seed=draw(st.integers(0, SEEDS - 1)))
    return processor if draw(st.integers(0, 3)) else None


DIMENSIONS = (
    of_requests(
        "logit_bias",
        "biased logits",
        row='`[{"token": 5, "value": -4}]`: added to logits | -100–100, 64 tokens',
        key="logit-bias",
        size=len,
        example=(Bias(token=0, value=BIASES[0]),),
        draw=_draw_biases,
        refuses=_refusals,
    ),
    of_requests(
        "processor",
        "logit processors",
        key="processor",
        example=Processor(),
        draw=_draw_processor,
        kind=True,
        argument="enable_custom_logit_processor",
    ),
)
