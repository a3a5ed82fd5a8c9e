"""Requests whose tokens are sent as they come."""

from .dimension import of_requests, st

DIMENSION = of_requests(
    "stream",
    "streams",
    row="tokens are sent as they come | false",
    key="stream",
    example=True,
    draw=lambda draw, request, vocabulary: draw(st.integers(0, 3)) > 0,
    kind=True,
    message="stream",
    happened={
        "streamed": (
            "a request was sent several tokens as they came",
            lambda run: any(run.streamed(number, record) for number, record in run.records if record.stage == "finished"),
        )
    },
)
