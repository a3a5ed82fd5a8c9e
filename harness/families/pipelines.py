"""What of a case a pipeline runs: SGLang's stages with EAGLE, and what of them is judged."""

from collections.abc import Mapping

from eagletwin.harness.core.case import Case
from eagletwin.harness.core.words import count

from . import RECIPES


def not_in_stages(case: Case, stages: int) -> str:
    """Why a pipeline of so many stages does not run this case; empty if it does."""
    recipe, settings = RECIPES[case.model], case.engine.sglang
    if recipe.algorithm != "EAGLE" or recipe.mtp_layers or recipe.frozen:
        return "SGLang's stages run EAGLE with a head of one layer alone"
    if recipe.target.num_layers < stages:
        return f"its target has {count(recipe.target.num_layers, 'layer')}, and there are {stages} stages"
    if recipe.target.states or recipe.target.routed or recipe.window:
        return "of states, experts and windows a stage's own part is not judged"
    asked: Mapping[str, object] = {
        "adaptive steps": settings.adaptive is not None,
        "drafts that are drawn (rejection sampling)": settings.rejection_sampling,
        "hierarchical caches": settings.host_pages,
        "updated weights": settings.update_weights,
        "second engines (plain decode)": settings.plain_decode,
        "grammars": case.constrains,
        "sessions": case.sessions,
        "adapters": case.adapters,
        "aborts inside a step": any(event.step for event in case.events),
    }
    return next((f"{name} are not driven there" for name, wanted in asked.items() if wanted), "")
