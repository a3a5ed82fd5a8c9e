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
from itertools import combinations

import torch
from torch import Tensor
from torch.nn.functional import linear, silu, softplus

from .layers import Weights
from .sizes import ClampedExperts, ExpertShape

# Experts that somebody else chose, followed where rounding admits them: a choice can tie, and all numbers of a row follow.
#
# A router's weights may come with `chosen` [R, K], the experts that each row of this forward went to elsewhere (-1: not known),
# and `within`: how far off the difference of two scores may be there, as a share of the largest of the row. What is admitted
# would be the best if the scores were off by no more.

CHOSEN, WITHIN = "chosen", "within"


def follow_routing(weights: Weights, router: str, score: Tensor, own: Tensor, groups: int = 1, kept: int = 1) -> Tensor:
    """The experts of each row [R, K]: those that were given where they are admitted, else its own.

    score [R, X]: what experts are ranked by; own [R, K]. Groups are chosen first, by the sum of their two best experts, and a
    sum of two may be off by twice as much.
    """
    chosen = weights.get(f"{router}{CHOSEN}")
    if chosen is None:
        return own
    off = weights[f"{router}{WITHIN}"] * score.abs().amax(-1, keepdim=True)  # [R, 1]
    known = (chosen >= 0).all(-1)
    given = torch.where(known[:, None], chosen, own)
    taken = torch.zeros_like(score, dtype=torch.bool).scatter(1, given, True)  # [R, X]
    worst = torch.where(taken, score, torch.inf).amin(-1, keepdim=True)  # [R, 1]
    of_group = torch.arange(score.shape[-1]) // (score.shape[-1] // groups)  # [X]
    admitted = torch.zeros(len(score), dtype=torch.bool)
    for some in combinations(range(groups), kept):
        inside = torch.isin(of_group, torch.tensor(some))  # [X]
        best_left = torch.where(inside & ~taken, score, -torch.inf).amax(-1, keepdim=True)
        fits = (worst >= best_left - off)[:, 0] & ~(taken & ~inside).any(-1)
        admitted |= fits & _are_best(score, some, groups, off)
    return torch.where((admitted & known)[:, None], given, own)


def _are_best(score: Tensor, some: tuple[int, ...], groups: int, off: Tensor) -> Tensor:
    """Whether these groups may be those with the largest sums of two experts [R]."""
    others = [group for group in range(groups) if group not in some]
    if not others:
        return torch.ones(len(score), dtype=torch.bool)
    sums = score.view(len(score), groups, -1).topk(2).values.sum(-1)  # [R, groups]
    return sums[:, list(some)].amin(-1) >= sums[:, others].amax(-1) - 2 * off[:, 0]


BIAS = "e_score_correction_bias"  # of a router: what each expert's score is raised by for the choice


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts each row goes to, and with which weight: [R, K] each."""

    chosen: Tensor
    weight: Tensor


def gated_mlp(weights: Weights, prefix: str, inner: Tensor, limit: float = 0.0) -> Tensor:
    """A gated layer of a Llama, or one expert: inner [R, H] -> [R, H]. One without a gate squares a ReLU (Nemotron-H, arXiv
    2504.03624 §2.1; Primer, arXiv 2109.08668). limit: see ExpertShape."""

    def project(name: str, inputs: Tensor) -> Tensor:
        return linear(inputs, weights[f"{prefix}{name}.weight"], weights.get(f"{prefix}{name}.bias"))

    if f"{prefix}gate_proj.weight" not in weights:
        return project("down_proj", project("up_proj", inner).relu().square())
    gate, other = project("gate_proj", inner), project("up_proj", inner)
    if limit:
        gate, other = gate.clamp(max=limit), other.clamp(-limit, limit)
    return project("down_proj", silu(gate) * other)


def ranked_by(score: Tensor, bias: Tensor | float, shape: ExpertShape) -> Tensor:
    """What experts are ranked by [R, X]: -inf for one of a group that is not kept. score [R, X], bias [X]."""
    if shape.groups == 1:
        return score + bias
    grouped = (score + bias).view(len(score), shape.groups, -1)  # [R, groups, X/groups]
    best = grouped.topk(2).values.sum(-1).topk(shape.kept).indices  # [R, kept]
    kept = torch.zeros(grouped.shape[:2], dtype=torch.bool).scatter(1, best, True)  # [R, groups]
    return torch.where(kept[..., None], grouped, -torch.inf).flatten(1)


def route(weights: Weights, prefix: str, shape: ExpertShape, inner: Tensor, tokens: Tensor | None = None) -> Routing:
    """The experts of rows inner [R, H]. A bias changes the choice alone. tokens [R]: what rows consume, for a router with a
    table of each token's experts (DeepSeek-V4's first layers), which chooses nothing."""
    logits = linear(inner, weights[f"{prefix}gate.weight"])  # [R, X]
    if shape.affinity == "softmax":
        affinity, score = logits.softmax(-1), logits  # a softmax keeps their order
    else:
        affinity = score = logits.sigmoid() if shape.affinity == "sigmoid" else softplus(logits).sqrt()  # [R, X]
    table = weights.get(f"{prefix}gate.tid2eid")
    if table is not None and tokens is not None:
        chosen = table[tokens].long()
        weight = affinity.gather(1, chosen)
        return Routing(chosen, weight / weight.sum(-1, keepdim=True))
    bias = weights.get(f"{prefix}gate.{BIAS}", 0.0)
    own = ranked_by(score, bias, shape).topk(shape.chosen).indices
    chosen = follow_routing(weights, f"{prefix}gate.", score + bias, own, shape.groups, shape.kept)
    weight = affinity.gather(1, chosen)  # [R, K]
    return Routing(chosen, weight / weight.sum(-1, keepdim=True))


def experts(weights: Weights, prefix: str, shape: ExpertShape, inner: Tensor, tokens: Tensor | None = None) -> Tensor:
    """inner [R, H] -> [R, H]. prefix: of the layer's router and experts; tokens: see `route`."""
    routing = route(weights, prefix, shape, inner, tokens)
    share = torch.zeros(len(inner), shape.count, dtype=inner.dtype).scatter(1, routing.chosen, routing.weight)  # [R, X]
    routed = torch.zeros_like(inner)
    for expert in range(shape.count):
        rows = share[:, expert].nonzero().flatten()
        own = gated_mlp(weights, f"{prefix}experts.{expert}.", inner[rows], shape.limit)
        routed = routed.index_add(0, rows, share[rows, expert, None] * own)
    return shape.scale * routed + (_shared_expert(weights, prefix, inner, shape.limit) if shape.shared else 0.0)


