"""Schedulers and workers in releases: which worker runs, on which rank, with which configuration, and how its loop is
stepped."""

import importlib
import importlib.util
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from eagletwin.harness.core.case import Case
from eagletwin.harness.core.records import UNSAID, Finish
from eagletwin.harness.engines.inside import blame
from eagletwin.harness.engines.inside.blame import NotDriven
from eagletwin.harness.families import RECIPES

from ..stand_ins import stubs

# Things that SGLang renamed or moved, under each of their names. The newest comes first.
#
# Up to 0.5.12.post1 a worker is given a ModelWorkerBatch, which calls a chunk's place `extend_*`, and the next lengths lie in
# the next draft input. Up to 0.5.11 the bonus token is the `verified_id`, and up to 0.5.10.post1 the links of a tree are
# `retrive_*`.


def pick(owner: Any, *names: str) -> Any:
    """The first attribute of these names that `owner` has."""
    for name in names:
        if hasattr(owner, name):
            return getattr(owner, name)
    raise AttributeError(f"{type(owner).__name__} has none of {', '.join(names)}")


def chunk(batch: Any) -> tuple[list[int], list[int]]:
    """Where each request's rows of a prefill batch start, and how many there are."""
    return list(pick(batch, "prefix_lens", "extend_prefix_lens")), list(pick(batch, "extend_lens", "extend_seq_lens"))


def bonus_tokens(draft_input: Any) -> Tensor:
    """The last committed token of each request [b]."""
    tokens: Tensor = pick(draft_input, "bonus_tokens", "verified_id")
    return tokens


def new_seq_lens(result: Any) -> Tensor:
    """Lengths of the requests when a round is over [b]."""
    lengths = getattr(result, "new_seq_lens", None)
    found: Tensor = result.next_draft_input.new_seq_lens if lengths is None else lengths
    return found


def links(verify_input: Any) -> dict[str, Tensor]:
    """Who is whose child in the trees of a batch [b, D], by the names that a trace has for it."""
    return {
        "retrieve_index": pick(verify_input, "retrieve_index", "retrive_index"),
        "next_token": pick(verify_input, "retrieve_next_token", "retrive_next_token"),
        "next_sibling": pick(verify_input, "retrieve_next_sibling", "retrive_next_sibling"),
    }


def drafts_kept(output: Any) -> list[int]:
    """How many drafts each request of the batch has committed, from the result of the older worker's verify."""
    counts = pick(output, "num_correct_drafts_per_req_cpu", "num_accepted_drafts_per_req_cpu", "accept_length_per_req_cpu")
    return list(counts)


def tokens_kept(output: Any) -> Tensor:
    """The committed tokens of all requests, one request after another, from the same result."""
    tokens: Tensor = pick(output, "accept_tokens", "verified_id")
    return tokens


# What a message to the detokenizer says of a request, beside its tokens, under each of its names. The newest comes first.
#
# The accepted drafts are `spec_accepted_tokens` up to 0.5.10.post1 and `spec_accepted_drafts` in 0.5.11, and their histogram is
# `spec_acceptance_histogram` up to there. A field that a release does not have is recorded as UNSAID, and the judge says so.

# What a trace calls it -> what the message does. One entry a request in each.
_COUNTS: dict[str, tuple[str, ...]] = {
    "prompt_tokens": ("prompt_tokens",),
    "completion_tokens": ("completion_tokens",),
    "cached_tokens": ("cached_tokens",),
    "verify_ct": ("spec_verify_ct",),
    "correct_drafts": ("spec_num_correct_drafts", "spec_accepted_drafts", "spec_accepted_tokens"),
    "retractions": ("retraction_counts",),
}
_HISTOGRAM = ("spec_correct_drafts_histogram", "spec_acceptance_histogram")
_KINDS: dict[str, Finish] = {"length": Finish.LENGTH, "stop": Finish.STOP, "abort": Finish.ABORT}


def finish(reason: dict[str, Any]) -> dict[str, int]:
    """Why a request ended, and by what: its last token, or how many it was to have. -1: not said, or no number."""
    numbers = {"finish": int(_KINDS.get(str(reason.get("type")), Finish.OTHER))}
    for name in ("matched", "length"):
        value = reason.get(name)
        numbers[f"finish_{name}"] = value if isinstance(value, int) else -1
    return numbers


def counts(payload: Any, n: int) -> dict[str, int]:
    """What the message counts for its request number n."""
    found = {name: _entry(payload, names, n) for name, names in _COUNTS.items()}
    details = _entry(payload, ("cached_tokens_details",), n) or {}  # of a request with nothing cached there are none
    found |= {f"cached_{tier}": details.get(tier) for tier in ("device", "host")}
    return {name: UNSAID if value is None else int(value) for name, value in found.items()}


def histogram(payload: Any, n: int) -> list[int] | None:
    """In how many rounds so many drafts were accepted, by how many; None: the message does not say."""
    found = _entry(payload, _HISTOGRAM, n)
    return None if found is None else list(found)


def decode_ids(payload: Any, n: int) -> list[int]:
    """The ids that the detokenizer goes on from: at first some of the prompt's as well."""
    return list(_entry(payload, ("decode_ids",), n) or ())


def _entry(payload: Any, names: tuple[str, ...], n: int) -> Any:
    """What the first field of these names that the message has holds for request n; None if there is none."""
    for name in names:
        values = getattr(payload, name, None)
        if values is not None and n < len(values):
            return values[n]
    return None


