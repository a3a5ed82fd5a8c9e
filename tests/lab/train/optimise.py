"""The optimizer of every model here: AdamW, a rate that rises and falls, gradients of bounded size."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .settings import Course

_WARM_UP = 0.05  # of all steps, in which the rate rises from nothing
_LAST = 0.05  # of the largest rate: what is left of it in the end
_REPORTS = 5


def optimise(
    parameters: Sequence[Tensor], course: Course, loss: Callable[[], Tensor], report: Callable[[int, float], None]
) -> None:
    """Change the parameters for `course.steps` steps, each to make one scalar of loss() smaller.

    report: now and then, with the number of steps done and the loss of the last one.
    """
    optimizer = torch.optim.AdamW(parameters, lr=course.rate, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: share_of_rate(step, course.steps))
    for step in range(1, course.steps + 1):
        optimizer.zero_grad()
        now = loss()
        now.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        if step % max(1, course.steps // _REPORTS) == 0:
            report(step, now.item())


def share_of_rate(step: int, steps: int) -> float:
    """Share of the largest rate at a step: a line up, then half a cosine down."""
    rising = max(1, round(_WARM_UP * steps))
    if step < rising:
        return (step + 1) / rising
    done = min(1.0, (step - rising) / max(1, steps - rising))
    return _LAST + (1 - _LAST) * (1 + math.cos(math.pi * done)) / 2
