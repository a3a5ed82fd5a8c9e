"""Which of SGLang's two EAGLE workers runs a case, and with which scheduler.

Up to 0.5.12.post1 there are two: `EAGLEWorker` (spec v1, any topk, without overlap) and `EAGLEWorkerV2` (spec v2, topk 1
only, and only with the overlap scheduler; opt-in before 0.5.11). Cases run on v2 where it takes them. From 0.5.13 on v2 is
the only one, and runs without overlap.
"""

import importlib.util
import os
from typing import Any

from eagletwin.harness.core.case import Case

from .. import switches

_OPT_IN = "SGLANG_ENABLE_SPEC_V2"


def has_v1() -> bool:
    """Whether this SGLang has both workers."""
    return importlib.util.find_spec("sglang.srt.speculative.eagle_worker") is not None


def overlaps(case: Case) -> bool:
    """Whether this SGLang runs the case with its overlap scheduler."""
    return has_v1() and (case.topk == 1 or "trees-on-v2" in switches.ON)


def is_v1(scheduler: Any) -> bool:
    """Whether this scheduler runs the older worker, which is one object for the rounds and the drafts."""
    return not hasattr(scheduler.draft_worker, "draft_worker")


def drafter(scheduler: Any) -> Any:
    """What drafts: the V2 worker has a worker for that."""
    return getattr(scheduler.draft_worker, "draft_worker", scheduler.draft_worker)


def choose(case: Case, shims: list[str]) -> None:
    """Ask for spec v2 where it is opt-in. Call it before the arguments are made."""
    if overlaps(case):
        os.environ[_OPT_IN] = "1"
        shims.append(f"{_OPT_IN}=1")
