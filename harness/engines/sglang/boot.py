"""Import SGLang, and build the real Scheduler and EAGLE worker of a configuration. Called by zygote.py and worker.py.

What is changed on the way is listed by name in SHIMS, which every trace carries. On a machine without a GPU: host functions
that mean nothing on a CPU, and module flags that send SGLang to its own Triton kernels instead of absent C++ ones. On one with
a GPU: cuda.py.
"""

import contextlib
import importlib
import inspect
import tempfile
from pathlib import Path
from typing import Any

from eagletwin.harness.case import Case, SGLangSettings
from eagletwin.harness.engines.mode import CPU, Mode
from eagletwin.harness.models.recipes import RECIPES
from eagletwin.harness.models.store import checkpoints, other_checkpoints

from . import cuda, families, new_weights, parts, remembered, stubs, uncompiled
from .eras import cuda_literals, draft_attention, image_processors, sampling, tree_kernels, triton_twins, workers
from .limits import NotDriven

SHIMS: list[str] = []

# Of a release that does not have one of them, or cannot import it here, what it has in its place is imported later.
_IMPORTED_WHILE_BUILT = (
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.models.registry",
    "sglang.srt.arg_groups.pipeline",
    "sglang.srt.arg_groups.moe_hook",
    "sglang.srt.distributed.device_communicators.custom_all_reduce",
    "sglang.srt.distributed.device_communicators.pymscclpp",
    "sglang.srt.distributed.device_communicators.shm_broadcast",
    "sglang.srt.dllm.algorithm",
    "eagletwin.harness.engines.sglang.served.llama",
)

# What rank 0 calls for what came since the last iteration, before it hands that on to the others.
RECEIVE_OF_RANKS = "_pull_raw_reqs"


def import_sglang(mode: Mode = CPU) -> None:
    """Everything that is the same for all configurations. Takes seconds; once per process."""
    import torch

    torch.set_num_threads(1)
    if mode.device == "cpu":
        uncompiled.install(SHIMS)
    remembered.install(SHIMS)
    ask_transformers()
    image_processors.install(SHIMS)
    if mode.device == "cuda":
        cuda.prepare(SHIMS, mode)
    else:
        stubs.install(gpu=(*stubs.GPU, *cuda.absent(*stubs.IDLE, "xgrammar")))
        torch.cuda.synchronize = lambda *args, **kwargs: None
        torch.cuda.empty_cache = lambda: None
        # called on CPU tensors by code that overlaps streams; there is one stream here
        torch.Tensor.record_stream = lambda self, stream: None  # type: ignore[method-assign,assignment]
        SHIMS.append("torch.cuda.synchronize, torch.cuda.empty_cache, Tensor.record_stream: do nothing")
    for name in (
        "sglang.srt.managers.scheduler",
        "sglang.srt.speculative.eagle_worker_v2",
        "sglang.srt.speculative.multi_layer_eagle_worker_v2",
        "sglang.srt.speculative.eagle_utils",
        "sglang.srt.models.llama_eagle",
        "sglang.srt.models.llama_eagle3",
    ):
        importlib.import_module(name)
    if mode.device == "cpu":
        triton_twins.choose(SHIMS)
        tree_kernels.install(SHIMS)
        cuda_literals.install(SHIMS)
        # What each scheduler imports while it is built: imported here once, and not in each fork that builds one
        for name in _IMPORTED_WHILE_BUILT:
            with contextlib.suppress(Exception):  # whoever needs it imports it again, and is told
                importlib.import_module(name)


def ask_transformers() -> None:
    """Have transformers look for what is about to be stubbed: it looks once, keeps the answer, and would find the stubs."""
    from transformers.utils import import_utils

    for name in dir(import_utils):
        if name.startswith(("is_torchaudio", "is_torchcodec", "is_torchvision")) and name.endswith("_available"):
            getattr(import_utils, name)()


