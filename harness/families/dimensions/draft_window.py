"""Windows of draft decode, and their sinks."""

from collections.abc import Iterator

from eagletwin.harness.core.case import Case
from eagletwin.harness.families import RECIPES

from .dimension import Refusal, of_settings, with_settings


def _refusals(case: Case) -> Iterator[Refusal]:
    """A window that SGLang refuses, or would silently leave out."""
    recipe, settings = RECIPES[case.model], case.engine.sglang
    if settings.draft_window and not recipe.single_head:
        kind = "STANDALONE has no window of draft decode"
        if recipe.mtp_layers or recipe.frozen:
            kind = (
                "a multi-layer draft has no draft decode" if recipe.mtp_layers else "SGLang has none for a draft without rows"
            )
        yield f"draft_window with {case.model}: {kind}", "leave it out, or use llama-tiny"
    if settings.draft_sink and not settings.draft_window:
        yield f"draft_sink {settings.draft_sink} without draft_window", "give draft_window, or leave both out"
    elif settings.draft_sink and recipe.own_window:
        yield (
            f"draft_sink with {case.model}: the window of an EAGLE-3 head has no sink, and SGLang would leave it out",
            "leave draft_sink out, or use llama-tiny",
        )


SINK = of_settings("draft_sink", "a sink of the draft", argument="speculative_draft_sink_size")
WINDOW = of_settings(
    "draft_window",
    "a window of the draft",
    key="draft-windows",
    kind=True,
    without=lambda case: iter([with_settings(case, draft_window=0, draft_sink=0)]),
    refusals=_refusals,
    argument="speculative_draft_window_size",
)
DIMENSIONS = (SINK, WINDOW)
