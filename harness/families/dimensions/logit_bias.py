"""Requests that add to the logits of some tokens."""

from collections.abc import Iterator

from eagletwin.harness.core.case import Bias, Case, Request

from .dimension import Refusal, of_requests, st

BIASES = (-4.0, 3.0, 8.0, -100.0)


def _draw(draw: st.DrawFn, _request: Request, vocabulary: int) -> tuple[Bias, ...]:
    drawn = draw(st.lists(st.tuples(st.integers(0, vocabulary - 1), st.sampled_from(BIASES)), max_size=8))
    return tuple(Bias(token=token, value=value) for token, value in sorted(dict(drawn).items()))


def _refusals(_case: Case, request: Request) -> Iterator[Refusal]:
    if len({bias.token for bias in request.logit_bias}) < len(request.logit_bias):
        yield ": two entries of logit_bias for one token", "add them up"


DIMENSION = of_requests(
    "logit_bias",
    "biased logits",
    row='`[{"token": 5, "value": -4}]`: added to logits | -100–100, 64 tokens',
    key="logit-bias",
    size=len,
    example=(Bias(token=0, value=BIASES[0]),),
    draw=_draw,
    refuses=_refusals,
)
