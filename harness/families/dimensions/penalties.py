"""Penalties on tokens that a request was sent already."""

from eagletwin.harness.core.case import Penalties, Request

from .dimension import of_requests, st

PENALTIES = (0.0, 2.0, -2.0, 0.7)  # of frequency and of presence; a negative one makes repetitions more likely
REPETITIONS = (1.0, 2.0, 1.3, 0.5)


def _draw(draw: st.DrawFn, _request: Request, _vocabulary: int) -> Penalties | None:
    wanted = Penalties(
        frequency=draw(st.sampled_from(PENALTIES)),
        presence=draw(st.sampled_from(PENALTIES)),
        repetition=draw(st.sampled_from(REPETITIONS)),
    )
    return wanted if draw(st.integers(0, 3)) else None


def _alone(request: Request) -> bool:
    """Whether penalties are all that changes its logits."""
    others = request.grammar, request.logit_bias, request.processor, request.min_new_tokens
    return request.penalties is not None and not any(others)


DIMENSION = of_requests(
    "penalties",
    "penalties",
    row='`{"frequency": 0.7}`: changes logits of sent tokens; absent: none |',
    key="penalties",
    example=Penalties(),
    draw=_draw,
    kinds={"penalized": lambda case: any(request.penalized for request in case.requests)},
    happened={
        "penalized": (
            "a penalty made another token the target's best, where verify committed one",
            lambda run: any(_alone(run.requests[one.request]) and run.logits_changed(one) for one in run.verified),
        )
    },
)
