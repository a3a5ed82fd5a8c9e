"""Requests whose answers are looked at: one in chunks, streamed and retracted, one behind a cached page of it, and others."""

from typing import Any

from eagletwin.harness.core.case import Case, EngineSettings, Event, Request, SGLangSettings

PROMPT = (49, 53, 5, 33, 65, 62, 7, 70, 1)
LONG = (49, 53, 5, 33, 65, 62, 51, 38, 61, 45, 74, 27, 64, 17, 36, 17, 12, 79, 32)


def answered(
    name: str,
    a: dict[str, Any],
    b: dict[str, Any],
    *others: Request,
    events: tuple[Event, ...] = (),
    exercises: tuple[str, ...] = (),
) -> Case:
    """a, b: what these two requests ask for beside."""
    return Case(
        name=name,
        model="llama-tiny",
        num_steps=3,
        page_size=4,
        chunked_prefill_size=8,
        requests=(
            Request(id="a", prompt=LONG, max_new_tokens=14, stream=True, **a),
            Request(id="b", prompt=PROMPT, max_new_tokens=9, arrive=5, stop=(6, 70, 32), **b),
            *others,
        ),
        events=(Event(at=8, kind="retract"), *events),
        exercises=exercises,
        engine=EngineSettings(sglang=SGLangSettings(radix_cache=True, max_total_tokens=256)),
    )
