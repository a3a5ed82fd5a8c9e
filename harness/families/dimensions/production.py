"""How users run SGLang and a CPU does not by itself: CUDA graphs, the overlap scheduler, the branches behind `.is_cuda`."""

from collections.abc import Iterator

from eagletwin.harness.core.case import Case

from .dimension import Refusal, of_settings, with_settings


def _refusals(case: Case) -> Iterator[Refusal]:
    settings = case.engine.sglang
    for name in ("graphs", "prefill_graphs"):
        sizes = getattr(settings, name)
        if list(sizes) != sorted(set(sizes)):
            yield f"{name} {list(sizes)}: not an ascending list", "sort it, each size once"
    if settings.prefill_graphs and not settings.graphs:
        yield "prefill_graphs without graphs: SGLang captures both, or neither", "give graphs, or leave both out"


_ELSEWHERE = {"pp": "not tried", "tp": "not tried"}
PREFILL = of_settings("prefill_graphs", "CUDA graphs of prefill", key="prefill-graphs", kind=True, modes=_ELSEWHERE)
GRAPHS = of_settings(
    "graphs",
    "CUDA graphs",
    key="graphs",
    kind=True,
    modes=_ELSEWHERE,
    without=lambda case: iter([with_settings(case, graphs=(), prefill_graphs=())]),
    simpler=lambda case: iter([with_settings(case, graphs=(size,)) for size in case.engine.sglang.graphs[::-1]][:-1]),
    refusals=_refusals,
)
OVERLAP = of_settings("overlap", "overlap scheduler", key="overlap", modes=_ELSEWHERE)
BRANCHES = of_settings("cuda_branches", "branches of CUDA", key="cuda-branches", modes=_ELSEWHERE)
DIMENSIONS = (PREFILL, GRAPHS, OVERLAP, BRANCHES)
