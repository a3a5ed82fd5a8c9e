"""Adaptive numbers of draft steps of a drawn case: which there are for which batches, and how they are chosen (strategies.py
draws the case).

All such cases share an engine, which is built for STEPS: the last tier has all of them, for batches that no case has.
"""

import msgspec
from hypothesis import strategies as st

from eagletwin.harness.core.case import Adaptive, Case, EngineSettings, Tier

STEPS = (0, 1, 2, 3, 4, 5)
NOBODYS = 64  # requests in a batch
BATCHES = (2, 3, 4)  # where a further tier may begin
# Simplest first: what switches soon
ALPHAS = (1.0, 0.5, 0.2)
INTERVALS = (1, 2, 3)
WARMUPS = (0, 1, 3)
UPS = (0.0, -0.5, 0.5)
DOWNS = (-0.25, 0.5, 0.0, -1.0)
CEILINGS = (0.0, 1.0, 1.5)

WHOLE = Adaptive(tiers=(Tier(batch=1, steps=STEPS),))  # as an engine is built


def adapted(draw: st.DrawFn, case: Case) -> Case:
    """The case with a choice of its own; now and then, and when shrinking can have it, with none."""
    there = draw(st.integers(0, 15)) > 0
    few = st.integers(1, 2 ** len(STEPS) - 1).map(lambda bits: tuple(steps for steps in STEPS if bits >> steps & 1))
    tiers = {1: draw(few)}
    for batch in BATCHES:
        if draw(st.integers(0, 3)) == 3:
            tiers[batch] = draw(few)
    tiers[NOBODYS] = STEPS
    adaptive = Adaptive(
        tiers=tuple(Tier(batch=batch, steps=steps) for batch, steps in tiers.items()),
        alpha=draw(st.sampled_from(ALPHAS)),
        interval=draw(st.sampled_from(INTERVALS)),
        warmup=draw(st.sampled_from(WARMUPS)),
        up=draw(st.sampled_from(UPS)),
        down=draw(st.sampled_from(DOWNS)),
        ceiling=draw(st.sampled_from(CEILINGS)),
    )
    settings = msgspec.structs.replace(case.engine.sglang, adaptive=adaptive if there else None)
    return msgspec.structs.replace(case, engine=EngineSettings(sglang=settings))