def build_scheduler(case: Case, mode: Mode = CPU, rank: int = 0, port: int = 0) -> Any:
    """The real Scheduler, with its target and draft workers, for this case's configuration. Raises NotDriven, and what SGLang
    raises.

    rank, port: of several ranks, this one; it returns when all have met at the port.
    """
    from sglang.srt.managers import scheduler as scheduler_module
    from sglang.srt.server_args import PortArgs, ServerArgs

    recipe = RECIPES[case.model]
    families.register(recipe.family)
    if mode.device == "cpu":
        triton_twins.choose(SHIMS)
        if mode.overlap:
            _allow_overlap()
        if mode.tp == 1:
            _meet_nobody()
        if case.samples:
            sampling.open_gate(SHIMS)
        if case.engine.sglang.deterministic:
            sampling.leave_kernels_as_they_are(SHIMS)
    settings = case.engine.sglang
    if mode.attention != "triton" and (mode.device == "cpu" or mode.dtype == "float32"):
        raise NotDriven(f"attention backend {mode.attention} with {mode.device} and {mode.dtype}: it needs cuda and bfloat16")
    if mode.tp > 1 and not hasattr(getattr(scheduler_module, "SchedulerRequestReceiver", None), RECEIVE_OF_RANKS):
        raise NotDriven(f"this release has no {RECEIVE_OF_RANKS}, by which several ranks are driven (0.5.13 and later have)")
    if recipe.kv_heads % mode.tp:
        raise NotDriven(f"{case.model} has {recipe.kv_heads} KV heads, which are not to be dealt out to {mode.tp} ranks")
    target, draft = (other_checkpoints if settings.update_weights else checkpoints)(case.model)
    workers.choose(case, SHIMS)
    if recipe.mtp_layers and mode.device == "cpu":
        draft_attention.use_triton(SHIMS)
    arguments = ServerArgs(
        model_path=str(target),
        speculative_draft_model_path=str(draft),
        speculative_algorithm=recipe.algorithm,
        speculative_num_steps=case.num_steps,
        speculative_eagle_topk=case.topk,
        speculative_num_draft_tokens=case.num_draft_tokens,
        page_size=case.page_size,
        chunked_prefill_size=case.chunked_prefill_size,
        disable_radix_cache=not settings.radix_cache,
        enable_multi_layer_eagle=recipe.mtp_layers > 0,
        disable_hybrid_swa_memory=recipe.chained and recipe.family == "llama",  # see served/mtp.py
        swa_full_tokens_ratio=1.0,  # slots of layers with a window: as many as of others, since no window here is left
        max_running_requests=settings.max_running_requests,
        max_total_tokens=settings.max_total_tokens,
        context_length=settings.context_length or None,
        device=mode.device,
        dtype=mode.dtype,
        attention_backend=mode.attention,
        triton_attention_num_kv_splits=1,  # more splits change the order of sums, and so the last bits
        sampling_backend="pytorch",
        disable_overlap_schedule=not (mode.overlap or workers.overlaps(case)),
        **cuda.graph_arguments(mode),
        **_sampling_arguments(settings),
        disable_custom_all_reduce=True,
        tp_size=mode.tp,
        nccl_port=port,
        skip_tokenizer_init=True,
        mem_fraction_static=0.1,
        random_seed=0,
        log_level="error",
    )
    ports = PortArgs.init_new(arguments)
    _publish(scheduler_module, arguments, rank)
    parameters = list(inspect.signature(scheduler_module.Scheduler.__init__).parameters)[3:]
    mine = {"dp_rank": None, "gpu_id": rank, "tp_rank": rank}
    ranks = {name: mine.get(name, 0) for name in parameters}  # up to 0.5.20
    with cuda.watch_captures(mode):
        scheduler = scheduler_module.Scheduler(arguments, ports, **ranks)
    _remove_leftovers(scheduler)
    if settings.update_weights:
        new_weights.give(scheduler, case.model, settings.update_weights)
    return scheduler


def _sampling_arguments(settings: SGLangSettings) -> dict[str, bool | float]:
    """Named only where they are asked for: releases before 0.5.14 do not know the first."""
    asked = {
        "speculative_use_rejection_sampling": settings.rejection_sampling,
        "enable_deterministic_inference": settings.deterministic,
    }
    thresholds = {
        "speculative_accept_threshold_single": settings.accept_single,
        "speculative_accept_threshold_acc": settings.accept_acc,
    }
    return {name: True for name, wanted in asked.items() if wanted} | {name: at for name, at in thresholds.items() if at < 1}


