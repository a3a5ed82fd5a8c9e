"""Which of SGLang's two EAGLE workers runs a case, and with which scheduler.

Up to 0.5.12.post1 there are two: `EAGLEWorker` (spec v1, any topk, without overlap) and `EAGLEWorkerV2` (spec v2, topk 1
only, and only with the overlap scheduler; opt-in before 0.5.11). Cases run on v2 where it takes them. From 0.5.13 on v2 is
the only one, and runs without overlap.

The worker of a draft that reads the target's rows (frozen-KV MTP) does not take the argument that the scheduler gives it from
0.5.19 on, where batches do not overlap (docs/findings/frozen-kv.md). Where that is so it runs with overlap, as on a GPU.
"""

import importlib
import importlib.util
import inspect
import os
from collections.abc import Sequence
from typing import Any

from eagletwin.harness.core.case import Case
from eagletwin.harness.families import RECIPES

from .. import switches
from ..not_driven import NotDriven
from ..stand_ins import kept_configuration

_OPT_IN = "SGLANG_ENABLE_SPEC_V2"


def has_v1() -> bool:
    """Whether this SGLang has both workers."""
    return importlib.util.find_spec("sglang.srt.speculative.eagle_worker") is not None


def overlaps(case: Case) -> bool:
    """Whether this SGLang runs the case with its overlap scheduler."""
    if RECIPES[case.model].frozen:
        return "without-overlap" not in switches.ON and not _takes_all_it_is_given()
    return has_v1() and (case.topk == 1 or "trees-on-v2" in switches.ON)


def refuse_frozen(modules: Sequence[str]) -> None:
    """Raises NotDriven for a release without these models, and for one that imports all models when its registry is: there the
    stand-in for the base class of a draft that reads the target's rows comes too late. 0.5.21 imports them when they are asked
    for."""
    refused = NotDriven("a draft that reads the target's rows: 0.5.21 and later are driven")
    kept_configuration.stand_in()
    try:
        found = [vars(importlib.import_module(name)) for name in modules]
    except ModuleNotFoundError as error:
        raise refused from error
    if any(kept_configuration.lacks_it(value) for names in found for value in names.values()):
        raise refused


def _takes_all_it_is_given() -> bool:
    """Whether the worker of a draft that reads the target's rows can be called as that of EAGLE is."""
    name = "sglang.srt.speculative.{}_worker_v2"
    eagle = importlib.import_module(name.format("eagle")).EAGLEWorkerV2.forward_batch_generation
    frozen = importlib.import_module(name.format("frozen_kv_mtp")).FrozenKVMTPWorkerV2.forward_batch_generation
    return set(inspect.signature(eagle).parameters) <= set(inspect.signature(frozen).parameters)


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
