"""Adaptive numbers of draft steps: which there are for which batches, and how they are chosen.

All drawn cases share an engine, which is built for STEPS: the last tier has all of them, for batches that no case has.
"""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace

from eagletwin.harness.core.case import Adaptive, Case, Tier
from eagletwin.harness.families import RECIPES

from .dimension import Refusal, of_settings, st, with_settings

STEPS = (0, 1, 2, 3, 4, 5)
WHOLE = Adaptive(tiers=(Tier(batch=1, steps=STEPS),))  # as an engine is built
_NOBODYS = 64  # requests in a batch
_BATCHES = (2, 3, 4)  # where a further tier may begin
# Simplest first: what switches soon
_KNOBS = {
    "alpha": (1.0, 0.5, 0.2),
    "interval": (1, 2, 3),
    "warmup": (0, 1, 3),
    "up": (0.0, -0.5, 0.5),
    "down": (-0.25, 0.5, 0.0, -1.0),
    "ceiling": (0.0, 1.0, 1.5),
}


def with_adaptive_steps(draw: st.DrawFn, case: Case) -> Case:
    """The case with a choice of its own; now and then, and when shrinking can have it, with none."""
    there = draw(st.integers(0, 15)) > 0
    few = st.integers(1, 2 ** len(STEPS) - 1).map(lambda bits: tuple(steps for steps in STEPS if bits >> steps & 1))
    tiers = {1: draw(few)}
    for batch in _BATCHES:
        if draw(st.integers(0, 3)) == 3:
            tiers[batch] = draw(few)
    tiers[_NOBODYS] = STEPS
    knobs: dict[str, Any] = {name: draw(st.sampled_from(values)) for name, values in _KNOBS.items()}
    adaptive = Adaptive(tiers=tuple(Tier(batch=batch, steps=steps) for batch, steps in tiers.items()), **knobs)
    return with_settings(case, adaptive=adaptive if there else None)


def _simpler(case: Case) -> Iterator[Case]:
    """Without one tier, without one number of steps of a tier, or with one knob as it usually is."""
    adaptive = case.engine.sglang.adaptive
    if adaptive is None:
        return
    for number, tier in enumerate(adaptive.tiers):
        before, after = adaptive.tiers[:number], adaptive.tiers[number + 1 :]
        if len(adaptive.tiers) > 1:
            yield with_settings(case, adaptive=replace(adaptive, tiers=(*before, *after)))
        for steps in tier.steps if len(tier.steps) > 1 else ():
            less = replace(tier, steps=tuple(one for one in tier.steps if one != steps))
            yield with_settings(case, adaptive=replace(adaptive, tiers=(*before, less, *after)))
    for name in _KNOBS:
        yield with_settings(case, adaptive=replace(adaptive, **{name: getattr(WHOLE, name)}))


def _refusals(case: Case) -> Iterator[Refusal]:
    """SGLang switches adaptive steps off, or does not start, where these do not hold."""
    adaptive, recipe = case.engine.sglang.adaptive, RECIPES[case.model]
    if adaptive is None:
        return
    if case.topk > 1 or not recipe.single_head:
        what = f"topk {case.topk}" if case.topk > 1 else case.model
        yield (
            f"adaptive steps with {what}: SGLang has them for chains of EAGLE and EAGLE-3 heads of one layer alone",
            "use topk 1 and a model with a single head, such as llama-tiny",
        )
    if case.num_steps not in adaptive.choices:
        yield (
            f"num_steps {case.num_steps} is none of the adaptive ones, {sorted(adaptive.choices)}",
            "SGLang does not start with it; use one of them",
        )
    if case.verify_nodes != case.num_steps + 1:
        yield f"num_draft_tokens {case.verify_nodes} with adaptive steps", "leave num_draft_tokens out"
    batches = [tier.batch for tier in adaptive.tiers]
    if sorted(set(batches)) != batches:
        yield f"adaptive tiers for batches of {batches}", "give each its own batch, the smallest first"


DIMENSION = of_settings(
    "adaptive",
    "adaptive steps",
    key="adaptive",
    size=lambda case: "off" if case.engine.sglang.adaptive is None else "on",
    says=lambda case: "a number of draft steps that changes between rounds",
    plain="num_steps in each",
    kind=True,
    kinds={"adaptive_rejection": lambda case: bool(case.engine.sglang.adaptive) and case.engine.sglang.rejection_sampling},
    modes={"pp": "not driven", "dp": "not tried"},
    simpler=_simpler,
    refusals=_refusals,
    happened={
        "more_steps": (
            "the adaptive number of draft steps rose from one round to the next",
            lambda run: any(before < after for before, after in run.switches),
        ),
        "fewer_steps": (
            "the adaptive number of draft steps fell from one round to the next",
            lambda run: any(before > after for before, after in run.switches),
        ),
        "no_steps": (
            "a round had no draft steps, as the adaptive choice was 0",
            lambda run: any(steps == 0 for _, steps in run.accepted),
        ),
        "steps_again": (
            "a round with draft steps came next after one without",
            lambda run: any(before == 0 for before, _ in run.switches),
        ),
    },
)