def changed(scheduler: Any, case: Case, mode: Mode = CPU) -> str:
    """Settings that SGLang silently made others of than those it was given; empty if none. A case says what it runs with."""
    worker, settings = scheduler.draft_worker, case.engine.sglang
    asked_and_used: dict[str, tuple[Any, Any]] = {
        "topk": (case.topk, worker.topk),
        "num_steps": (case.num_steps, worker.speculative_num_steps),
        "num_draft_tokens": (case.num_draft_tokens, worker.speculative_num_draft_tokens),
        "page_size": (case.page_size, scheduler.page_size),
        "chunked_prefill_size": (case.chunked_prefill_size, scheduler.chunked_prefill_size),
        "max_running_requests": (settings.max_running_requests, scheduler.max_running_requests),
        "max_total_tokens": (settings.max_total_tokens, scheduler.max_total_num_tokens),
        "dtype": (mode.dtype, str(next(scheduler.tp_worker.model_runner.model.parameters()).dtype).removeprefix("torch.")),
        "overlap": (mode.overlap or workers.overlaps(case), bool(scheduler.enable_overlap)),
        # a graph for more requests than may run at once is of no use, and SGLang says that it makes none
        "graphs": (tuple(n for n in mode.graphs if n <= settings.max_running_requests), cuda.captured(scheduler)),
    }
    if mode.device == "cuda":
        asked_and_used["attention"] = (parts.CLASSES[mode.attention], parts.attention(scheduler))
    return ", ".join(f"{name} from {asked} to {used}" for name, (asked, used) in asked_and_used.items() if asked != used)


def _allow_overlap() -> None:
    """Releases that know EAGLE on a CPU turn their overlap scheduler off there (0.5.16 and later); earlier ones do not."""
    hook: Any = importlib.import_module("sglang.srt.arg_groups.speculative_hook")
    if hasattr(hook, "_disable_overlap_schedule_for_cpu"):
        hook._disable_overlap_schedule_for_cpu = lambda _arguments: None
        SHIMS.append("speculative_hook._disable_overlap_schedule_for_cpu: does nothing")


def _meet_nobody() -> None:
    """One rank alone needs no server to meet others at: torch keeps what it would keep there in this process."""
    import torch.distributed
    from torch._C._distributed_c10d import HashStore

    meet = torch.distributed.init_process_group

    def alone(backend: str | None = None, init_method: str | None = None, **kwargs: Any) -> None:  # noqa: ARG001
        meet(backend, store=HashStore(), **kwargs)

    torch.distributed.init_process_group = alone  # type: ignore[assignment]
    SHIMS.append("torch.distributed.init_process_group: one rank, with a store in its own memory")


def _remove_leftovers(scheduler: Any) -> None:
    """Unlink what the scheduler made for processes that do not exist here: its load snapshot in /dev/shm (small in
    containers), and the socket files in this engine's own TMPDIR."""
    snapshot = getattr(getattr(scheduler, "load_snapshot_writer", None), "path", None)
    if isinstance(snapshot, str):
        Path(snapshot).unlink(missing_ok=True)
    for leftover in Path(tempfile.gettempdir()).glob("tmp*"):
        if not leftover.is_dir():
            leftover.unlink(missing_ok=True)


def _publish(scheduler_module: Any, arguments: Any, rank: int) -> None:
    """Hand the arguments to SGLang's process-wide configuration, where it has one (0.5.17 and later)."""
    publish = getattr(scheduler_module, "publish", None)
    if publish is None:
        return
    if hasattr(scheduler_module, "SpawnRanks"):  # 0.5.21 and later
        world_rank = scheduler_module.spawn_world_rank(arguments, tp_rank=rank, pp_rank=0)
        ranks = scheduler_module.SpawnRanks(world_rank=world_rank, dp_rank=None, gpu_id=rank)
        publish(arguments, role="scheduler", ranks=ranks)
    else:
        publish(arguments, role="scheduler")
