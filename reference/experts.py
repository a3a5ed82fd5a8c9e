"""A feed-forward layer of experts: a router picks a few of them for each row. DeepSeek-V3 adds one that all rows share.

DeepSeek-V3: an expert's affinity to a row is a sigmoid. A bias is added to it for the choice alone, and not for the weight.
Groups are chosen first: those whose two best experts have the largest sum. Then the best experts of these groups are. Their
affinities are made to sum to one, and the routed sum is scaled. Source: DeepSeek-V3 (arXiv 2412.19437) §2.1.2, equations 12-16,
and V2 (arXiv 2405.04434) §2.2.2 for groups; how a group is scored, and the scale, are in DeepSeek's published model alone.

Qwen3-MoE: the best experts by the router's logits, with a softmax over the chosen ones as weights (Shazeer et al., arXiv
1701.06538, equations 3 and 5). A softmax over all of them, cut and made to sum to one, is the same number. No groups, no bias,
and no shared expert (Qwen3, arXiv 2505.09388, §2). Qwen3-Next adds a shared expert, times a gate of the row's own (that of
Qwen's own model, as Qwen1.5-MoE's).
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from .experts_followed import followed
from .norm import Weights
from .sizes import ExpertShape

BIAS = "e_score_correction_bias"  # of a router: what each expert's score is raised by for the choice


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts each row goes to, and with which weight: [R, K] each."""

    chosen: Tensor
    weight: Tensor


def gated(weights: Weights, prefix: str, inner: Tensor) -> Tensor:
    """A gated layer of a Llama, or one expert: inner [R, H] -> [R, H]. One without a gate squares a ReLU (Nemotron-H, arXiv
    2504.03624 §2.1; Primer, arXiv 2109.08668)."""

    def project(name: str, inputs: Tensor) -> Tensor:
        return linear(inputs, weights[f"{prefix}{name}.weight"], weights.get(f"{prefix}{name}.bias"))

    if f"{prefix}gate_proj.weight" not in weights:
        return project("down_proj", project("up_proj", inner).relu().square())
    return project("down_proj", silu(project("gate_proj", inner)) * project("up_proj", inner))


def ranked_by(score: Tensor, bias: Tensor | float, shape: ExpertShape) -> Tensor:
    """What experts are ranked by [R, X]: -inf for one of a group that is not kept. score [R, X], bias [X]."""
    if shape.groups == 1:
        return score + bias
    grouped = (score + bias).view(len(score), shape.groups, -1)  # [R, groups, X/groups]
    best = grouped.topk(2).values.sum(-1).topk(shape.kept).indices  # [R, kept]
    kept = torch.zeros(grouped.shape[:2], dtype=torch.bool).scatter(1, best, True)  # [R, groups]
    return torch.where(kept[..., None], grouped, -torch.inf).flatten(1)


def route(weights: Weights, prefix: str, shape: ExpertShape, inner: Tensor) -> Routing:
    """The experts of rows inner [R, H]. A bias changes the choice alone."""
    logits = linear(inner, weights[f"{prefix}gate.weight"])  # [R, X]
    affinity = logits.sigmoid() if shape.affinity == "sigmoid" else logits.softmax(-1)  # [R, X]
    score = affinity if shape.affinity == "sigmoid" else logits  # a softmax keeps their order
    bias = weights.get(f"{prefix}gate.{BIAS}", 0.0)
    own = ranked_by(score, bias, shape).topk(shape.chosen).indices
    chosen = followed(weights, f"{prefix}gate.", score + bias, own, shape.groups, shape.kept)
    weight = affinity.gather(1, chosen)  # [R, K]
    return Routing(chosen, weight / weight.sum(-1, keepdim=True))


def experts(weights: Weights, prefix: str, shape: ExpertShape, inner: Tensor) -> Tensor:
    """inner [R, H] -> [R, H]. prefix: of the layer's router and experts."""
    routing = route(weights, prefix, shape, inner)
    share = torch.zeros(len(inner), shape.count, dtype=inner.dtype).scatter(1, routing.chosen, routing.weight)  # [R, X]
    routed = torch.zeros_like(inner)
    for expert in range(shape.count):
        rows = share[:, expert].nonzero().flatten()
        own = gated(weights, f"{prefix}experts.{expert}.", inner[rows])
        routed = routed.index_add(0, rows, share[rows, expert, None] * own)
    return shape.scale * routed + (_shared(weights, prefix, inner) if shape.shared else 0.0)


def _shared(weights: Weights, prefix: str, inner: Tensor) -> Tensor:
    """The expert that all rows share; of Qwen3-Next times a sigmoid of one number of each row."""
    added = gated(weights, f"{prefix}shared_experts.", inner)
    gate = weights.get(f"{prefix}shared_expert_gate.weight")  # [1, H]
    return added if gate is None else linear(inner, gate).sigmoid() * added