# Which of SGLang's two EAGLE workers runs a case, and with which scheduler.
#
# Up to 0.5.12.post1 there are two: `EAGLEWorker` (spec v1, any topk, without overlap) and `EAGLEWorkerV2` (spec v2, topk 1
# only, and only with the overlap scheduler; opt-in before 0.5.11). Cases run on v2 where it takes them. From 0.5.13 on v2 is
# the only one, and runs without overlap.
#
# The worker of a draft that reads the target's rows (frozen-KV MTP) does not take the argument that the scheduler gives it from
# 0.5.19 on, where batches do not overlap (docs/explanation/frozen-kv.md). Where that is so it runs with overlap, as on a GPU.

_OPT_IN = "SGLANG_ENABLE_SPEC_V2"


def has_v1() -> bool:
    """Whether this SGLang has both workers."""
    return importlib.util.find_spec("sglang.srt.speculative.eagle_worker") is not None


def overlaps(case: Case) -> bool:
    """Whether this SGLang runs the case with its overlap scheduler."""
    if RECIPES[case.model].frozen:
        return "without-overlap" not in blame.ON and not _takes_all_it_is_given()
    return has_v1() and (case.topk == 1 or "trees-on-v2" in blame.ON)


def refuse_frozen(modules: Sequence[str]) -> None:
    """Raises NotDriven for a release without these models, and for one that imports all models when its registry is: there the
    stand-in for the base class of a draft that reads the target's rows comes too late. 0.5.21 imports them when they are asked
    for."""
    refused = NotDriven("a draft that reads the target's rows: 0.5.21 and later are driven")
    stubs.stand_in_for_pretrained()
    try:
        found = [vars(importlib.import_module(name)) for name in modules]
    except ModuleNotFoundError as error:
        raise refused from error
    if any(stubs.lacks_pretrained(value) for names in found for value in names.values()):
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


# Which rank a scheduler is: a record of its own up to 0.5.17, what the process's context says after that.


class Rank(NamedTuple):
    """tp of tp_size ranks that share the work, in replica dp of its server."""

    tp: int
    tp_size: int
    dp: int


def rank_of(scheduler: Any) -> Rank:
    """The rank of this process's scheduler."""
    state: Any = getattr(scheduler, "ps", None)
    if state is None:
        state = importlib.import_module("sglang.srt.runtime_context").get_parallel()
    return Rank(int(state.tp_rank), int(state.tp_size), int(getattr(state, "dp_rank", None) or 0))


def first_layer(scheduler: Any) -> int:
    """The first of the target's layers that this process of a pipeline has."""
    return int(scheduler.tp_worker.model_runner.layer_info.start_layer)


# What a scheduler knows of its process: SGLang's process-wide configuration, and which rank it is.

# Of the first process of all.
_FIRST = dict.fromkeys(("gpu_id", "tp_rank", "moe_ep_rank", "pp_rank", "attn_cp_rank", "moe_dp_rank"), 0) | {"dp_rank": None}


def publish(scheduler_module: Any, arguments: Any, rank: int, stage: int) -> None:
    """Hand the arguments to SGLang's process-wide configuration, where it has one (0.5.17 and later).

    rank, stage: of tensor and of pipeline parallelism"""
    publish = getattr(scheduler_module, "publish", None)
    if publish is None:
        return
    if hasattr(scheduler_module, "SpawnRanks"):  # 0.5.21 and later
        world_rank = scheduler_module.spawn_world_rank(arguments, tp_rank=rank, pp_rank=stage)
        ranks = scheduler_module.SpawnRanks(world_rank=world_rank, dp_rank=None, gpu_id=rank + stage)
        publish(arguments, role="scheduler", ranks=ranks)
    else:
        publish(arguments, role="scheduler")


def ranks_of(scheduler: Any, rank: int) -> dict[str, int | None]:
    """Arguments of the scheduler's constructor that name its rank: up to 0.5.20 it has some. Raises NotDriven for a parameter
    that is not known here and has no default."""
    all_of_them = list(inspect.signature(scheduler.__init__).parameters.values())
    parameters = [each for each in all_of_them[3:] if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
    unknown = [each.name for each in parameters if each.name not in _FIRST and each.default is each.empty]
    if unknown:
        raise NotDriven(f"this release's Scheduler is built with {', '.join(unknown)}, and what that has to be is not known")
    ranks = _FIRST | {"gpu_id": rank, "tp_rank": rank}
    return {each.name: ranks[each.name] for each in parameters if each.name in ranks}


# How a scheduler's own loop is stepped: which loop it is, whom it asks for what came, and whether it may overlap on a CPU.

# What rank 0 calls for what came since the last iteration, before it hands that on to the others (0.5.13 and later).
RECEIVE_OF_RANKS = "_pull_raw_reqs"


def drives_ranks(scheduler_module: Any) -> bool:
    """Whether several ranks of this release can be stepped together."""
    return hasattr(getattr(scheduler_module, "SchedulerRequestReceiver", None), RECEIVE_OF_RANKS)


def event_loop(scheduler: Any) -> Callable[[], None]:
    """The loop that this scheduler's own process would run; up to 0.5.9 that process chooses between two."""
    names = ["event_loop_overlap" if scheduler.enable_overlap else "event_loop_normal"]
    loop: Callable[[], None] = pick(scheduler, "run_event_loop", *names)
    return loop


def allow_overlap(shims: list[str]) -> None:
    """Releases that know EAGLE on a CPU turn their overlap scheduler off there (0.5.16 and later); earlier ones do not.
    The oldest have no such module."""
    package = "sglang.srt.arg_groups"
    if importlib.util.find_spec(package) is None or importlib.util.find_spec(f"{package}.speculative_hook") is None:
        return
    hook: Any = importlib.import_module(f"{package}.speculative_hook")
    if hasattr(hook, "_disable_overlap_schedule_for_cpu"):
        hook._disable_overlap_schedule_for_cpu = lambda _arguments: None
        shims.append("speculative_hook._disable_overlap_schedule_for_cpu: does nothing")
