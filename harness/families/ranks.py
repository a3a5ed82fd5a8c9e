"""What of a case several ranks run that share the work of each layer (`--tp`)."""

from eagletwin.harness.core.case import Case
from eagletwin.harness.core.words import count

from . import RECIPES


def not_on_ranks(case: Case, ranks: int) -> str:
    """Why so many ranks do not run this case; empty if they do."""
    recipe, settings = RECIPES[case.model], case.engine.sglang
    if recipe.kv_heads % ranks:
        return f"{case.model} has {count(recipe.kv_heads, 'KV head')}, which cannot be divided among {ranks} ranks"
    if ranks > 1 and settings.plain_decode:
        return "plain decode on several ranks: not tried, its answers are those of one process"
    if ranks > 1 and settings.update_weights.startswith("distributed"):
        return "weights that another process broadcasts, to several ranks: not tried"
    return ""
