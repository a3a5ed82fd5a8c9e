"""Custom logit processors."""

from typing import Literal

from eagletwin.harness.core.case import Processor, Request

from .dimension import of_requests, st

SEEDS = 16


def _draw(draw: st.DrawFn, _request: Request, _vocabulary: int) -> Processor | None:
    kind: Literal["add", "forbid"] = draw(st.sampled_from(("add", "forbid")))
    processor = Processor(kind=kind, seed=draw(st.integers(0, SEEDS - 1)))
    return processor if draw(st.integers(0, 3)) else None


DIMENSION = of_requests(
    "processor",
    "logit processors",
    key="processor",
    example=Processor(),
    draw=_draw,
    kind=True,
    argument="enable_custom_logit_processor",
)
