"""Adapters (LoRA) of requests, how many may be in one batch, and what applies them."""

from collections.abc import Iterator
from typing import get_args

from eagletwin.harness.core.case import Adapter, Case, LoraBackend
from eagletwin.harness.families import RECIPES
from eagletwin.harness.families.adapters import takes_adapters

from .dimension import Refusal, draw_each, of_requests, of_settings, with_settings

# Simplest first. There are few, so that requests of one adapter meet.
ADAPTERS = (
    Adapter(),
    Adapter(seed=1, rank=2),
    Adapter(seed=2, rank=8, on="mlp"),
    Adapter(seed=3, rank=3, on="attention"),
    Adapter(seed=4, rank=4),
)


def _refusals(case: Case) -> Iterator[Refusal]:
    recipe = RECIPES[case.model]
    if case.adapters and not takes_adapters(recipe):
        why = "eagletwin has adapters of Llama's linear maps alone"
        if not recipe.is_eagle:
            why = f"SGLang refuses them with {'FROZEN_KV_MTP' if recipe.frozen else 'STANDALONE'}"
        yield f"an adapter with {case.model}: {why}", "use another model, such as llama-tiny"
    if case.adapters and case.engine.sglang.adaptive is not None:
        yield "an adapter and adaptive steps, which SGLang refuses together", "leave one of them out"


ADAPTER = of_requests(
    "adapter",
    "adapters",
    key="adapters",
    example=Adapter(),
    draw_case=draw_each("adapter", (None, *ADAPTERS)),
    refusals=_refusals,
    modes={
        "pp": "not driven",
        "dp": "SGLang refuses it",
        "dtype": "how far off their part of an output may be is known in float32 alone",
    },
    happened={
        "several_adapters": (
            "requests with different adapters, or with one and without, were in one decode batch",
            lambda run: any(map(run.several_adapters, run.decoded)),
        ),
        "prompt_of_another_adapter": (
            "with a prefix cache, a prompt began, for a page and more, like one of another adapter that was read before it",
            lambda run: any(map(run.begins_like_another, run.prefills)),
        ),
        "adapters_take_turns": (
            "requests had more adapters than may be in one batch (max_loras_per_batch), where none is one more",
            lambda run: (
                bool(run.case.adapters)
                and len({request.adapter for request in run.case.requests}) > run.case.engine.sglang.max_loras_per_batch
            ),
        ),
    },
)
BACKEND = of_settings(
    "lora_backend",
    "lora backend",
    has=lambda case: bool(case.adapters) and case.engine.sglang.lora_backend != get_args(LoraBackend)[0],
)
TURNS = of_settings(
    "max_loras_per_batch",
    "adapters in turns",
    has=lambda case: case.engine.sglang.max_loras_per_batch < len(case.adapters) + 1,
    plain="as many as there are adapters, and none",
    without=lambda case: iter([with_settings(case, max_loras_per_batch=min(8, len(case.adapters) + 1))]),
)
DIMENSIONS = (ADAPTER, BACKEND, TURNS)
