"""How often a choice of experts ties, and what becomes of the verdict: `python -m tests.families.routing_ties MODEL DTYPE`.

Generated greedy cases on the worker. A choice is one row of one layer. *Near*: with the scores off by what the bound allows,
another choice would be the best. *Otherwise*: the worker chose other experts than the reference, and was followed. *Error*:
the largest of a row, as a share of its bound.
"""

import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from eagletwin.cases.strategies import Focus, cases
from eagletwin.harness.core.run_spec import Mode
from eagletwin.harness.core.verdict import DECLARED_VIEW
from eagletwin.harness.engines.host import Host
from eagletwin.harness.judge import judge as judge_module
from eagletwin.reference import experts
from tests.lab.gpu.draw import draw_cases


class Count:
    """Stands in the place of `followed`, and counts what it is asked."""

    def __init__(self) -> None:
        self.rows = self.near = self.otherwise = 0

    def __call__(self, weights: Any, router: str, score: Tensor, own: Tensor, *groups: int) -> Tensor:
        found = experts.follow_routing(weights, router, score, own, *groups)
        chosen = weights.get(f"{router}{experts.CHOSEN}")
        if chosen is None:
            return found
        known = (chosen >= 0).all(-1)
        ranked = score.sort(-1, descending=True).values
        gap = ranked[:, own.shape[1] - 1] - ranked[:, own.shape[1]]
        off = weights[f"{router}{experts.WITHIN}"] * score.abs().amax(-1)
        self.rows += int(known.sum())
        self.near += int((known & (gap <= off)).sum())
        self.otherwise += int((found.sort(-1).values != own.sort(-1).values).any(-1).sum())
        return found


def main(model: str, dtype: str, topk: int = 1, count: int = 40, seed: int = 1) -> None:
    counted, told, untold = Count(), Counter[str](), Counter[str]()
    headroom, ties, choices = 0.0, 0, 0
    with tempfile.TemporaryDirectory() as folder, Host(mode=Mode(dtype=dtype)) as host:  # type: ignore[arg-type]
        for number, case in enumerate(draw_cases(cases(Focus(model=model, topk=topk), held=("model", "topk")), count, seed)):
            at = Path(folder, str(number))
            at.mkdir()
            trace = host.engine(case).run(case, at)
            verdict = judge_module.judge(trace)
            told[f"{verdict.status} {verdict.reason}".strip()] += 1
            headroom, ties, choices = max(headroom, verdict.headroom), ties + verdict.ties, choices + verdict.choices
            untold[
                "equal" if not judge_module.compare_trace(trace, frozenset(), DECLARED_VIEW)[0].divergences else "diverged"
            ] += 1
            with mock.patch.object(experts, "follow_routing", counted), mock.patch.object(experts, "follow_routing", counted):
                judge_module.compare_trace(trace, frozenset(), DECLARED_VIEW, "as the trace")
    print(f"{model} {dtype}: {dict(told)}; by the reference's own choices {dict(untold)}; error {headroom:.2f}")
    print(f"  choices of tokens: {choices}, ties {ties / max(1, choices):.1%}")
    share = [n / max(1, counted.rows) for n in (counted.near, counted.otherwise)]
    print(f"  choices of experts: {counted.rows}, near {share[0]:.2%}, otherwise {share[1]:.2%}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
