"""Sampling that leaves out tokens much less probable than the best one."""

from .dimension import of_requests, st

MIN_PS = (0.0, 0.5, 0.2, 0.05, 1.0)


DIMENSION = of_requests(
    "min_p",
    "min_p",
    row="then keep tokens with at least this share of the largest probability; not with `deterministic` | 0–1, 0",
    key="min-p",
    example=MIN_PS[1],
    draw=lambda draw, request, vocabulary: draw(st.sampled_from(MIN_PS)),
    kind=True,
    happened={
        "min_p_cuts": (
            "min_p took tokens away, at a verified node, that top_k and top_p had left",
            lambda run: any(map(run.min_p_cuts, run.verified)),
        )
    },
)
