"""Choices of experts that tie. An engine's rounding decides them, and all numbers of such a row follow from what it decided.

Where a number is wrong in a model with experts, the judge asks the reference again: first with the experts that the trace says
each row went to (routed.py), where it says so. In a CUDA graph nobody sees a router; then, and where the first did not help,
the bias of one expert is a little larger: that expert then wins each tie that it has lost by less. DeepSeek's bias is in the
choice alone, and in no number; gpt-oss' is in the weights of the chosen as well, where so little is within the bound.
If everything is right then, the engine decided a tie the other way. Called by judge.py.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from eagletwin.harness.families.recipe import Recipe
from eagletwin.reference.experts import BIAS
from eagletwin.reference.sizes import LlamaShape

from .bounds import Bounds

_ROUTER, _BIASED_ROUTER = "mlp.gate.weight", "mlp.router.bias"
# A rule of these compares numbers that follow from a choice of experts; others compare integers, or what comes before it.
_OF_TARGET = ("target.", "commit.path", "output.", "verify.")
_OF_DRAFT = ("draft.hidden_in", "draft.kv", "draft.scratch_kv", "draft.proposal", "tree.")


@dataclass(frozen=True, slots=True)
class Nudge:
    """In all layers with experts, of the target or of the draft, the bias of one expert is larger by `size`.

    A model without biases gets some, which are zero but for this one.
    """

    part: Literal["target", "draft"]
    expert: int
    size: float

    def of(self, part: Literal["target", "draft"], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The weights of that part with it."""
        found = dict(weights)
        for name in weights if part == self.part else ():
            if name.endswith(_BIASED_ROUTER):
                found[name] = weights[name].clone()
                found[name][self.expert] += self.size
            elif name.endswith(_ROUTER):
                router, bias = weights[name], name.removesuffix("weight") + BIAS
                found[bias] = weights[bias].clone() if bias in weights else router.new_zeros(len(router))
                found[bias][self.expert] += self.size
        return found


def follows_from_experts(rule: str) -> bool:
    """Whether what this rule compares follows from numbers of rows that went to experts."""
    return rule.startswith((*_OF_TARGET, *_OF_DRAFT))


# How ties in choices of experts are decided: by a nudge, as the trace has it, or as they are (None)
Ties = Nudge | Literal["as the trace"] | None


def nudges(recipe: Recipe, rule: str, bounds: Bounds) -> Iterator[Nudge]:
    """What may have been decided otherwise where this rule is broken first, the smallest first; none without experts.

    What experts are ranked by (an affinity and its bias, or a router's logit) is of the size of one, and two of them may each
    be off by the bound, as two logits.
    """
    of_parts: tuple[tuple[Literal["target", "draft"], LlamaShape, tuple[str, ...]], ...]
    of_parts = (("target", recipe.target, _OF_TARGET), ("draft", recipe.draft, _OF_DRAFT))
    for part, shape, rules in of_parts:
        if not shape.routed or not rule.startswith(rules):
            continue
        for size in (bounds.tie / 100, bounds.tie / 10, bounds.tie):  # the nearest tie alone, if it is enough
            for expert in range(shape.routed):
                yield Nudge(part, expert, size)
