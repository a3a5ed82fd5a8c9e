"""How users run SGLang and a CPU does not by itself: CUDA graphs, overlap, the branches behind `.is_cuda`, DP attention."""

from collections.abc import Iterator
from typing import Any, get_args

from eagletwin.harness.core.case import AttentionBackend, Case
from eagletwin.harness.families import RECIPES, family_of

from .dimension import Refusal, of_requests, of_settings, on_one_rank, with_settings


def _refusals(case: Case) -> Iterator[Refusal]:
    settings = case.engine.sglang
    for name in ("graphs", "prefill_graphs"):
        sizes = getattr(settings, name)
        if list(sizes) != sorted(set(sizes)):
            yield f"{name} {list(sizes)}: not an ascending list", "sort it, each size once"
    if settings.prefill_graphs and not settings.graphs:
        yield "prefill_graphs without graphs: SGLang captures both, or neither", "give graphs, or leave both out"


_ELSEWHERE = {"pp": "not tried", "tp": "not tried"}
_PREFILL = _ELSEWHERE | {"dp": "a part of such a graph uses what another part counted, and a tape is captured part by part"}
PREFILL = of_settings(
    "prefill_graphs",
    "CUDA graphs of prefill",
    key="prefill-graphs",
    kind=True,
    modes=_PREFILL,
    values=((16, 64),),
    share=1 / 8,
)
GRAPHS = of_settings(
    "graphs",
    "CUDA graphs",
    key="graphs",
    kind=True,
    values=((1, 2, 4), (2, 4), (1, 2, 3), (4,)),  # sizes to which most batches are padded, too
    share=1,
    modes=_ELSEWHERE,
    without=lambda case: iter([with_settings(case, graphs=(), prefill_graphs=())]),
    simpler=lambda case: iter([with_settings(case, graphs=(size,)) for size in case.engine.sglang.graphs[::-1]][:-1]),
    refusals=_refusals,
)
_OFTEN: dict[str, Any] = {"modes": _ELSEWHERE, "values": (True,), "share": 7 / 8}
OVERLAP = of_settings("overlap", "overlap scheduler", key="overlap", **_OFTEN)
BRANCHES = of_settings("cuda_branches", "branches of CUDA", key="cuda-branches", **_OFTEN)
_BACKENDS = get_args(AttentionBackend)[1:]  # beside the usual one
ATTENTION = of_settings(
    "attention_backend",
    "FlashAttention",
    key="flash-attention",
    modes=_ELSEWHERE,
    values=_BACKENDS,
    share=1 / 2,  # a quarter in the end: the rest has a draft window, or a model that it does not run
)


def _of_ranks(case: Case) -> Iterator[Refusal]:
    if case.engine.sglang.attn_dp_size > 1 and not family_of(RECIPES[case.model]).dp_attention:
        yield (
            f"attn_dp_size with {case.model}: SGLang's class of the target has no DP attention, and its ranks end",
            f"use one of {', '.join(name for name, one in RECIPES.items() if family_of(one).dp_attention)}",
        )
    ranks, placed = case.engine.sglang.attn_dp_size, {request.id: request.dp_rank for request in case.requests}
    for request in case.requests:
        if request.dp_rank >= ranks:
            yield (
                f"request {request.id!r} is of dp_rank {request.dp_rank}, and engine.sglang.attn_dp_size is {ranks}",
                f"use a rank from 0 to {ranks - 1}",
            )
        elif request.after and placed.get(request.after, request.dp_rank) != request.dp_rank:
            yield (
                f"request {request.id!r} comes after {request.after!r}, which another rank of DP attention serves",
                "give both the same dp_rank",
            )


RANKS = of_settings(
    "attn_dp_size",
    "DP attention",
    key="dp-attention",
    kind=True,
    without=lambda case: iter([on_one_rank(case)]),
    refusals=_of_ranks,
    modes=_ELSEWHERE | {"dtype": "not tried"},
)
RANK = of_requests("dp_rank", "requests on another rank", size=int, without=None)
DIMENSIONS = (PREFILL, GRAPHS, OVERLAP, BRANCHES, ATTENTION, RANKS, RANK)