def _shared_expert(weights: Weights, prefix: str, inner: Tensor, limit: float) -> Tensor:
    """The expert that all rows share; of Qwen3-Next times a sigmoid of one number of each row."""
    added = gated_mlp(weights, f"{prefix}shared_experts.", inner, limit)
    gate = weights.get(f"{prefix}shared_expert_gate.weight")  # [1, H]
    return added if gate is None else linear(inner, gate).sigmoid() * added


# A feed-forward layer of experts as gpt-oss has it: biases everywhere, a clamped gate, and a softmax over the chosen alone.
#
# The router's logits have a bias, and rank the experts; the weights of those that are chosen are the softmax of their logits.
# In an expert the gate is clamped from above and the other part from both sides, and one is added to the latter. Columns of
# gate and of the other part take turns. Source: OpenAI's model card of gpt-oss (arXiv 2508.10925) §2, for a clamped SwiGLU with
# a residual term; its numbers, and the order of columns, are in OpenAI's published model alone.


@dataclass(frozen=True, slots=True)
class Chosen:
    """Which experts each row goes to, and with which weight: [R, K] each."""

    experts: Tensor
    weight: Tensor


def route_clamped(weights: Weights, prefix: str, shape: ClampedExperts, inner: Tensor) -> Chosen:
    """The experts of rows inner [R, H]."""
    logits = linear(inner, weights[f"{prefix}router.weight"], weights[f"{prefix}router.bias"])  # [R, X]
    chosen = follow_routing(weights, f"{prefix}router.", logits, logits.topk(shape.chosen).indices)
    return Chosen(chosen, logits.gather(1, chosen).softmax(-1))


def clamped_expert(weights: Weights, prefix: str, shape: ClampedExperts, number: int, inner: Tensor) -> Tensor:
    """One expert: inner [R, H] -> [R, H]."""
    both = inner @ weights[f"{prefix}gate_up_proj"][number] + weights[f"{prefix}gate_up_proj_bias"][number]  # [R, 2I]
    gate = both[:, ::2].clamp(max=shape.limit)  # [R, I]
    other = both[:, 1::2].clamp(-shape.limit, shape.limit)  # [R, I]
    active = (other + 1) * gate * torch.sigmoid(shape.steepness * gate)  # [R, I]
    return active @ weights[f"{prefix}down_proj"][number] + weights[f"{prefix}down_proj_bias"][number]


def clamped_experts(weights: Weights, prefix: str, shape: ClampedExperts, inner: Tensor) -> Tensor:
    """inner [R, H] -> [R, H]. prefix: of the layer's router and experts."""
    chosen, found = route_clamped(weights, prefix, shape, inner), torch.zeros_like(inner)
    for number in range(shape.count):
        rows, rank = (chosen.experts == number).nonzero(as_tuple=True)
        own = clamped_expert(weights, f"{prefix}experts.", shape, number, inner[rows])
        found = found.index_add(0, rows, chosen.weight[rows, rank, None] * own)
    return found
